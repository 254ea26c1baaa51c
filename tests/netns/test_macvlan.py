"""The built-in macvlan against the kernel and beside the reference plugin."""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from multus_daemon.kernel.links import Rtnl
from multus_daemon.plugins.builtin import macvlan as plugin
from multus_daemon.plugins.builtin import single_link
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetnsError, TryAgainLaterError
from multus_daemon.spec.cni.result import Result, to_object
from tests.aside import Aside
from tests.fakes.runner import PlayedPlugin
from tests.netns import outcome, reference
from tests.netns.direct import Direct
from tests.waiting import PATIENCE

MakeCall = Callable[..., Call]

MACVLAN = Direct(plugin)

MAC = "02:00:00:00:00:77"
V4 = {"address": "10.213.7.2/24", "gateway": "10.213.7.1"}
V6 = {"address": "fd21:7::2/64", "gateway": "fd21:7::1"}
DEFAULTS = [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]


@pytest.fixture(autouse=True)
def master(host: Any) -> Any:
    """The host has an uplink, `up0`, to a network behind it, and its default route goes there."""
    return with_master(host)


def with_master(host: Any) -> Any:
    host.batch(
        "link add up0 mtu 1450 type veth peer name wire0",
        "link set up0 up",
        "link set wire0 up",
        "addr add 192.0.2.1/24 dev up0",
        "route add default via 192.0.2.254",
    )
    return host


@pytest.fixture
def call(make_call: MakeCall) -> MakeCall:
    """Makes a call of macvlan on `up0`; keywords as for `make_call`."""

    def make(verb: str, path: str, **keys: Any) -> Call:
        return make_call(verb, path, **{"type": "macvlan", "master": "up0", **keys})

    return make


def macvlan(addresses: Any, routes: Any = (), **keys: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"cniVersion": "1.0.0", "name": "testnet", "type": "macvlan", **keys}
    if addresses is not None:
        config["ipam"] = {"type": "static", "addresses": addresses, "routes": list(routes)}
    return config


def link_of(netns: Any, ifname: str = "eth0") -> Any:
    (link,) = netns.ip("-d", "link", "show", "dev", ifname)
    return link


# --- what it makes ---------------------------------------------------------------------------------------------------


def test_add_makes_what_it_reports(host: Any, netns: Any, call: MakeCall, ipam: Any) -> None:
    before = host.links()
    seen: list[set[str]] = []
    ipam.hook = lambda _verb: seen.append(netns.links())
    made = call("ADD", netns.path, mtu=1400, mac=MAC)
    result = MACVLAN.add(made)
    link = link_of(netns)
    assert (link["address"], link["mtu"], link["operstate"]) == (MAC, 1400, "UP")
    assert link["linkinfo"]["info_data"]["mode"] == "bridge"
    assert to_object(result, "1.0.0") == {
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "eth0", "mac": MAC, "sandbox": netns.path}],
        "ips": [{"interface": 0, "address": "10.213.7.2/24", "gateway": "10.213.7.1"}],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    # The plugin dhcp asks through it.
    assert seen == [{"eth0"}]
    assert host.links() == before
    assert ipam.calls == [("stub", made.invocation)]


def test_containers_reach_each_other(host: Any, make_netns: Any, call: MakeCall, ipam: Any) -> None:
    pods = [make_netns() for _ in range(2)]
    for number, pod in enumerate(pods, 2):
        ipam.result = {"ips": [{"address": f"10.213.7.{number}/24"}, {"address": f"fd21:7::{number}/64"}]}
        MACVLAN.add(call("ADD", pod.path))
    assert pods[0].reaches("10.213.7.3")
    assert pods[1].reaches("fd21:7::2")


