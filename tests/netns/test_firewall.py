"""The built-in firewall beside the reference: rules, packets, mixed ADD and DEL, drift."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import BUILT_IN, Invocation, ToolExit
from multus_daemon.spec.cni import gojson, result
from tests.netns import outcome, reference
from tests.programs import require
from tests.waiting import PATIENCE

V4, V6 = {"address": "10.5.0.2/24", "gateway": "10.5.0.1"}, {"address": "fd00:5::2/64", "gateway": "fd00:5::1"}
OTHER = {"address": "10.5.0.3/24", "gateway": "10.5.0.1"}

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "iptables": {"backend": "iptables", "firewalldZone": "trusted"},
    "open": {"ingressPolicy": "open"},
    "same-bridge": {"ingressPolicy": "same-bridge"},
    "isolated": {"ingressPolicy": "isolated"},
    "admin": {"iptablesAdminChainName": "MY-ADMIN"},
    "existing-admin": {"iptablesAdminChainName": "OTHER-ADMIN"},
}
needs = reference.needs("firewall")


def config(case: str, *, addresses: Sequence[dict[str, str]] = (V4, V6), bridge: str = "br5") -> dict[str, Any]:
    interfaces = [{"name": bridge}, {"name": "veth0a1b2c3d"}, {"name": "eth0", "sandbox": "/run/netns/pod"}]
    given = {"cniVersion": "1.0.0", "interfaces": interfaces, "ips": [{**item, "interface": 2} for item in addresses]}
    return {"cniVersion": "1.0.0", "name": "testnet", "type": "firewall", **CASES[case], "prevResult": given}


@pytest.fixture(autouse=True)
def programs(host: Any) -> None:
    require("iptables")
    prepare(host)


def prepare(host: Any) -> None:
    for tool in ("iptables", "ip6tables"):
        host.run(tool, "-w", "-N", "OTHER-ADMIN")
        host.run(tool, "-w", "-A", "OTHER-ADMIN", "-m", "mark", "--mark", "0x5", "-j", "DROP")
        host.run(tool, "-w", "-A", "FORWARD", "-m", "mark", "--mark", "0x7", "-j", "DROP")


def rules(host: Any) -> list[str]:
    return [f"{tool}: {line}" for tool in ("iptables", "ip6tables") for line in host.run(tool, "-w", "-S").splitlines()]


def builtin(verb: str, given: dict[str, Any], tools: HostTools, **options: Any) -> outcome.Outcome:
    return outcome.builtin("firewall", verb, "/run/netns/pod", given, tools=tools, **options)


def theirs(verb: str, given: dict[str, Any], **options: Any) -> outcome.Outcome:
    return outcome.of_reference("firewall", verb, "/run/netns/pod", given, **options)


def differences(pod: Any, given: dict[str, Any], tools: HostTools, *, repair: bool = False) -> list[str]:
    """Texts of the differences, which are repaired if that is wanted."""
    fields = gojson.loads_object(json.dumps(given).encode())
    added = result.from_object(given["prevResult"], "1.0.0")
    call = Invocation(
        *("DEL", "container1", pod.path, "eth0", "", "", fields), recorded=added, served_by={"firewall": BUILT_IN}
    )
    with deadline.within(PATIENCE), PodNetns(pod.path) as opened:
        found = Builtin("firewall", Path("/"), tools=tools).differences(call, opened) or []
        for item in found if repair else ():
            assert item.repair is not None
            assert item.on_host
            item.repair()
        return [item.text for item in found]


@needs
@reference.needs_new()
@pytest.mark.parametrize("case", CASES)
def test_both_leave_the_same(case: str, another_host: Any, tools: HostTools) -> None:
    """After the ADD of two containers on two bridges, that of the first again, and the DEL of one."""
    found = []
    for run in (theirs, lambda verb, given, **options: builtin(verb, given, tools, **options)):
        with another_host() as host:
            prepare(host)
            left = []
            for verb, given, container in (
                ("ADD", config(case), "container1"),
                ("ADD", config(case, addresses=[OTHER], bridge="br6"), "container2"),
                ("ADD", config(case), "container1"),
                ("CHECK", config(case), "container1"),
                ("DEL", config(case), "container1"),
                ("DEL", config(case), "container1"),
            ):
                done = run(verb, given, container=container)
                assert not done.failed, done.msg
                left.append((done, rules(host)))
            found.append(left)
    for (their_answer, their_rules), (our_answer, our_rules) in zip(*found, strict=True):
        reference.require_same(our_rules, their_rules)
        assert our_answer == their_answer


@needs
@reference.needs_new()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ours", ["ADD", "DEL"])
def test_each_checks_and_removes_what_the_other_made(case: str, ours: str, host: Any, tools: HostTools) -> None:
    theirs("ADD", config(case, addresses=[OTHER]), container="other")
    before = rules(host)
    # The shared rules of the second family come with the first container that has it.
    theirs("ADD", config(case, addresses=[{"address": "fd00:5::9/64"}]), container="sixth")
    theirs("DEL", config(case, addresses=[{"address": "fd00:5::9/64"}]), container="sixth")
    before = rules(host)
    for verb in ("ADD", "CHECK", "DEL"):
        is_ours = (verb == "ADD") is (ours == "ADD")
        done = builtin(verb, config(case), tools) if is_ours else theirs(verb, config(case))
        assert not done.failed, done.msg
    assert rules(host) == before


@needs
@reference.needs_new()
@pytest.mark.parametrize(
    "keys",
    [
        {"prevResult": None}, {"ingressPolicy": "bad"}, {"ingressPolicy": 5}, {"backend": 5},
        {"iptablesAdminChainName": "a b"}, {"iptablesAdminChainName": "x" * 29},
        {"ingressPolicy": "same-bridge", "prevResult": {"cniVersion": "1.0.0", "ips": [V4]}},
        {"ingressPolicy": "isolated", "prevResult": {"cniVersion": "1.0.0", "ips": [V6]}},
    ],
)  # fmt: skip
def test_both_refuse_for_the_same_reason(keys: dict[str, Any], host: Any, tools: HostTools) -> None:
    before = rules(host)
    ours = builtin("ADD", config("default") | keys, tools)
    assert rules(host) == before
    outcome.require_same_failure(ours, theirs("ADD", config("default") | keys))


def test_packets_between_bridges(host: Any, make_netns: Any, tools: HostTools) -> None:
    """The host forwards nothing by itself: a pod reaches the others of its bridge, and none of another."""
    host.set_sysctl("net/ipv4/ip_forward", "1")
    host.run("iptables", "-w", "-P", "FORWARD", "DROP")
    pods = []
    for number, (bridge, policy) in enumerate((("br5", "same-bridge"), ("br6", "same-bridge"), ("br7", "open"))):
        pod = make_netns()
        host.batch(f"link add {bridge} type bridge", f"addr add 10.{number}.0.1/24 dev {bridge}")
        host.batch(f"link set {bridge} up", f"link add p{number} type veth peer name eth0 netns {pod.path}")
        host.batch(f"link set p{number} master {bridge}", f"link set p{number} up")
        pod.batch(f"addr add 10.{number}.0.2/24 dev eth0", "link set eth0 up", f"route add default via 10.{number}.0.1")
        pods.append(pod)
        assert number == 0 or not pod.reaches("10.0.0.2", wait=0.2)
        given = config(policy, addresses=[{"address": f"10.{number}.0.2/24"}], bridge=bridge)
        assert not builtin("ADD", given, tools).failed
    first, second, third = pods
    assert first.reaches("10.2.0.2")
    assert third.reaches("10.1.0.2"), "its own bridge is open"
    assert first.reaches("10.1.0.2", wait=0.2) is second.reaches("10.0.0.2", wait=0.2) is False


# --- what is chosen, what fails --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "service", "is_ours"),
    [({}, "", True), ({}, "firewalld", False), ({"backend": "iptables"}, "firewalld", True),
     ({"backend": "firewalld"}, "", False), ({"backend": "other"}, "", True), ({"zone": "x"}, "", False)],
)  # fmt: skip
def test_the_binary_serves_firewalld(
    keys: dict[str, Any], service: str, is_ours: bool, tmp_path: Path, tools: HostTools
) -> None:
    if service:
        (tmp_path / "sys/fs/cgroup/system.slice" / f"{service}.service").mkdir(parents=True)
    fields = config("default") | keys
    call = Invocation("ADD", "container1", "/run/netns/pod", "eth0", "", "", fields)
    assert (Builtin("firewall", tmp_path, tools=tools).unsupported(call) == "") is is_ours
    assert Builtin("firewall", tmp_path).unsupported(call)


class Failing(HostTools):
    """Fails at one call; the program may have ended by then."""

    def __init__(self, tools: HostTools) -> None:
        self.tools = tools
        self.fails_at, self.calls, self.is_done_first = 0, 0, False

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        self.calls += 1
        if self.calls == self.fails_at:
            if self.is_done_first:
                self.tools.run(tool, arguments, stdin)
            raise ToolNotFoundError(f"no {tool}")
        return self.tools.run(tool, arguments, stdin)


@pytest.mark.parametrize("is_done_first", [True, False])
def test_a_failed_add_leaves_no_rule_of_the_container(is_done_first: bool, host: Any, tools: HostTools) -> None:
    failing = Failing(tools)
    failing.is_done_first = is_done_first
    while failing.fails_at <= failing.calls:
        failing.fails_at, failing.calls = failing.fails_at + 1, 0
        if not builtin("ADD", config("isolated"), failing).failed:
            break
        assert not [line for line in rules(host) if "10.5.0.2" in line or "fd00:5::2" in line]
    assert failing.fails_at > failing.calls >= 6
    assert not builtin("DEL", config("isolated"), tools).failed
    assert not [line for line in rules(host) if "10.5.0.2" in line or "fd00:5::2" in line]


def test_chains_that_another_add_makes_meanwhile_are_not_emptied(host: Any, tools: HostTools) -> None:
    class Slow(HostTools):
        is_over = False

        def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
            if stdin and not self.is_over:
                self.is_over = True
                assert not builtin("ADD", config("isolated", addresses=[OTHER]), tools).failed
            return tools.run(tool, arguments, stdin)

    assert not builtin("ADD", config("isolated"), Slow()).failed
    found = [line for line in rules(host) if line.startswith("iptables")]
    assert [sum(address in line for line in found) for address in ("10.5.0.2/32", "10.5.0.3/32")] == [2, 2]
    assert sum("-j CNI-FORWARD" in line for line in found) == 1


@pytest.mark.parametrize("previous", [{"cniVersion": "1.0.0"}, None])
def test_without_addresses_nothing_runs(previous: Any) -> None:
    class NoTools(HostTools):
        def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
            raise AssertionError(f"{tool} {arguments} is run")

    given = config("open") | {"prevResult": previous}
    for verb in ("ADD", "CHECK", "DEL") if previous else ("DEL",):
        assert not builtin(verb, given, NoTools()).failed


# --- drift -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "iptables -w -D FORWARD 2", "iptables -w -F CNI-FORWARD", "iptables -w -D CNI-FORWARD 2",
        "iptables -w -D FORWARD 1", "iptables -w -F; iptables -w -X", "iptables -w -F CNI-ISOLATION-STAGE-2",
        "ip6tables -w -D CNI-FORWARD 3", "iptables -w -D CNI-FORWARD 1", "ip6tables -w -F CNI-ISOLATION-STAGE-1",
        "iptables -w -D CNI-ISOLATION-STAGE-2 1",
    ],
)  # fmt: skip
def test_what_is_lost_is_repaired(command: str, host: Any, netns: Any, tools: HostTools) -> None:
    given = config("isolated")
    assert not builtin("ADD", given, tools).failed
    before = rules(host)
    assert differences(netns, given, tools) == []
    host.run("sh", "-c", command)
    (text,) = differences(netns, given, tools, repair=True)
    assert text.startswith("rules of the firewall for ")
    assert differences(netns, given, tools) == []
    assert {line for line in before if "0x" not in line and "OTHER" not in line} <= set(rules(host))
