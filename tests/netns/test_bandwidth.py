"""The built-in bandwidth against the kernel and beside the reference plugin."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.transport import Socket
from multus_daemon.plugins.builtin import bandwidth as plugin
from multus_daemon.plugins.builtin.contract import Call
from tests.netns import outcome, reference
from tests.netns.direct import Direct
from tests.netns.refusals import refuse_each

MakeCall = Callable[..., Call]

BANDWIDTH = Direct(plugin)

PORT = "veth0a1b2c3d"
IFB = "bwp9a2f7cdb1bac"
INGRESS = {"ingressRate": 8_000_000, "ingressBurst": 1_600_000}
EGRESS = {"egressRate": 16_000_000, "egressBurst": 3_200_000}
BOTH = INGRESS | EGRESS
SLOW = {"Rate": 8_000, "Burst": 16_000}


@pytest.fixture
def pod(host: Any, netns: Any) -> Any:
    return paired(host, netns)


def paired(host: Any, netns: Any) -> Any:
    """A pod whose eth0 is a pair with PORT on the host, as ptp and bridge make it."""
    host.batch(
        f"link add {PORT} mtu 1420 type veth peer name eth0 netns {netns.path}",
        f"addr add 10.1.2.1/24 dev {PORT}",
        f"link set {PORT} up",
    )
    netns.batch("addr add 10.1.2.3/24 dev eth0", "link set eth0 up")
    return netns


def bandwidth(path: str, **keys: Any) -> dict[str, Any]:
    interfaces = [{"name": "br0"}, {"name": PORT}, {"name": "eth0", "sandbox": path}]
    given = {"cniVersion": "1.0.0", "interfaces": interfaces, "ips": [{"interface": 2, "address": "10.1.2.3/24"}]}
    return {"cniVersion": "1.0.0", "name": "testnet", "type": "bandwidth", "prevResult": given, **keys}


def shaping(host: Any) -> list[str]:
    """What tc shows of the host's links. An ifb link that is gone is a star."""
    lines = host.run("tc", "-d", "qdisc", "show").splitlines()
    for link in sorted(host.links()):
        lines += host.run("tc", "-d", "filter", "show", "dev", link, "parent", "ffff:").splitlines()
    # The reference's filter has a second action, which comes after the one that ends everything.
    text = re.sub(r"\taction order 2.*\n.*\n\n", "", "\n".join([*lines, ""]))
    return re.sub(r"refcnt \d+ |index \d+ ", "", text).splitlines()


def everything(host: Any) -> list[str]:
    return [*reference.state(host), *shaping(host)]


# --- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_the_pod_gets_and_sends_no_more_than_its_limit(host: Any, pod: Any, direction: str) -> None:
    """Sixty requests of 1 kB in half a second, of which 1 kB a second passes. The answers go the other way."""
    keys = {f"{direction}{key}": value for key, value in SLOW.items()}
    assert host.replies("10.1.2.3", count=60, size=1000, wait=5) > 50
    made = outcome.builtin("bandwidth", "ADD", pod.path, bandwidth(pod.path, **keys))
    assert not made.failed
    assert 0 < host.replies("10.1.2.3", count=60, size=1000, wait=0.2) < 20


@pytest.mark.parametrize("keys", [{}, {"ingressRate": 0, "egressBurst": 0}, {"runtimeConfig": {"bandwidth": None}}])
def test_without_limits_it_asks_the_kernel_nothing(keys: dict[str, Any], pod: Any, monkeypatch: Any) -> None:
    config = bandwidth(pod.path, **keys)

    def refuse(*_arguments: Any) -> None:
        pytest.fail("a socket")

    monkeypatch.setattr(Socket, "__init__", refuse)
    assert outcome.builtin("bandwidth", "ADD", pod.path, config).result == config["prevResult"]
    for verb in ("CHECK", "DEL"):
        assert outcome.builtin("bandwidth", verb, pod.path, config) == outcome.Outcome()


def test_the_configurations_own_keys_come_before_what_is_asked_for(host: Any, pod: Any) -> None:
    config = bandwidth(pod.path, **INGRESS, runtimeConfig={"bandwidth": EGRESS | {"egressBurst": 0}})
    assert not outcome.builtin("bandwidth", "ADD", pod.path, config).failed
    assert host.links() == {PORT}


def test_a_rate_above_32_bits(host: Any, pod: Any) -> None:
    config = bandwidth(pod.path, ingressRate=100_000_000_000, ingressBurst=4_294_967_295)
    assert not outcome.builtin("bandwidth", "ADD", pod.path, config).failed
    assert any("rate 100Gbit" in line for line in shaping(host))
    assert not outcome.builtin("bandwidth", "CHECK", pod.path, config).failed


