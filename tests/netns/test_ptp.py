"""The built-in ptp against the kernel: what it makes, removes, refuses, and takes back when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import blockbuster
import pytest

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.transport import Request
from multus_daemon.plugins.builtin import interfaces, ptp, veth
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.process import ToolRunner
from multus_daemon.runtime import deadline, portal
from multus_daemon.runtime.deadline import Deadline, Interrupted
from multus_daemon.spec.cni.errors import (
    CniError,
    InternalError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
)
from multus_daemon.spec.cni.result import Dns, to_object
from tests.aside import Aside, together
from tests.netns import reference
from tests.netns.direct import Direct, in_pod, wait_for_removals, wait_for_threads
from tests.netns.refusals import refuse_each
from tests.waiting import until

MakeCall = Callable[..., Call]

PTP = Direct(ptp)

DUAL: dict[str, Any] = {
    "cniVersion": "1.0.0",
    "ips": [
        {"address": "10.213.7.2/24", "gateway": "10.213.7.1"},
        {"address": "fd21:7::2/64", "gateway": "fd21:7::1"},
    ],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
}


def routes(netns: Any, *arguments: str) -> set[str]:
    """Routes as short text; IPv6 link-local ones left out."""
    return {
        " ".join(
            [
                item["dst"],
                *(f"{key} {item[key]}" for key in ("gateway", "dev", "scope", "prefsrc", "metric") if key in item),
            ]
        )
        for item in netns.ip(*arguments, "route", "show")
        if not item["dst"].startswith("fe80:")
    }


def tentative(netns: Any) -> set[str]:
    """The global addresses for which duplicate address detection runs."""
    return {
        item["local"]
        for link in netns.ip("addr", "show")
        for item in link["addr_info"]
        if item["scope"] == "global" and "tentative" in item
    }


def test_add_makes_what_it_reports(host: Any, netns: Any, make_call: MakeCall, ipam: Any) -> None:
    call = make_call("ADD", netns.path, mtu=1400)
    result = PTP.add(call)

    (pod_link,) = netns.ip("link", "show", "eth0")
    (host_link,) = [item for item in host.ip("link", "show") if item["ifname"].startswith("veth")]
    assert to_object(result, "1.0.0") == {
        "cniVersion": "1.0.0",
        "interfaces": [
            {"name": host_link["ifname"], "mac": host_link["address"]},
            {"name": "eth0", "mac": pod_link["address"], "sandbox": netns.path},
        ],
        "ips": [{"interface": 1, "address": "10.213.7.2/24", "gateway": "10.213.7.1"}],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    assert (pod_link["mtu"], host_link["mtu"]) == (1400, 1400)
    assert all("LOWER_UP" in link["flags"] for link in (pod_link, host_link))
    # The kernel brings this up to date by itself, later.
    until(lambda: host.ip("link", "show", host_link["ifname"])[0]["operstate"] == "UP", 10)
    assert routes(netns) == {
        "default gateway 10.213.7.1 dev eth0",
        "10.213.7.0/24 gateway 10.213.7.1 dev eth0 prefsrc 10.213.7.2",
        "10.213.7.1 dev eth0 scope link prefsrc 10.213.7.2",
    }
    assert routes(host) == {f"10.213.7.2 dev {host_link['ifname']} scope host"}
    assert host.sysctl("net/ipv4/ip_forward") == "1"
    assert host.sysctl(f"net/ipv6/conf/{host_link['ifname']}/accept_ra") == "0"
    assert netns.reaches("10.213.7.1")
    assert host.reaches("10.213.7.2")
    assert ipam.calls == [("stub", call.invocation)]


def test_two_pods_reach_each_other_over_ipv6(host: Any, make_netns: Any, make_call: MakeCall, ipam: Any) -> None:
    pods = [make_netns(), make_netns()]
    for number, pod in enumerate(pods, 2):
        # The kernel would: nothing here waits for it, and every address can be used at once.
        for netns in (host, pod):
            netns.detect_duplicates()
        ipam.result = DUAL | {
            "ips": [
                {"address": f"10.213.7.{number}/24", "gateway": "10.213.7.1"},
                {"address": f"fd21:7::{number}/64", "gateway": "fd21:7::1"},
            ]
        }
        PTP.add(make_call("ADD", pod.path))
        assert tentative(pod) == tentative(host) == set()
    # It is from its link-local address that the host asks where the other pod is.
    assert [host.sysctl(f"net/ipv6/conf/{link}/accept_dad") for link in host.links()] == ["0", "0"]
    assert pods[0].reaches("fd21:7::3", wait=3)
    assert pods[1].reaches("10.213.7.2", wait=3)
    assert host.sysctl("net/ipv6/conf/all/forwarding") == "1"
    assert pods[0].sysctl("net/ipv6/conf/eth0/keep_addr_on_down") == "1"
    assert routes(pods[0], "-6") == {
        "default gateway fd21:7::1 dev eth0 metric 1024",
        "fd21:7::1 dev eth0 prefsrc fd21:7::2 metric 1024",
        "fd21:7::/64 gateway fd21:7::1 dev eth0 prefsrc fd21:7::2 metric 1024",
    }


def test_delete_removes_both_ends_and_can_be_repeated(host: Any, netns: Any, make_call: MakeCall, ipam: Any) -> None:
    PTP.add(make_call("ADD", netns.path))
    for _ in range(2):
        PTP.delete(make_call("DEL", netns.path))
        assert (host.links(), netns.links()) == (set(), set())
    assert ipam.verbs == ["ADD", "DEL", "DEL"]


@pytest.mark.parametrize("path", ["", "/nonexistent/netns"])
def test_delete_without_namespace_is_done_once_addresses_are_released(
    path: str, make_call: MakeCall, ipam: Any
) -> None:
    PTP.delete(make_call("DEL", path))
    assert ipam.verbs == ["DEL"]


@pytest.mark.parametrize("verb", ["add", "delete", "check"])
def test_the_hosts_own_namespace_is_refused(verb: str, make_call: MakeCall) -> None:
    with pytest.raises(InvalidNetnsError, match="the host's own network namespace"):
        getattr(PTP, verb)(make_call(verb.upper(), "/proc/self/ns/net"))


def test_delete_removes_the_link_although_ipam_fails(netns: Any, make_call: MakeCall, ipam: Any) -> None:
    PTP.add(make_call("ADD", netns.path))
    ipam.errors["DEL"] = TryAgainLaterError("locked")
    with pytest.raises(TryAgainLaterError, match="locked"):
        PTP.delete(make_call("DEL", netns.path))
    assert netns.links() == set()


# --- refusals before anything is touched -----------------------------------------------------------------------------


@pytest.mark.parametrize("section", [None, {}, {"type": ""}])
@pytest.mark.parametrize("verb", ["add", "check", "status"])
def test_ipam_must_be_named(verb: str, section: Any, netns: Any, make_call: MakeCall) -> None:
    with pytest.raises(InvalidNetworkConfigError, match=r"^no plugin name provided"):
        getattr(PTP, verb)(make_call(verb.upper(), netns.path, ipam=section))


def test_a_taken_name_is_found_before_ipam_is_asked(host: Any, netns: Any, make_call: MakeCall, ipam: Any) -> None:
    PTP.add(make_call("ADD", netns.path))
    before = (host.links(), routes(netns))
    with pytest.raises(InternalError, match=r'^container veth name \("eth0"\) already exists'):
        PTP.add(make_call("ADD", netns.path))
    assert ipam.verbs == ["ADD"]
    assert (host.links(), routes(netns)) == before


@pytest.mark.parametrize("gateway", [{}, {"gateway": "fd21:7::1"}])
def test_an_address_needs_a_gateway_of_its_family(
    gateway: dict[str, str], host: Any, netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    ipam.result = {"ips": [{"address": "10.213.7.2/24", **gateway}]}
    with pytest.raises(InvalidNetworkConfigError, match=r"for 10.213.7.2/24"):
        PTP.add(make_call("ADD", netns.path))
    assert ipam.verbs == ["ADD", "DEL"]
    assert (host.links(), netns.links()) == (set(), set())
    assert host.sysctl("net/ipv4/ip_forward") == "0"


# --- failures in the middle ------------------------------------------------------------------------------------------


def test_no_addresses(netns: Any, make_call: MakeCall, ipam: Any) -> None:
    ipam.result = {"cniVersion": "1.0.0"}
    with pytest.raises(InternalError, match=r"^IPAM plugin returned missing IP config"):
        PTP.add(make_call("ADD", netns.path))
    assert ipam.verbs == ["ADD", "DEL"]


def test_ipam_failure_is_passed_on_and_undone(netns: Any, make_call: MakeCall, ipam: Any) -> None:
    ipam.errors["ADD"] = CniError("no addresses left", "pool 1", code=117)
    with pytest.raises(CniError, match="no addresses left") as caught:
        PTP.add(make_call("ADD", netns.path))
    assert (caught.value.code, caught.value.details) == (117, "pool 1")
    assert ipam.verbs == ["ADD", "DEL"]
    assert netns.links() == set()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            {"routes": [{"dst": "10.99.0.0/16", "gw": "192.0.2.77"}]},
            "failed to add route '10.99.0.0/16 via 192.0.2.77 dev",
        ),
        ({"routes": [{"dst": "10.99.0.1/16"}]}, "failed to add route '10.99.0.1/16 via 10.213.7.1 dev eth0': Invalid"),
        (
            {"ips": [{"address": "10.213.7.2/24", "gateway": "10.213.7.1"}] * 2},
            'failed to add IP address 10.213.7.2/24 to "eth0": File exists',
        ),
    ],
)
def test_a_failing_step_leaves_nothing(
    result: dict[str, Any], message: str, host: Any, netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    ipam.result |= result
    with pytest.raises(InternalError) as caught:
        PTP.add(make_call("ADD", netns.path))
    assert caught.value.msg.startswith(message)
    assert '(interface "eth0")' in caught.value.msg
    assert (host.links(), netns.links()) == (set(), set())
    assert ipam.verbs == ["ADD", "DEL"]


def test_a_failure_on_the_host_leaves_nothing(
    host: Any, netns: Any, make_call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_keywords: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(ptp, "_host_side", refuse)
    with pytest.raises(PermissionError):
        PTP.add(make_call("ADD", netns.path))
    assert (host.links(), netns.links()) == (set(), set())
    assert ipam.verbs == ["ADD", "DEL"]


def test_a_kernel_that_does_not_tell_of_a_new_pair(
    netns: Any, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Rtnl.request

    def without_answer(kernel: Rtnl, request: Request) -> list[bytes]:
        real(kernel, request)
        return []

    monkeypatch.setattr(Rtnl, "request", without_answer)
    result = PTP.add(make_call("ADD", netns.path))
    assert result.interfaces[1].mac == netns.ip("link", "show", "eth0")[0]["address"]


def test_a_kernel_that_does_not_tell_the_same_index_twice(
    host: Any, netns: Any, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Rtnl.add_veth

    def without_peer(*arguments: Any, **keywords: Any) -> Link:
        told = real(*arguments, **keywords)
        # Both namespaces are new, so that their first links have the same number.
        assert told.index == told.peer
        return replace(told, peer=0)

    monkeypatch.setattr(Rtnl, "add_veth", without_peer)
    PTP.add(make_call("ADD", netns.path))
    assert netns.ip("address", "show", "eth0")[0]["addr_info"][0]["local"] == "10.213.7.2"


def test_the_containers_mac_is_of_one_link_and_of_no_maker(netns: Any, make_call: MakeCall) -> None:
    made = PTP.add(make_call("ADD", netns.path)).interfaces[1].mac
    assert made == netns.ip("link", "show", "eth0")[0]["address"]
    assert int(made[:2], 16) & 0b11 == 0b10


def test_forwarding_is_looked_at_once_a_request(
    netns: Any, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(namespaces, "ensure_sysctl", lambda *parts, value: asked.append(parts))

    def work(session: PodNetns) -> None:
        for verb in (ptp.add, ptp.delete, ptp.add):
            verb(make_call(verb.__name__[:3].upper(), netns.path), session)

    in_pod(netns.path, work)
    assert asked == [("ipv4", "ip_forward")]


@pytest.mark.parametrize("is_done_first", [False, True])
def test_every_request_can_fail(is_done_first: bool, host: Any, netns: Any, make_call: MakeCall, ipam: Any) -> None:
    ipam.result |= {"routes": [{"dst": "0.0.0.0/0"}]}
    # Forwarding stays on, as with the reference.
    host.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    before = reference.state(host), reference.state(netns)

    def check(at: int) -> None:
        assert (reference.state(host), reference.state(netns)) == before
        # The first two are the look for the interface and the pair.
        assert ipam.verbs == ["ADD", "DEL"] * max(0, at - 2)

    # The link is looked for, and made, up on the host; the container's address and routes; the host's.
    assert refuse_each(lambda: PTP.add(make_call("ADD", netns.path)), check, is_done_first=is_done_first) == 4


def test_a_failing_undo_hides_neither_the_cause_nor_the_next_step(
    host: Any, netns: Any, make_call: MakeCall, ipam: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ipam.result |= {"routes": [{"dst": "10.99.0.0/16", "gw": "192.0.2.77"}]}
    ipam.errors["DEL"] = InternalError("store is read-only")
    with pytest.raises(InternalError, match="failed to add route"):
        PTP.add(make_call("ADD", netns.path))
    assert host.links() == set()
    assert "release the addresses: store is read-only" in caplog.text


def test_a_link_that_appears_meanwhile_is_left_alone(
    host: Any, netns: Any, make_call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = veth.make

    def interfere(*arguments: Any, **keywords: Any) -> Any:
        netns.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other0")
        return real(*arguments, **keywords)

    monkeypatch.setattr(veth, "make", interfere)
    with pytest.raises(InternalError, match=r'^container veth name \("eth0"\) peer provided .* already exists'):
        PTP.add(make_call("ADD", netns.path))
    assert netns.links() == {"eth0", "other0"}
    assert (host.links(), ipam.verbs) == (set(), [])


def test_a_route_of_the_host_that_is_there_is_left_alone(host: Any, netns: Any, make_call: MakeCall) -> None:
    host.run("ip", "link", "add", "here0", "type", "veth", "peer", "name", "here1")
    host.run("ip", "link", "set", "here0", "up")
    host.run("ip", "route", "add", "10.213.7.2/32", "dev", "here0")
    PTP.add(make_call("ADD", netns.path))
    assert [route["dev"] for route in host.ip("route", "show", "10.213.7.2/32")] == ["here0"]


def test_a_taken_host_name_is_tried_again(
    host: Any, netns: Any, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.run("ip", "link", "add", "veth00000001", "type", "veth", "peer", "name", "other0")
    names = iter(["00000001", "00000002"])
    monkeypatch.setattr(secrets, "token_hex", lambda _size: next(names))
    result = PTP.add(make_call("ADD", netns.path))
    assert result.interfaces[0].name == "veth00000002"


def test_no_free_host_name(host: Any, netns: Any, make_call: MakeCall, monkeypatch: pytest.MonkeyPatch) -> None:
    host.run("ip", "link", "add", "veth00000001", "type", "veth", "peer", "name", "other0")
    monkeypatch.setattr(secrets, "token_hex", lambda _size: "00000001")
    with pytest.raises(InternalError, match="failed to find a free name"):
        PTP.add(make_call("ADD", netns.path))
    assert host.links() == {"veth00000001", "other0"}


def test_a_stop_while_ipv6_settles_undoes_everything(host: Any, netns: Any, make_call: MakeCall, ipam: Any) -> None:
    netns.detect_duplicates()
    # It takes longer than this test.
    netns.set_sysctl("net/ipv6/conf/default/dad_transmits", "30")
    ipam.result = DUAL
    work = Aside(PTP.add, make_call("ADD", netns.path, dad=True))
    while not netns.links():
        assert not work.done
        time.sleep(0.01)
    time.sleep(0.1)
    assert not work.done
    work.stop()
    time.sleep(0.001)
    # A second one must not cut the undoing short.
    work.stop()
    with pytest.raises(Interrupted):
        work.result()
    assert (host.links(), netns.links()) == (set(), set())
    assert ipam.verbs == ["ADD", "DEL"]


@pytest.mark.parametrize("is_last_step", [False, True])
async def test_a_stop_when_the_kernel_has_done_its_part(
    is_last_step: bool, host: Any, netns: Any, make_call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing waits any more the ADD ends well, and is whole."""
    real = interfaces.bring_up

    def bring_up(*arguments: Any, **keywords: Any) -> None:
        real(*arguments, **keywords)
        deadline.current().stop()

    monkeypatch.setattr(interfaces, "bring_up", bring_up)
    made = make_call("ADD", netns.path, ipMasq=not is_last_step)
    made = replace(made, tools=ToolRunner())
    work = asyncio.create_task(portal.run(Deadline(), functools.partial(PTP.add, made)))
    if is_last_step:
        result = await work
        assert (host.links(), netns.links()) == ({result.interfaces[0].name}, {"eth0"})
        assert ipam.verbs == ["ADD"]
        return
    with pytest.raises(asyncio.CancelledError):
        await work
    assert (host.links(), netns.links()) == (set(), set())
    assert not [line for line in reference.rules(host) if "container1" in line or "CNI-" in line]
    assert ipam.verbs == ["ADD", "DEL"]