def test_private_ones_do_not(make_netns: Any, call: MakeCall, ipam: Any) -> None:
    pods = [make_netns() for _ in range(2)]
    for number, pod in enumerate(pods, 2):
        ipam.result = {"ips": [{"address": f"10.213.7.{number}/24"}]}
        MACVLAN.add(call("ADD", pod.path, mode="private"))
    assert not pods[0].reaches("10.213.7.3", wait=0.3)


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_the_master_is_that_of_the_default_route(host: Any, netns: Any, call: MakeCall, family: str) -> None:
    if family == "v6":
        host.run("ip", "route", "del", "default")
        host.run("ip", "-6", "route", "add", "default", "dev", "up0")
    MACVLAN.add(call("ADD", netns.path, master=None))
    (master,) = host.ip("link", "show", "dev", "up0")
    assert link_of(netns)["link_index"] == master["ifindex"]


@pytest.mark.parametrize("named", [True, False])
def test_a_master_in_the_container(host: Any, netns: Any, call: MakeCall, ipam: Any, named: bool) -> None:
    with_master(netns)
    host.run("ip", "link", "del", "up0")
    keys = {"linkInContainer": True, "master": "up0" if named else None}
    ipam.result = {"ips": [V4]}
    MACVLAN.add(call("ADD", netns.path, ifname="net1", **keys))
    assert link_of(netns, "net1")["link"] == "up0"
    previous = {"interfaces": [{"name": "net1", "sandbox": netns.path}], "ips": [V4]}
    MACVLAN.check(call("CHECK", netns.path, ifname="net1", **keys, prevResult=previous))
    MACVLAN.delete(call("DEL", netns.path, ifname="net1", **keys))
    assert "net1" not in netns.links()


def test_the_names_of_the_host_do_not_matter(host: Any, netns: Any, call: MakeCall) -> None:
    host.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other")
    MACVLAN.add(call("ADD", netns.path, ipam={}))
    assert link_of(netns)["operstate"] == "UP"


def test_where_its_first_name_is_taken_nothing_is_undone(
    netns: Any, call: MakeCall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    netns.run("ip", "link", "add", "veth00000001", "type", "bridge")
    monkeypatch.setattr(single_link, "temporary_name", lambda _call: "veth00000001")
    with pytest.raises(InternalError, match='failed to create macvlan on "up0": File exists'):
        MACVLAN.add(call("ADD", netns.path, ipam={}))
    assert netns.links() == {"veth00000001"}
    assert caplog.messages == []


def test_the_length_of_the_queue(netns: Any, call: MakeCall) -> None:
    MACVLAN.add(call("ADD", netns.path, ipam={}, bcqueuelen=2345))
    assert link_of(netns)["linkinfo"]["info_data"]["bcqueuelen"] == 2345


def test_del_is_done_twice_and_without_a_namespace(netns: Any, call: MakeCall, ipam: Any, tmp_path: Path) -> None:
    MACVLAN.add(call("ADD", netns.path))
    for path in (netns.path, netns.path, f"{netns.path}-gone", ""):
        MACVLAN.delete(call("DEL", path, master="gone0"))
    assert netns.links() == set()
    assert ipam.verbs == ["ADD", *["DEL"] * 4]
    (tmp_path / "file").touch()
    with pytest.raises(InvalidNetnsError):
        MACVLAN.delete(call("DEL", str(tmp_path / "file")))


# --- what fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["add_link", "change", "batch"])
def test_a_failed_step_leaves_nothing(
    host: Any, netns: Any, call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    before = reference.state(host), reference.state(netns)

    def fail(*_arguments: Any, **_keys: Any) -> None:
        raise OSError(5, "no luck")

    monkeypatch.setattr(Rtnl, method, fail)
    with pytest.raises(InternalError, match="no luck"):
        MACVLAN.add(call("ADD", netns.path))
    assert (reference.state(host), reference.state(netns)) == before
    assert ipam.verbs == ([] if method in ("add_link", "change") else ["ADD", "DEL"])


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM])
def test_a_kernel_without_memory_leaves_what_the_next_add_removes(
    netns: Any, call: MakeCall, ipam: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_arguments: Any, **_keys: Any) -> None:
        raise OSError(code, "no memory")

    with monkeypatch.context() as patched:
        for method in ("change", "delete_link"):
            patched.setattr(Rtnl, method, fail)
        with pytest.raises(InternalError, match="no memory"):
            MACVLAN.add(call("ADD", netns.path))
    assert len(netns.links()) == 1
    MACVLAN.add(call("ADD", netns.path))
    assert netns.links() == {"eth0"}


