"""Names of chains and comments, by vectors of the reference plugins; the lines of `iptables -S` that are looked for."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import iptables, masquerade, veth
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.masquerade import Owner
from multus_daemon.plugins.plugin import HostTools, ToolNotFoundError
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import Invocation, ToolExit
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import IpConfig, Result
from tests.fakes.runner import FakePluginRunner


def test_names() -> None:
    owner = Owner("n1", "cid1", "eth0")
    assert owner.chain == "CNI-ca7a875c2b85fc44a855128b"
    assert owner.comment == 'name: "n1" id: "cid1"'
    # One chain for all interfaces of a container on a network, but rules of their own in nftables.
    assert Owner("n1", "cid1", "net1").chain == owner.chain
    owner = Owner("n2", "cid1", "eth0")
    assert owner.nft_prefix == "c6cba14837cd1216-0b65a318f52e521b"
    assert owner.nft_comment == "c6cba14837cd1216-0b65a318f52e521b, net: n2, if: eth0, id: cid1"


@pytest.mark.parametrize("ifname", ['e"th0', "ünïcödé"])
def test_a_comment_is_cut_to_what_the_kernel_takes(ifname: str) -> None:
    comment = Owner("n" * 60, "c" * 64, ifname).nft_comment
    assert '"' not in comment
    assert len(comment.encode()) in (127, 128)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            '-A POSTROUTING -s 10.0.0.2/32 -m comment --comment "name: \\"n\\" id: \\"c\\"" -j CNI-abc',
            ["POSTROUTING", "-s", "10.0.0.2/32", "-m", "comment", "--comment", 'name: "n" id: "c"', "-j", "CNI-abc"],
        ),
        ("-A POSTROUTING -j CNI-abcd", []),
        ("-A POSTROUTING -m comment --comment CNI-abc -j ACCEPT", []),
        ("-N CNI-abc", []),
        ("-P POSTROUTING ACCEPT", []),
        ("-A POSTROUTING -m comment --comment \"somebody else's 'odd\" -j ACCEPT", []),
    ],
)
def test_jumps(line: str, expected: list[str]) -> None:
    assert iptables.jumps_to("CNI-abc", ToolExit(0, line.encode(), "")) == ([expected] if expected else [])


def test_quoting_is_what_iptables_restore_reads() -> None:
    assert iptables.quoted('name: "n\\1"') == '"name: \\"n\\\\1\\""'
    assert (iptables.quoted("-j"), iptables.quoted("")) == ("-j", '""')


def calling(tools: HostTools, **keys: str) -> Call:
    return Call(
        invocation=Invocation("DEL", "c1", "", "eth0", "", "", {"ipMasq": True, "ipam": {"type": "x"}, **keys}),
        name="n1",
        cni_version="1.0.0",
        prev_result=None,
        host_root=Path("/"),
        plugin_for=FakePluginRunner({}).plugin_for,
        netns=PodNetns(""),
        tools=tools,
    )


@dataclass
class Host:
    """HostTools of a host without iptables, whose `nft` removes nothing; it may change something where it `works`."""

    works: bool

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        if tool != "nft":
            raise ToolNotFoundError(f"no {tool}")
        checks = "--check" in arguments
        return ToolExit(0 if checks and self.works else 1, b"", "Operation not supported")


@pytest.mark.parametrize("works", [True, False])
def test_rules_of_nftables_that_stay_are_a_failure_only_where_nft_works(works: bool) -> None:
    call = calling(Host(works))
    if works:
        with pytest.raises(CniError, match="failed to stop masquerading: nft failed"):
            masquerade.remove(call, None)
    else:
        masquerade.remove(call, None)


@dataclass
class Recorder:
    """HostTools whose tables have rules of the container; records the commands."""

    failing: str = ""
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        self.calls.append((tool, *arguments))
        if tool == self.failing:
            return ToolExit(1, b"", "COMMIT failed")
        if tool == "nft":
            raise ToolNotFoundError("no nft")
        chain = Owner("n1", "c1", "eth0").chain
        return ToolExit(0, f"-A POSTROUTING -s 10.0.0.2/32 -j {chain}\n".encode(), "")


def by_iptables(tools: Recorder) -> Call:
    return calling(tools, ipMasqBackend="iptables")


@pytest.mark.parametrize("work", [masquerade.add, masquerade.remove])
def test_a_transaction_that_fails_is_a_failure(work: Callable[[Call, list[IpInterface]], None]) -> None:
    """Its exit status is that of a chain which is not there."""
    call = by_iptables(Recorder("iptables-restore"))
    with pytest.raises(CniError, match=r"iptables-restore failed \(exit status 1\): COMMIT failed"):
        work(call, [ipaddress.ip_interface("10.0.0.2/24"), ipaddress.ip_interface("10.0.0.3/24")])


@pytest.mark.parametrize("removed", [(), (ipaddress.ip_interface("10.0.0.9/24"),)])
def test_a_del_removes_the_rules_of_the_recorded_addresses_also_without_a_link(
    removed: tuple[IpInterface, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Sequence[IpInterface]] = []
    monkeypatch.setattr(masquerade, "remove", lambda _call, addresses, **_: found.append(addresses))
    call = replace(by_iptables(Recorder()), prev_result=Result(ips=(IpConfig("10.0.0.2/24"),)))
    monkeypatch.setattr(veth, "remove", lambda *_, **__: removed)
    for step in masquerade.remove_link(call, call.netns):
        step()
    assert [str(item) for item in found[0]] == ["10.0.0.2/24", *map(str, removed)]


@pytest.mark.parametrize(("seconds", "allowed"), [(None, {"20"}), (8.9, {"6", "7"}), (1.5, {"1"})])
def test_iptables_waits_for_its_lock_as_long_as_the_caller_has(seconds: float | None, allowed: set[str]) -> None:
    """Also a second less, so that it says why it failed before it is ended."""
    tools = Recorder()
    call = by_iptables(tools)
    address = ipaddress.ip_interface("10.0.0.2/24")
    with deadline.given(Deadline()) if seconds is None else deadline.within(seconds):
        masquerade.add(call, [address])
        masquerade.remove(call, [address])
    waits = {(tool, option): seconds for tool, option, seconds, *_ in tools.calls if tool != "nft"}
    assert set(waits) == {("iptables", "-w"), ("iptables-restore", "-w")}
    assert set(waits.values()) <= allowed