# --- what the reference does not do ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "target"),
    [
        pytest.param([("10.213.7.2/32", "169.254.7.1")], "169.254.7.1", id="no subnet"),
        pytest.param([("10.213.7.2/24", "169.254.7.1")], "169.254.7.1", id="gateway elsewhere"),
        pytest.param([("10.213.7.2/24", "10.213.7.1"), ("10.213.7.3/24", "10.213.7.1")], "10.213.7.1", id="shared"),
        pytest.param(
            [("10.213.7.2/24", "10.213.7.1"), ("10.213.8.3/24", "10.213.7.1")], "10.213.7.1", id="two subnets"
        ),
        pytest.param([("10.213.7.2/31", "10.213.7.3")], "10.213.7.3", id="RFC 3021"),
        pytest.param([("fd21:7::2/128", "fd21:9::1")], "fd21:9::1", id="IPv6 no subnet"),
        pytest.param([("fd21:7::2/64", "fd21:7::1"), ("fd21:7::3/64", "fd21:7::1")], "fd21:7::1", id="IPv6 shared"),
    ],
)
def test_unusual_addressing_works(
    addresses: list[tuple[str, str]], target: str, host: Any, netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    v6 = ":" in target
    ipam.result = {
        "cniVersion": "1.0.0",
        "ips": [{"address": address, "gateway": gateway} for address, gateway in addresses],
        "routes": [{"dst": "::/0" if v6 else "0.0.0.0/0"}],
    }
    PTP.add(make_call("ADD", netns.path))
    for address, _ in addresses:
        source = address.partition("/")[0]
        assert netns.reaches(target, source=source, wait=3)
    found = routes(netns, "-6" if v6 else "-4")
    assert not [route for route in found if "/" in route and "gateway" not in route], found
    PTP.delete(make_call("DEL", netns.path))
    assert host.links() == set()


# --- dns, CHECK, STATUS ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        (None, Dns(nameservers=("192.0.2.53",))),
        ({}, Dns(nameservers=("192.0.2.53",))),
        ({"domain": ""}, Dns(nameservers=("192.0.2.53",))),
        ({"domain": "example.org"}, Dns(domain="example.org")),
        ({"search": []}, Dns()),
        ({"nameservers": ["198.51.100.1"]}, Dns(nameservers=("198.51.100.1",))),
    ],
)
def test_dns_of_the_configuration_replaces_that_of_ipam(
    configured: Any, expected: Dns, netns: Any, make_call: MakeCall, ipam: Any
) -> None:
    ipam.result["dns"] = {"nameservers": ["192.0.2.53"]}
    assert (PTP.add(make_call("ADD", netns.path, dns=configured))).dns == expected