@pytest.mark.parametrize("path", ["", "/nowhere", None])
@pytest.mark.parametrize("with_result", [True, False])
def test_del_removes_the_ifb_link_without_the_namespace(
    host: Any, pod: Any, path: str | None, with_result: bool
) -> None:
    config = bandwidth(pod.path, **BOTH)
    made = outcome.builtin("bandwidth", "ADD", pod.path, config)
    config["prevResult"] = made.result if with_result else None
    if path is None:
        pod.run("ip", "link", "del", "eth0")
    for _ in range(2):
        assert outcome.builtin("bandwidth", "DEL", pod.path if path is None else path, config) == outcome.Outcome()
    assert host.links() <= {PORT}


# --- what fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_done_first", [True, False])
def test_a_failed_add_leaves_nothing(is_done_first: bool, host: Any, pod: Any, make_call: MakeCall) -> None:
    """For each request; one that fails may have been carried out."""
    before, config = everything(host), bandwidth(pod.path, **BOTH)

    def add() -> None:
        BANDWIDTH.add(make_call("ADD", pod.path, **config))

    def check(_at: int) -> None:
        reference.require_same(everything(host), before)

    assert refuse_each(add, check, is_done_first=is_done_first) >= 5


@pytest.mark.parametrize(
    ("keys", "command"),
    [
        (INGRESS, f"tc qdisc add dev {PORT} root handle 1: tbf rate 1mbit burst 10k latency 9ms"),
        (INGRESS, f"tc qdisc add dev {PORT} root handle 7: pfifo"),
        (EGRESS, f"tc qdisc add dev {PORT} ingress"),
        (EGRESS, f"tc qdisc add dev {PORT} clsact"),
        (EGRESS, f"ip link add {IFB} type ifb"),
    ],
)
def test_what_was_there_before_stays(keys: dict[str, Any], command: str, host: Any, pod: Any) -> None:
    config = bandwidth(pod.path, **keys)
    host.run("sh", "-c", command)
    before = everything(host)
    ours = outcome.builtin("bandwidth", "ADD", pod.path, config)
    reference.require_same(everything(host), before)
    outcome.require_same_failure(ours, outcome.of_reference("bandwidth", "ADD", pod.path, config))


def test_a_link_of_that_name_that_is_none_of_ours_stays(host: Any, pod: Any) -> None:
    host.run("ip", "link", "add", IFB, "type", "bridge")
    assert not outcome.builtin("bandwidth", "DEL", pod.path, bandwidth(pod.path, **EGRESS)).failed
    assert IFB in host.links()


# --- drift -----------------------------------------------------------------------------------------------------------

BREAKS = (
    f"tc qdisc del dev {PORT} root",
    f"tc qdisc replace dev {PORT} root handle 1: tbf rate 1mbit burst 10k latency 9ms",
    f"tc qdisc replace dev {PORT} root handle 7: pfifo",
    f"tc qdisc del dev {PORT} ingress",
    f"tc filter del dev {PORT} parent ffff: prio 1",
    f"tc qdisc del dev {IFB} root",
    f"tc qdisc replace dev {IFB} root handle 1: tbf rate 1mbit burst 10k latency 9ms",
    f"ip link set {IFB} down",
    f"ip link del {IFB}",
)


@pytest.mark.parametrize("command", BREAKS)
def test_each_part_comes_back(command: str, host: Any, pod: Any, make_call: MakeCall) -> None:
    made = outcome.builtin("bandwidth", "ADD", pod.path, bandwidth(pod.path, **BOTH))
    assert made.result is not None
    before, mac = everything(host), made.result["interfaces"][-1]["mac"]
    call = make_call("DEL", pod.path, **bandwidth(pod.path, **BOTH) | {"prevResult": made.result})
    with PodNetns(pod.path) as netns:
        call = replace(call, netns=netns)
        assert plugin.differences(call, netns) == []
        host.run("sh", "-c", command)
        found = plugin.differences(call, netns)
        assert found
        assert outcome.builtin("bandwidth", "CHECK", pod.path, dict(call.fields)).failed
        for item in found:
            assert item.repair
            item.repair()
        assert plugin.differences(call, netns) == []
    reference.require_same(everything(host), before)
    assert [link["address"] for link in host.ip("link", "show", "dev", IFB)] == [mac]


# --- beside the reference --------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ingress": INGRESS,
    "egress": EGRESS,
    "both": BOTH,
    "asked-for": {"runtimeConfig": {"bandwidth": BOTH}},
    "in-any-case": {"runtimeConfig": {"bandwidth": {key.upper(): value for key, value in BOTH.items()}}},
    "own-and-asked-for": INGRESS | {"runtimeConfig": {"bandwidth": EGRESS}},
    "own-null-and-asked-for": {"ingressRate": None, "runtimeConfig": {"bandwidth": EGRESS}},
    "kubelet": {"runtimeConfig": {"bandwidth": {"ingressRate": 1_000_000, "ingressBurst": 4_294_967_295}}},
    "version": INGRESS | EGRESS | {"cniVersion": "1.1.0"},
}
# v1.1.1 does not know the version, and its CHECK needs a limit.
ALL_CASES = [
    pytest.param(case, marks=reference.needs_new()) if case in ("nothing", "version") else case for case in CASES
]


