"""The built-in portmap beside the reference: rules, packets, nothing to do, mixed ADD and DEL."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import hostports
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import BUILT_IN, Invocation, ToolExit
from multus_daemon.spec.cni import gojson, result
from tests.namespaces import entered
from tests.netns import outcome, reference
from tests.programs import require
from tests.waiting import PATIENCE

V4, V6 = {"address": "10.5.0.2/24", "gateway": "10.5.0.1"}, {"address": "fd00:5::2/64", "gateway": "fd00:5::1"}
HTTP = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
DNS = {"hostPort": 5353, "containerPort": 53, "protocol": "udp"}
MANY = [{"hostPort": 9000 + number, "containerPort": 80, "protocol": "tcp"} for number in range(20)]

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one": ([HTTP], {}),
    "udp": ([HTTP, DNS], {}),
    "upper": ([{**HTTP, "protocol": "TCP"}], {}),
    "many": (MANY, {}),
    "address": ([HTTP, {**HTTP, "hostPort": 8081, "hostIP": "127.0.0.1"}, {**DNS, "hostIP": "10.5.0.1"}], {}),
    "any address": ([{**HTTP, "hostIP": "0.0.0.0"}], {}),
    "no snat": ([HTTP], {"snat": False}),
    "masqAll": ([HTTP], {"masqAll": True}),
    "conditions": ([HTTP], {"conditionsV4": ["!", "-d", "192.0.2.0/24"], "markMasqBit": 5}),
    "comment": ([HTTP], {"conditionsV4": ["-m", "comment", "--comment", "a b"]}),
    "mark chain": ([HTTP], {"externalSetMarkChain": "OTHER-MARK"}),
    "nftables": ([HTTP, DNS], {"backend": "nftables"}),
    "nftables masqAll": ([HTTP], {"backend": "nftables", "masqAll": True}),
    "nftables no snat": ([HTTP], {"backend": "nftables", "snat": False}),
    "nftables bit": ([HTTP], {"backend": "nftables", "markMasqBit": 5}),
    "nftables conditions": ([HTTP], {"backend": "nftables", "conditionsV4": ["ip", "daddr", "!=", "192.0.2.0/24"]}),
    "nftables text": ([HTTP], {"backend": "nftables", "conditionsV4": ["ip daddr != 192.0.2.0/24"]}),
}


def config(case: str, pod: Any, *, addresses: Sequence[dict[str, str]] = (V4, V6)) -> dict[str, Any]:
    mappings, keys = CASES[case]
    interfaces = [{"name": "peer"}, {"name": "eth0", "sandbox": pod.path}]
    result = {"cniVersion": "1.0.0", "interfaces": interfaces, "ips": [{**item, "interface": 1} for item in addresses]}
    given = {"capabilities": {"portMappings": True}, "runtimeConfig": {"portMappings": mappings}}
    return {"cniVersion": "1.0.0", "name": "testnet", "type": "portmap", **given, **keys, "prevResult": result}


@pytest.fixture
def joined(host: Any, netns: Any) -> Any:
    """A pod with addresses, and the host beside it."""
    require("iptables", "nft")
    hostports._seen.clear()
    host.run("ip", "link", "set", "lo", "up")
    host.set_sysctl("net/ipv4/ip_forward", "1")
    host.batch(f"link add peer type veth peer name eth0 netns {netns.path}")
    host.batch("addr add 10.5.0.1/24 dev peer", "addr add fd00:5::1/64 dev peer nodad", "link set peer up")
    netns.batch("addr add 10.5.0.2/24 dev eth0", "addr add fd00:5::2/64 dev eth0 nodad", "link set eth0 up")
    netns.batch("route add default via 10.5.0.1")
    for tool in ("iptables", "ip6tables"):
        host.run(tool, "-w", "-t", "nat", "-N", "OTHER-MARK")
    return netns


def rules(host: Any) -> list[str]:
    """Rules with their matches in one order, without counters."""
    found = []
    for line in reference.rules(host):
        text = re.sub(r"(-m (tcp|udp|sctp|comment|multiport|addrtype)|counter packets \d+ bytes \d+) ?", "", line)
        if text.startswith("ip"):
            found.append(" ".join(sorted(re.findall(r"(?:! )?-+\S+ (?:\"(?:[^\"\\]|\\.)*\"|[^-]\S*)", text))))
        elif "cni_hostport" in text or "hostport" in text or "dport" in text or "masquerade" in text:
            found.append(text.strip())
    return sorted(set(found))


def connects(netns: Any, address: str, port: int) -> bool:
    with entered(netns.path), socket.socket() as client:
        client.settimeout(2)
        return client.connect_ex((address, port)) == 0


def differences(pod: Any, given: dict[str, Any], tools: HostTools, *, repair: bool = False) -> list[str]:
    """Texts of the differences, which are repaired if that is wanted."""
    fields = gojson.loads_object(json.dumps(given).encode())
    added = result.from_object(given["prevResult"], "1.0.0")
    call = Invocation(
        *("DEL", "container1", pod.path, "eth0", "", "", fields), recorded=added, served_by={"portmap": BUILT_IN}
    )
    with deadline.within(PATIENCE), PodNetns(pod.path) as opened:
        found = Builtin("portmap", Path("/"), tools=tools).differences(call, opened) or []
        for item in found if repair else ():
            assert item.repair is not None
            item.repair()
        return [item.text for item in found]


def builtin(verb: str, pod: Any, given: dict[str, Any], tools: HostTools) -> outcome.Outcome:
    return outcome.builtin("portmap", verb, pod.path, given, tools=tools)


@reference.needs("portmap")
@reference.needs_new()
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=reference.needs_newest()) if case == "nftables masqAll" else case for case in CASES],
)
def test_the_rules_are_those_of_the_reference(case: str, host: Any, joined: Any, tools: HostTools) -> None:
    given = config(case, joined)
    expected = reference.run("portmap", "ADD", joined.path, given)
    with_reference = rules(host)
    reference.run("portmap", "DEL", joined.path, given)
    left = rules(host)
    made = builtin("ADD", joined, given, tools)
    assert not made.failed, made.msg
    assert made.result == expected
    assert rules(host) == with_reference
    assert reference.call("portmap", "CHECK", joined.path, given).returncode == 0
    assert not builtin("CHECK", joined, given, tools).failed
    assert not builtin("DEL", joined, given, tools).failed
    assert rules(host) == left


@reference.needs("portmap")
def test_ports_lead_to_the_interface_of_the_call(host: Any, joined: Any, tools: HostTools) -> None:
    given = config("one", joined)
    given["prevResult"]["interfaces"].append({"name": "net1", "sandbox": joined.path})
    given["prevResult"]["ips"].insert(0, {"address": "10.6.0.2/24", "interface": 2})
    reference.run("portmap", "ADD", joined.path, given)
    with_reference = rules(host)
    reference.run("portmap", "DEL", joined.path, given)
    assert not builtin("ADD", joined, given, tools).failed
    assert rules(host) == with_reference
    assert any("10.5.0.2:80" in rule for rule in with_reference)


@reference.needs("portmap")
@pytest.mark.parametrize("ours", ["ADD", "DEL"])
@pytest.mark.parametrize("case", ["address", "many", "conditions", "nftables"])
def test_either_removes_what_the_other_made(case: str, ours: str, host: Any, joined: Any, tools: HostTools) -> None:
    if "nftables" in case and reference.is_old():
        pytest.skip(f"v1.1.1 knows no nftables: {reference.HOW}")
    given = config(case, joined)
    reference.run("portmap", "ADD", joined.path, given, container="other")
    before = rules(host)
    for verb in ("ADD", "DEL"):
        is_ours = verb == ours
        done = (
            builtin(verb, joined, given, tools)
            if is_ours
            else outcome.of_reference("portmap", verb, joined.path, given)
        )
        assert not done.failed
    assert rules(host) == before


def test_a_container_without_a_route_of_the_host(host: Any, joined: Any, tools: HostTools) -> None:
    """Such as a pod on a macvlan network, of a host without a default route."""
    given = config("one", joined, addresses=[{"address": "10.6.0.2/24"}])
    assert not builtin("ADD", joined, given, tools).failed
    assert any("10.6.0.2:80" in rule for rule in rules(host))
    assert differences(joined, given, tools) == []
    assert not builtin("DEL", joined, given, tools).failed


@pytest.mark.parametrize("case", ["one", "udp", "nftables"])
def test_packets_reach_the_port(case: str, host: Any, joined: Any, tools: HostTools) -> None:
    given = config(case, joined)
    assert not builtin("ADD", joined, given, tools).failed
    with entered(joined.path):
        server = socket.create_server(("10.5.0.2", 80))
    with server:
        for client, address in ((host, "10.5.0.1"), (host, "127.0.0.1"), (joined, "10.5.0.1")):
            assert connects(client, address, 8080)
        assert not builtin("DEL", joined, given, tools).failed
        assert not connects(host, "10.5.0.1", 8080)


class NoTools(HostTools):
    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        raise AssertionError(f"{tool} {arguments} is run")


@pytest.mark.parametrize("mappings", [[], None])
def test_nothing_to_do_runs_nothing(mappings: Any, joined: Any) -> None:
    given = {**config("one", joined), "runtimeConfig": {} if mappings is None else {"portMappings": mappings}}
    for verb in ("ADD", "CHECK", "DEL"):
        assert not builtin(verb, joined, given, NoTools()).failed


def test_a_failed_add_leaves_nothing(host: Any, joined: Any, tools: HostTools) -> None:
    before = rules(host)
    given = {**config("one", joined), "externalSetMarkChain": "NO-SUCH-CHAIN"}
    assert builtin("ADD", joined, given, tools).failed
    assert [line for line in rules(host) if "CNI-DN" in line] == [line for line in before if "CNI-DN" in line]


def test_two_first_adds_at_a_time_keep_each_others_entries(host: Any, joined: Any, tools: HostTools) -> None:
    other = {**config("one", joined, addresses=[V4]), "runtimeConfig": {"portMappings": [{**HTTP, "hostPort": 8081}]}}

    class Slow(HostTools):
        is_over = False

        def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
            if stdin and not self.is_over:
                self.is_over = True
                given = outcome.builtin("portmap", "ADD", joined.path, other, container="container2", tools=tools)
                assert not given.failed
            return tools.run(tool, arguments, stdin)

    assert not builtin("ADD", joined, config("one", joined, addresses=[V4]), Slow()).failed
    entries = host.run("iptables", "-w", "-t", "nat", "-S", "CNI-HOSTPORT-DNAT")
    assert sorted(re.findall(r"--dports (\d+)", entries)) == ["8080", "8081"]


@pytest.mark.parametrize("case", ["one", "nftables"])
@pytest.mark.parametrize("lost", ["jumps", "rules"])
def test_what_is_lost_is_repaired(case: str, lost: str, host: Any, joined: Any, tools: HostTools) -> None:
    given = config(case, joined)
    assert not builtin("ADD", joined, given, tools).failed
    before = rules(host)
    assert not differences(joined, given, tools)
    if case == "nftables":
        host.run("nft", "flush", "chain", "ip", "cni_hostport", {"jumps": "prerouting", "rules": "hostports"}[lost])
    else:
        host.run("iptables", "-w", "-t", "nat", "-F", {"jumps": "PREROUTING", "rules": "CNI-HOSTPORT-DNAT"}[lost])
    found = differences(joined, given, tools, repair=True)
    assert found[0].endswith(" do not lead to 10.5.0.2")
    assert differences(joined, given, tools) == []
    assert rules(host) == before


@reference.needs("portmap")
@pytest.mark.parametrize(
    "keys",
    [
        {"markMasqBit": 40}, {"markMasqBit": 5, "externalSetMarkChain": "X"}, {"backend": "nft"},
        {"runtimeConfig": {"portMappings": [{**HTTP, "hostPort": 0}]}},
        {"runtimeConfig": {"portMappings": [{**HTTP, "containerPort": 0}]}}, {"prevResult": None},
    ],
)  # fmt: skip
def test_what_the_reference_refuses(keys: dict[str, Any], joined: Any, tools: HostTools) -> None:
    if keys.get("backend") and reference.is_old():
        pytest.skip(f"v1.1.1 knows no backends: {reference.HOW}")
    given = {**config("one", joined), **keys}
    theirs = outcome.of_reference("portmap", "ADD", joined.path, given)
    outcome.require_same_failure(builtin("ADD", joined, given, tools), theirs)


@pytest.mark.parametrize("word", ["a;b", "a\nadd table ip x", 'a"', "a#b"])
def test_a_condition_cannot_add_commands(word: str, joined: Any, tools: HostTools) -> None:
    given = {**config("one", joined), "conditionsV4": ["ip", word]}
    made = builtin("ADD", joined, given, tools)
    assert (made.code, made.msg.partition(":")[0]) == (7, "conditionsV4")


@pytest.mark.parametrize("name", ["-x", "a b", "a\nCOMMIT\n*filter\n-P INPUT DROP", "x" * 29])
def test_the_name_of_a_chain_cannot_add_commands(name: str, joined: Any, tools: HostTools) -> None:
    made = builtin("ADD", joined, {**config("one", joined), "externalSetMarkChain": name}, tools)
    assert (made.code, made.msg.partition(":")[0]) == (7, "externalSetMarkChain")


def test_flows_to_the_port_are_forgotten(host: Any, joined: Any, tools: HostTools) -> None:
    """A client keeps its flow to a container that is gone."""
    given = config("udp", joined)
    assert not builtin("ADD", joined, given, tools).failed
    with entered(host.path), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", ("10.5.0.1", 5353))
    assert "dport=5353" in host.run("cat", "/proc/net/nf_conntrack")
    assert not builtin("DEL", joined, given, tools).failed
    assert "dport=5353" not in host.run("cat", "/proc/net/nf_conntrack")