def test_a_failed_ipam_plugin_leaves_nothing(netns: Any, call: MakeCall, ipam: Any) -> None:
    ipam.errors = {"ADD": TryAgainLaterError("full")}
    with pytest.raises(TryAgainLaterError):
        MACVLAN.add(call("ADD", netns.path))
    assert netns.links() == set()
    ipam.errors, ipam.result = {}, {"ips": []}
    with pytest.raises(InternalError, match="IPAM plugin returned missing IP config"):
        MACVLAN.add(call("ADD", netns.path))
    assert netns.links() == set()
    assert ipam.verbs == ["ADD", "DEL", "ADD", "DEL"]


def test_a_stopped_add_leaves_nothing(netns: Any, call: MakeCall, ipam: Any) -> None:
    entered = threading.Event()

    class Slow:
        def run(self, plugin_type: str, invocation: Any, netns: Any) -> Result:
            if invocation.verb == "ADD":
                entered.set()
                deadline.pause(PATIENCE)
            return Result()

    work = Aside(
        MACVLAN.add,
        dataclasses.replace(call("ADD", netns.path), plugin_for=lambda name, _: PlayedPlugin(name, Slow().run)),
    )
    assert entered.wait(PATIENCE)
    assert netns.links() == {"eth0"}
    work.stop()
    with pytest.raises(Interrupted):
        work.result()
    assert netns.links() == set()


def test_an_interface_that_exists_stays(netns: Any, call: MakeCall, ipam: Any) -> None:
    MACVLAN.add(call("ADD", netns.path))
    before = reference.state(netns)
    with pytest.raises(InternalError, match=r'container macvlan name \("eth0"\) already exists'):
        MACVLAN.add(call("ADD", netns.path))
    assert reference.state(netns) == before
    assert ipam.verbs == ["ADD"]


@pytest.mark.parametrize(
    ("change", "keys", "words"),
    [
        (["ip", "link", "set", "eth0", "address", MAC], {}, f'MAC address of "eth0" is {MAC}, not'),
        (["ip", "addr", "flush", "dev", "eth0"], {}, 'address 10.213.7.2/24 is not on "eth0"'),
        (["ip", "route", "del", "default"], {}, "route to 0.0.0.0/0 via 10.213.7.1 is not on"),
        (["ip", "link", "del", "eth0"], {}, 'interface "eth0" is not there'),
        (["ip", "link", "set", "eth0", "type", "macvlan", "mode", "vepa"], {}, 'mode of "eth0" is vepa, not bridge'),
        ([], {"mode": "private"}, 'mode of "eth0" is bridge, not private'),
        ([], {"master": "gone0"}, "failed to lookup master"),
        ([], {"mtu": 1451}, "invalid MTU 1451"),
    ],
)
def test_check_sees_what_has_changed(
    netns: Any, call: MakeCall, ipam: Any, change: list[str], keys: dict[str, Any], words: str
) -> None:
    previous = to_object(MACVLAN.add(call("ADD", netns.path)), "1.0.0")
    MACVLAN.check(call("CHECK", netns.path, prevResult=previous))
    if change:
        netns.run(*change)
    with pytest.raises(CniError, match=words):
        MACVLAN.check(call("CHECK", netns.path, prevResult=previous, **keys))