def comparable(found: outcome.Outcome) -> Any:
    for item in (found.result or {}).get("interfaces", []):
        item.pop("mac", None)
        item.pop("sandbox", None)
    return found


@reference.needs("bandwidth")
@pytest.mark.parametrize("case", ALL_CASES)
def test_both_leave_the_same(case: str, another_host: Any, make_netns: Any) -> None:
    left = []
    for call in (outcome.of_reference, outcome.builtin):
        with another_host() as host:
            pod = paired(host, make_netns())
            made = call("bandwidth", "ADD", pod.path, bandwidth(pod.path, **CASES[case]))
            assert not made.failed, made.msg
            left.append((everything(host), comparable(made)))
    (their_state, theirs), (our_state, ours) = left
    reference.require_same(our_state, their_state)
    assert ours == theirs


@reference.needs("bandwidth")
@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("ours_adds", [True, False])
def test_each_checks_and_removes_what_the_other_made(case: str, ours_adds: bool, host: Any, pod: Any) -> None:
    config = bandwidth(pod.path, **CASES[case])
    for verb, ours in (("ADD", ours_adds), ("CHECK", not ours_adds), ("DEL", not ours_adds)):
        call = outcome.builtin if ours else outcome.of_reference
        made = call("bandwidth", verb, pod.path, config)
        assert not made.failed, made.msg
        config |= {"prevResult": made.result} if made.result else {}
    assert host.links() == {PORT}


@reference.needs("bandwidth")
@hypothesis.given(
    rate=st.one_of(st.integers(8, 10**10), st.sampled_from([64_000, 1_000_000, 34_359_738_367])),
    burst=st.one_of(st.integers(8, 2**32), st.sampled_from([12_000, 2**32 - 1, (2**32 - 1) * 8 - 1])),
)
@reference.examples(25)
def test_any_rate_and_burst(rate: int, burst: int, another_host: Any, make_netns: Any) -> None:
    with another_host() as host:
        pod, left = paired(host, make_netns()), []
        for call in (outcome.of_reference, outcome.builtin):
            made = call("bandwidth", "ADD", pod.path, bandwidth(pod.path, ingressRate=rate, ingressBurst=burst))
            left.append((made.failed, shaping(host)))
            host.run("sh", "-c", f"tc qdisc del dev {PORT} root 2>/dev/null || true")
        assert left[0] == left[1]


@reference.needs("bandwidth")
@pytest.mark.parametrize(
    "keys",
    [
        {"prevResult": None} | INGRESS,
        {"ingressRate": 8000},
        {"ingressBurst": 8000},
        {"egressRate": 8000},
        {"egressBurst": 8000},
        {"ingressRate": 8000, "egressBurst": 8000},
        INGRESS | {"egressRate": 5},
        {"runtimeConfig": {"bandwidth": {"ingressRate": 8000}}},
        {"runtimeConfig": {"bandwidth": []}},
        {"ingressRate": 800, "ingressBurst": (2**32 - 1) * 8},
        {"ingressRate": -5, "ingressBurst": 8},
        {"ingressRate": 2**64, "ingressBurst": 8},
        {"ingressRate": "5", "ingressBurst": 8},
        {"ingressRate": 1.5, "ingressBurst": 8},
        {"ingressRate": 8_000_000_000_000, "ingressBurst": 8000},
        INGRESS | {"interfaces": []},
        INGRESS | {"interfaces": [{"name": "eth0", "sandbox": "pod"}]},
        INGRESS | {"interfaces": [{"name": "lo"}, {"name": "eth0", "sandbox": "pod"}]},
        EGRESS | {"pod": "ip link del eth0"},
        EGRESS | {"pod": "ip link del eth0; ip link add eth0 type bridge"},
    ],
)
def test_both_refuse_for_the_same_reason(keys: dict[str, Any], host: Any, pod: Any) -> None:
    config = bandwidth(pod.path, **keys)
    if "interfaces" in keys:
        config["prevResult"] |= {"interfaces": config.pop("interfaces"), "ips": []}
    pod.run("sh", "-c", config.pop("pod", "true"))
    before = everything(host)
    ours = outcome.builtin("bandwidth", "ADD", pod.path, config)
    reference.require_same(everything(host), before)
    outcome.require_same_failure(ours, outcome.of_reference("bandwidth", "ADD", pod.path, config))