def added(netns: Any, make_call: MakeCall) -> dict[str, Any]:
    return to_object(PTP.add(make_call("ADD", netns.path)), "1.0.0")


def test_check_finds_all_as_it_was_made(netns: Any, make_call: MakeCall, ipam: Any) -> None:
    ipam.result = DUAL | {"routes": [*DUAL["routes"], {"dst": "10.99.0.0/16", "gw": "10.213.7.1"}]}
    previous = added(netns, make_call)
    PTP.check(make_call("CHECK", netns.path, prevResult=previous))
    assert ipam.verbs == ["ADD", "CHECK"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("ip addr flush dev eth0", 'address 10.213.7.2/24 is not on "eth0"'),
        ("ip link del eth0", 'interface "eth0" is not there'),
        ("ip route del default", "route to 0.0.0.0/0 via 10.213.7.1 is not on"),
        ("ip route del 10.213.7.0/24", "route to 10.213.7.0/24 via 10.213.7.1 is not on"),
        ("ip link set eth0 address 02:00:00:00:00:01", 'MAC address of "eth0" is 02:00:00:00:00:01, not'),
        ("ip link set eth0 down", '"eth0" is down'),
    ],
)
def test_check_finds_damage(damage: str, message: str, netns: Any, make_call: MakeCall) -> None:
    previous = added(netns, make_call)
    netns.run(*damage.split())
    with pytest.raises(InternalError, match=message):
        PTP.check(make_call("CHECK", netns.path, prevResult=previous))