# --- beside the reference --------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "l2": macvlan(None, master="up0"),
    "l2-ipam-empty": macvlan(None, master="up0", ipam={}),
    "l2-dns": macvlan(None, master="up0", dns={"search": ["example.com"]}),
    "default-route": macvlan([V4]),
    "v4": macvlan([V4], master="up0"),
    "v4-default": macvlan([V4], DEFAULTS[:1], master="up0"),
    "v4-route-gw": macvlan([V4], [{"dst": "198.51.100.0/24", "gw": "10.213.7.9"}], master="up0"),
    "v4-without-gateway": macvlan([{"address": "10.213.7.2/24"}], [{"dst": "198.51.100.0/24"}], master="up0"),
    "v4-two": macvlan([V4, {"address": "10.214.7.2/16"}], master="up0"),
    "v6": macvlan([V6], DEFAULTS[1:], master="up0"),
    "dual": macvlan([V4, V6], DEFAULTS, master="up0", mtu=1300),
    "private": macvlan([V4], master="up0", mode="private"),
    "vepa": macvlan([V4], master="up0", mode="vepa"),
    "passthru": macvlan([V4], master="up0", mode="passthru"),
    "mtu": macvlan([V4], master="up0", mtu=1450),
    "mac": macvlan([V4], master="up0", mac=MAC),
    "mac-runtime": macvlan([V4], master="up0", mac="nonsense", runtimeConfig={"mac": MAC}),
    "ipam-dns-is-lost": macvlan([V4], master="up0", dns={"nameservers": ["192.0.2.53"]}),
    "0.3.1": macvlan([V4, V6], DEFAULTS, master="up0", cniVersion="0.3.1"),
}
NEW_CASES: dict[str, dict[str, Any]] = {
    "bcqueuelen": macvlan([V4], master="up0", bcqueuelen=500),
    "in-container": macvlan([V4], master="up0", linkInContainer=True),
    "in-container-default": macvlan(None, linkInContainer=True, mode="private"),
    "1.1.0": macvlan([V4, V6], DEFAULTS, master="up0", cniVersion="1.1.0"),
}
ALL_CASES = [*CASES, *(pytest.param(case, marks=reference.needs_new()) for case in NEW_CASES)]
needs = reference.needs("macvlan", "static")


def both_sides(host: Any, pod: Any) -> list[str]:
    lines = [f"host {line}" for line in reference.state(host)]
    lines += [f"pod {line}" for line in reference.state(pod)]
    links = [f"{name}: {link_of(pod, name).get('txqlen')}" for name in sorted(pod.links())]
    old: tuple[str, ...] = ()
    if reference.is_old():
        # v1.1.1 makes links without a queue, and sets neither of these.
        links, old = [], ("keep_addr_on_down", "ndisc_notify")
    return [*links, *(line for line in lines if not any(word in line for word in old))]


def prepared(netns: Any, config: dict[str, Any]) -> Any:
    return with_master(netns) if config.get("linkInContainer") else netns


def comparable(result: Any) -> Any:
    for item in result["interfaces"]:
        mac = item.pop("mac")
        assert item.pop("sandbox")
        item["fixed"] = mac == MAC
    return result


@needs
@pytest.mark.parametrize("case", ALL_CASES)
def test_both_leave_the_same(case: str, host: Any, another_host: Any, make_netns: Any) -> None:
    config = (CASES | NEW_CASES)[case]
    theirs = prepared(make_netns(), config)
    expected = outcome.of_reference("macvlan", "ADD", theirs.path, config, ifname="net1")
    expected_state = both_sides(host, theirs)
    with another_host() as side:
        with_master(side)
        ours = prepared(make_netns(), config)
        made = outcome.builtin("macvlan", "ADD", ours.path, config, ifname="net1")
        assert (made.msg, expected.msg) == ("", "")
        reference.require_same(both_sides(side, ours), expected_state)
        assert comparable(made.result) == comparable(expected.result)


@needs
@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_removes_what_the_other_made(case: str, ours_adds: bool, host: Any, netns: Any) -> None:
    config = (CASES | NEW_CASES)[case]
    prepared(netns, config)
    before = both_sides(host, netns)

    def run(verb: str, ours: bool) -> Any:
        if ours:
            made = outcome.builtin("macvlan", verb, netns.path, config, ifname="net1")
        else:
            made = outcome.of_reference("macvlan", verb, netns.path, config, ifname="net1")
        assert not made.failed, made.msg
        return made.result

    config = config | {"prevResult": run("ADD", ours_adds)}
    if config["cniVersion"] != "0.3.1":
        run("CHECK", not ours_adds)
    run("DEL", not ours_adds)
    reference.require_same(both_sides(host, netns), before)


