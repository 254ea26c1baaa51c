"""`portmap` without a kernel: nothing to do, what a DEL may find, the backend, and the jumps that were there."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import hostports, portmap
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.spec.attachment import BUILT_IN, Invocation, ToolExit
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import Result, from_object

PORT = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
V6 = {"ips": [{"address": "fd00::2/64"}]}


class Tools(HostTools):
    """A host with an empty firewall; `broken` are the tools that fail, `missing` those that are not there."""

    has_rules = False
    """Whether the container's rules are there."""

    def __init__(self, *, broken: Collection[str] = (), missing: Collection[str] = ()) -> None:
        self.ran: list[str] = []
        self.broken = broken
        self.missing = missing

    def run(self, tool: str, arguments: Any, stdin: bytes = b"") -> ToolExit:
        self.ran.append(" ".join((tool, *arguments)))
        if tool in self.missing:
            raise ToolNotFoundError(f"no {tool}")
        if tool in self.broken:
            return ToolExit(4, b"", "locked")
        if b"-D CNI-HOSTPORT-DNAT" in stdin and not self.has_rules:
            return ToolExit(2, b"", "Bad rule (does a matching rule exist in that chain?)")
        is_listing = "-S" in arguments or "list" in arguments
        return ToolExit(1, b"", "Error: No such file or directory" if tool == "nft" else "") if is_listing else OK


OK = ToolExit(0, b"", "")


def call(verb: str, mappings: Any = (), **keys: Any) -> Invocation:
    fields = {"cniVersion": "1.1.0", "name": "n", "type": "portmap", "prevResult": V6 | {"cniVersion": "1.0.0"}, **keys}
    fields["runtimeConfig"] = {"portMappings": list(mappings)}
    return Invocation(verb, "c1", "/run/netns/x", "eth0", "", "", fields, served_by={"portmap": BUILT_IN})


def run(verb: str, tools: Tools | None, *mappings: Any, **keys: Any) -> Result:
    with PodNetns("") as netns:
        return Builtin("portmap", Path("/"), tools=tools).run(call(verb, mappings, **keys), netns)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    hostports._seen.clear()


@pytest.mark.parametrize("verb", ["ADD", "CHECK", "DEL", "STATUS", "GC"])
def test_without_host_ports_nothing_runs_and_no_namespace_is_opened(verb: str) -> None:
    """Not even tools are needed."""
    run(verb, None)
    netns = PodNetns("/nowhere")
    assert Builtin("portmap", Path("/"), tools=Tools()).differences(call("DEL"), netns) in ([], None)


def test_without_host_ports_a_failed_del_has_left_nothing() -> None:
    portmap = Builtin("portmap", Path("/"), tools=Tools())
    assert not portmap.keeps(call("DEL"))
    assert portmap.keeps(call("DEL", [PORT]))
    assert portmap.unsupported(call("ADD", [PORT])) == ""
    assert Builtin("portmap", Path("/")).unsupported(call("ADD", [PORT])) == "runtimeConfig.portMappings"
    assert not portmap.waits


def test_the_jumps_are_looked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for now in (1000.0, 1020.0, 1031.0):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        tools = Tools()
        run("ADD", tools, PORT)
        counts.append(len(tools.ran))
    # The shared chain, three chains with a jump, one transaction.
    assert counts == [5, 1, 5]


def test_a_del_that_finds_what_add_has_made_runs_one_program() -> None:
    tools = Tools()
    tools.has_rules = True
    run("DEL", tools, PORT)
    assert [line.split()[0] for line in tools.ran] == ["ip6tables-restore"]


def test_a_del_that_finds_no_rules_looks_in_both_backends() -> None:
    tools = Tools()
    run("DEL", tools, PORT)
    assert [line.split()[0] for line in tools.ran] == ["ip6tables-restore", *["ip6tables"] * 2, "nft"]


@pytest.mark.parametrize(
    ("broken", "missing", "keys", "fails"),
    [
        (set(), set(), {}, False),
        ({"ip6tables"}, set(), {}, True),
        ({"nft"}, set(), {}, True),
        ({"nft"}, set(), {"backend": "iptables"}, False),
        ({"ip6tables"}, set(), {"backend": "nftables"}, False),
        (set(), {"ip6tables"}, {}, False),
        (set(), {"ip6tables"}, {"backend": "iptables"}, True),
        (set(), {"ip6tables", "nft"}, {}, True),
    ],
)
def test_a_del_fails_if_rules_may_be_left(broken: set[str], missing: set[str], keys: Any, fails: bool) -> None:
    tools = Tools(broken=broken, missing=missing)
    if fails:
        with pytest.raises(CniError, match="failed to remove the host ports"):
            run("DEL", tools, PORT, **keys)
    else:
        run("DEL", tools, PORT, **keys)


def test_without_iptables_nftables_serves() -> None:
    tools = Tools(missing={"iptables", "ip6tables", "ip6tables-restore"})
    run("ADD", tools, PORT)
    assert tools.ran[-1] == "nft -f -"
    with pytest.raises(CniError, match="unable to setup DNAT: no ip6tables"):
        run("ADD", tools, PORT, backend="iptables")


@pytest.mark.parametrize(
    ("interface", "expected"), [(None, True), (1, True), (0, False), (2, False), (7, True), (-1, True)]
)
def test_an_address_is_the_containers_unless_it_is_of_another_interface(interface: int | None, expected: bool) -> None:
    """Plugins of others name interfaces that their result does not have."""
    ip = {"address": "10.5.0.2/24"} | ({} if interface is None else {"interface": interface})
    interfaces = [{"name": "peer"}, *({"name": name, "sandbox": "/run/netns/a"} for name in ("eth0", "net1"))]
    result = from_object({"cniVersion": "1.0.0", "interfaces": interfaces, "ips": [ip]}, "1.0.0")
    assert [str(item.ip) for item in portmap._targets(result, "eth0")] == (["10.5.0.2"] if expected else [])