def test_check_needs_a_fitting_previous_result(netns: Any, make_call: MakeCall, ipam: Any) -> None:
    previous = added(netns, make_call)
    with pytest.raises(InvalidNetworkConfigError, match=r"^Required prevResult missing"):
        PTP.check(make_call("CHECK", netns.path))
    previous["interfaces"][1]["sandbox"] = "/run/netns/another"
    with pytest.raises(InternalError, match=r"^Sandbox in prevResult doesn't match configured netns"):
        PTP.check(make_call("CHECK", netns.path, prevResult=previous))
    ipam.errors["CHECK"] = InternalError("address is not reserved")
    with pytest.raises(InternalError, match="address is not reserved"):
        PTP.check(make_call("CHECK", netns.path, prevResult=previous))


# --- the daemon's side -----------------------------------------------------------------------------------------------


def test_nothing_leaks_and_the_daemon_stays_in_its_namespace(
    netns: Any, make_call: MakeCall, record_property: Callable[[str, object], None]
) -> None:
    def home() -> tuple[int, int]:
        return os.stat("/proc/self/ns/net").st_ino, os.stat("/proc/thread-self/ns/net").st_ino

    threads = set(threading.enumerate())
    Aside(PTP.add, make_call("ADD", netns.path)).result()
    Aside(PTP.delete, make_call("DEL", netns.path)).result()
    wait_for_threads(threads)
    wait_for_removals()
    before = (len(os.listdir("/proc/self/fd")), home())
    add_times, delete_times = [], []
    for _ in range(15):
        began = time.perf_counter()
        Aside(PTP.add, make_call("ADD", netns.path)).result()
        middle = time.perf_counter()
        Aside(PTP.delete, make_call("DEL", netns.path)).result()
        add_times.append(middle - began)
        delete_times.append(time.perf_counter() - middle)
    wait_for_threads(threads)
    wait_for_removals()
    assert (len(os.listdir("/proc/self/fd")), home()) == before
    record_property("add_ms", statistics.median(add_times) * 1000)
    record_property("delete_ms", statistics.median(delete_times) * 1000)