@needs
@pytest.mark.parametrize(
    ("keys", "args"),
    [
        ({"master": "gone0"}, ""),
        ({"master": ""}, ""),
        ({"mtu": 1451}, ""),
        ({"mtu": -1}, ""),
        ({"mode": "source"}, ""),
        ({"mac": "nonsense"}, ""),
        ({}, "MAC=nonsense"),
        ({}, "FOO=1"),
        ({"mac": "01:00:5e:00:00:01"}, ""),
        ({"mtu": "1400"}, ""),
        ({"ipam": {"type": "static", "addresses": []}}, ""),
        ({"ipam": {"type": "no-such-plugin"}}, ""),
        ({"ipam": {"type": "static", "addresses": [V4, V4]}}, ""),
        pytest.param({"linkInContainer": True}, "", marks=reference.needs_new()),
        pytest.param({"bcqueuelen": -1}, "", marks=reference.needs_new()),
    ],
)
def test_both_refuse_for_the_same_reason(
    keys: dict[str, Any], args: str, host: Any, make_netns: Any, make_call: MakeCall
) -> None:
    if keys == {"master": ""}:
        host.run("ip", "route", "del", "default")
    ours_in, theirs_in = make_netns(), make_netns()
    config = macvlan([V4], master="up0") | keys
    before = reference.state(host), reference.state(ours_in)
    ours = outcome.builtin("macvlan", "ADD", ours_in.path, config, args=args)
    assert (reference.state(host), reference.state(ours_in)) == before
    theirs = outcome.of_reference("macvlan", "ADD", theirs_in.path, config, args=args)
    if theirs.msg == "Link not found":
        assert "No such device" in ours.msg
        return
    if keys.get("mode"):
        # A newer binary may know it, so the built-in leaves it to that; asked itself it says the same.
        assert ours.code == 2
        with pytest.raises(CniError) as caught:
            MACVLAN.add(make_call("ADD", ours_in.path, **config))
        ours = outcome.Outcome(msg=caught.value.msg, code=caught.value.code)
    outcome.require_same_failure(ours, theirs)


@needs
@reference.needs_new()
@hypothesis.given(
    keys=st.fixed_dictionaries(
        {},
        optional={
            "mode": st.sampled_from(["bridge", "private", "vepa", "passthru"]),
            "mtu": st.sampled_from([0, 67, 68, 1279, 1280, 1450, 1451]),
            "mac": st.sampled_from([MAC, MAC.replace(":", "-").upper(), "01:00:5e:00:00:01", ""]),
            "bcqueuelen": st.sampled_from([0, 1, 4096]),
        },
    ),
    addresses=st.one_of(st.none(), st.lists(st.sampled_from([V4, V6, {"address": "10.9.0.1/32"}]), max_size=3)),
    routes=st.lists(st.sampled_from([*DEFAULTS, {"dst": "198.51.100.0/24", "gw": "203.0.113.1"}]), max_size=2),
)
@reference.examples(20)
def test_any_configuration(keys: dict[str, Any], addresses: Any, routes: Any, host: Any, make_netns: Any) -> None:
    config = macvlan(addresses, routes, master="up0", **keys)
    found = []
    for side in ("theirs", "ours"):
        netns = make_netns()
        call = outcome.of_reference if side == "theirs" else outcome.builtin
        made = call("macvlan", "ADD", netns.path, config)
        # The reference leaves the interface behind where it fails.
        state = None if made.failed else both_sides(host, netns)
        found.append((made.failed, state, comparable(made.result) if made.result else None))
        assert not call("macvlan", "DEL", netns.path, config).failed
        assert netns.links() == set()
    assert found[1] == found[0]