async def test_the_event_loop_is_not_blocked(netns: Any, make_call: MakeCall) -> None:
    """Each verb runs in a thread while the loop waits, as in the server."""
    # Of each round: what blocks it blocks it every time, and the machine now and then.
    longest = [0.0]

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            longest[-1] = max(longest[-1], time.perf_counter() - began)

    async def run(work: Callable[[Call], object], verb: str) -> None:
        await portal.run(Deadline(), functools.partial(work, make_call(verb, netns.path)))

    # The classes of the messages are compiled at their first use.
    await run(PTP.add, "ADD")
    await run(PTP.delete, "DEL")
    watcher = asyncio.create_task(watch())
    with blockbuster.blockbuster_ctx():
        for _ in range(5):
            longest.append(0.0)
            await run(PTP.add, "ADD")
            await run(PTP.delete, "DEL")
    watcher.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watcher
    # Removing a veth pair keeps its thread in the kernel for 20 ms.
    assert min(longest[1:]) < 0.25


def test_side_by_side(host: Any, make_netns: Any, make_call: MakeCall, ipam: Any) -> None:
    pods = [make_netns() for _ in range(8)]
    works = []
    for number, pod in enumerate(pods, 2):
        own = replace(ipam, result={"ips": [{"address": f"10.213.7.{number}/24", "gateway": "10.213.7.1"}]})
        works.append(functools.partial(PTP.add, replace(make_call("ADD", pod.path), plugin_for=own.plugin_for)))
    together(*works)
    assert len(host.links()) == 8
    for number, pod in enumerate(pods, 2):
        (address,) = pod.ip("-4", "addr", "show", "eth0")[0]["addr_info"]
        assert address["local"] == f"10.213.7.{number}"
    together(*(functools.partial(PTP.delete, make_call("DEL", pod.path)) for pod in pods))
    assert host.links() == set()


def test_sockets_are_of_the_namespace_that_the_thread_is_in(host: Any) -> None:
    kernel = Rtnl()
    try:
        assert kernel.link("lo").is_up
        assert kernel.addresses(1, socket.AF_INET6)
    finally:
        kernel.close()
