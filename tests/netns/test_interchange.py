"""A network is attached by one, the built-in or the reference, and checked and detached by the other.

For ptp in all its configurations, loopback, and lists in which a binary follows; for the other types this is in the
files of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.plugin import HostTools
from multus_daemon.plugins.run import ListRunner
from multus_daemon.plugins.select import Mode
from multus_daemon.spec.attachment import Attachment, Sandbox
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName
from tests import calls
from tests.netns import outcome, reference
from tests.netns.test_differential import CASES, V4, V6
from tests.planning import plan_one

MakeNetns = Callable[[], Any]
Cases = dict[str, tuple[list[dict[str, str]], list[dict[str, Any]], dict[str, Any]]]

MASQUERADING: Cases = {
    "masquerade": ([V4], [{"dst": "0.0.0.0/0"}], {"ipMasq": True}),
    "masquerade-dual": ([V4, V6], [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}], {"ipMasq": True, "mtu": 1400}),
}
NEW_MASQUERADING: Cases = {
    "masquerade-nft": ([V4, V6], [], {"ipMasq": True, "ipMasqBackend": "nftables"}),
}
PTP = {**CASES, **MASQUERADING, **NEW_MASQUERADING}


def call(ours: bool, plugin: str, verb: str, netns: Any, config: dict[str, Any], tools: HostTools) -> Any:
    """The result, by one of the two; it must succeed."""
    if ours:
        made = outcome.builtin(plugin, verb, netns.path, config, tools=tools)
    else:
        made = outcome.of_reference(plugin, verb, netns.path, config)
    assert not made.failed, made.msg
    return made.result


def addresses(directory: Path) -> list[str]:
    """List the addresses that host-local has given out."""
    return sorted(path.name for path in directory.glob("*/*") if path.name[0].isdecimal() or ":" in path.name)


@reference.needs("ptp", "static")
@pytest.mark.parametrize(
    "case", [*CASES, *MASQUERADING, *(pytest.param(case, marks=reference.needs_new()) for case in NEW_MASQUERADING)]
)
@pytest.mark.parametrize("ours_adds", [True, False])
def test_ptp(case: str, ours_adds: bool, host: Any, netns: Any, tools: HostTools) -> None:
    given, routes, keys = PTP[case]
    reference.require_masquerade(keys)
    ipam = {"type": "static", "addresses": given, "routes": routes}
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": "ptp", "ipam": ipam, **keys}
    previous = call(ours_adds, "ptp", "ADD", netns, config, tools)
    if "masquerade" in case:
        assert any("container1" in line for line in reference.rules(host))
    after = config | {"prevResult": previous}
    # v1.1.1 does not find a route through a gateway that was chosen for it, not even its own.
    if not (ours_adds and reference.is_old() and case.endswith("-routes")):
        call(not ours_adds, "ptp", "CHECK", netns, after, tools)
    call(not ours_adds, "ptp", "DEL", netns, after, tools)
    assert (host.links(), netns.links()) == (set(), set())
    assert not [line for line in reference.rules(host) if "container1" in line or "CNI-" in line]


@reference.needs("loopback")
@pytest.mark.parametrize("version", ["0.4.0", "1.0.0"])
@pytest.mark.parametrize("ours_adds", [True, False])
def test_loopback(version: str, ours_adds: bool, netns: Any, tools: HostTools) -> None:
    config = {"cniVersion": version, "name": "testnet", "type": "loopback"}
    previous = call(ours_adds, "loopback", "ADD", netns, config, tools)
    assert "UP" in netns.ip("link", "show", "lo")[0]["flags"]
    after = config | {"prevResult": previous}
    call(not ours_adds, "loopback", "CHECK", netns, after, tools)
    call(not ours_adds, "loopback", "DEL", netns, after, tools)
    assert "UP" not in netns.ip("link", "show", "lo")[0]["flags"]


# --- lists -----------------------------------------------------------------------------------------------------------

ASKED = {
    "portMappings": [{"hostPort": 18123, "containerPort": 80, "protocol": "tcp"}],
    "bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 80_000, "egressRate": 8_000_000, "egressBurst": 80_000},
}


def listed(directory: Path, *plugins: dict[str, Any]) -> Attachment:
    """An attachment by a list; plugins with `ipam: True` get a host-local section of both families."""
    ranges = [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd88::/64"}]]
    ipam = {"type": "host-local", "ranges": ranges, "dataDir": str(directory)}
    fields = {
        "cniVersion": "1.0.0",
        "name": "testnet",
        "plugins": [item | {"ipam": ipam} if item.get("ipam") else item for item in plugins],
    }
    return Attachment("web/n", conf.parse(json.dumps(fields).encode()), IfName("net1"), capability_args=ASKED)


LISTS: dict[str, tuple[dict[str, Any], ...]] = {
    "bridge-portmap": (
        {"type": "bridge", "bridge": "br88", "isDefaultGateway": True, "ipMasq": True, "ipam": True},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ),
    "ptp-portmap": (
        {"type": "ptp", "ipMasq": True, "ipam": True},
        {"type": "portmap", "capabilities": {"portMappings": True}, "snat": False},
    ),
    "ptp-bandwidth": (
        {"type": "ptp", "ipam": True},
        {"type": "bandwidth", "capabilities": {"bandwidth": True}},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ),
    "bridge-tuning-portmap": (
        {"type": "bridge", "bridge": "br88", "isGateway": True, "ipam": True},
        {"type": "tuning", "mtu": 1300, "promisc": True},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ),
}


@reference.needs("bandwidth", "bridge", "ptp", "host-local", "tuning", "portmap")
@pytest.mark.parametrize("case", LISTS)
@pytest.mark.parametrize(("first", "then"), [("prefer", "off"), ("off", "prefer")])
def test_lists(case: str, first: Mode, then: Mode, host: Any, netns: Any, tmp_path: Path, tools: HostTools) -> None:
    """Addresses by host-local, in one directory for both."""
    cache = ResultCache(tmp_path / "cache")
    sandbox = Sandbox(ContainerId("container1"), netns.path)
    leases = tmp_path / "leases"
    given = {"dataDir": str(tmp_path / "tuning")}
    whole = listed(leases, *(item | (given if item["type"] == "tuning" else {}) for item in LISTS[case]))
    before = host.links()

    def chain(mode: Mode) -> ListRunner:
        return ListRunner(outcome.dispatched(mode, tools), cache, str(reference.DIRECTORY))

    adding = chain(first)
    planned = plan_one(adding, sandbox, whole)
    result = calls.add(adding, sandbox, planned)
    adding.remember(sandbox, planned.with_result(result))
    assert planned.is_built_in is (first == "prefer")
    assert addresses(leases) == sorted(item.ip for item in result.ips)
    assert any("18123" in line for line in reference.rules(host))

    # The machine's state has to do: `whole` does not say who did the ADD.
    other = chain(then)
    check(other, sandbox, whole)
    calls.delete(other, sandbox, whole)
    assert (addresses(leases), netns.links(), host.links() - before - {"br88"}) == ([], set(), set())
    # portmap leaves the chains that all its rules hang from.
    left = [line for line in reference.rules(host) if "18123" in line or "container1" in line or "testnet" in line]
    assert left == []


def check(chain: ListRunner, sandbox: Sandbox, whole: Attachment) -> None:
    """CHECK, but for a fault of portmap before 1.3: it wants each IPv4 rule in IPv6 too (plugins issue 819).

    It is the last of the list: all others have succeeded then.
    """
    try:
        calls.check(chain, sandbox, whole)
    except CniError as error:
        if not (reference.is_old() and error.msg.startswith("could not check ipv6 dnat")):
            raise


@reference.needs("ptp", "host-local")
@pytest.mark.parametrize("ours_adds", [True, False])
def test_a_container_whose_namespace_has_gone(
    ours_adds: bool, host: Any, make_netns: MakeNetns, tmp_path: Path, tools: HostTools
) -> None:
    """Its addresses are free again, whoever gave them out."""
    ipam = {"type": "host-local", "subnet": "10.88.1.0/24", "dataDir": str(tmp_path / "leases")}
    config = {"cniVersion": "1.0.0", "name": "testnet", "type": "ptp", "ipam": ipam}
    netns = make_netns()
    previous = call(ours_adds, "ptp", "ADD", netns, config, tools)
    assert addresses(tmp_path / "leases") == ["10.88.1.2"]
    after = config | {"prevResult": previous}
    gone = type(netns)("")
    call(not ours_adds, "ptp", "DEL", gone, after, tools)
    assert addresses(tmp_path / "leases") == []


@reference.needs("bridge", "ptp", "host-local")
@pytest.mark.parametrize("version", ["0.3.1", "1.0.0"])
@pytest.mark.parametrize("adds", ["off", "prefer"])
@pytest.mark.parametrize("plugin", ["bridge", "ptp"])
@pytest.mark.parametrize("backend", ["iptables", pytest.param("nftables", marks=reference.needs_new())])
@pytest.mark.parametrize("has_another", [False, True])
def test_rules_of_an_interface_that_has_lost_its_address(
    has_another: bool,
    backend: str,
    plugin: str,
    adds: Mode,
    version: str,
    host: Any,
    netns: Any,
    tmp_path: Path,
    tools: HostTools,
) -> None:
    """The implementation that ran ADD runs DEL, without finding the addresses. Before 0.4.0 DEL gets no result."""
    keys = {"bridge": "br88", "isGateway": True} if plugin == "bridge" else {}
    whole = listed(
        tmp_path / "leases", {"type": plugin, "ipMasq": True, "ipMasqBackend": backend, "ipam": True, **keys}
    )
    whole = replace(whole, config=conf.parse(whole.config.raw.replace(b'"1.0.0"', f'"{version}"'.encode())))
    sandbox = Sandbox(ContainerId("container1"), netns.path)

    def chain(mode: Mode) -> ListRunner:
        return ListRunner(outcome.dispatched(mode, tools), ResultCache(tmp_path / "cache"), str(reference.DIRECTORY))

    adding = chain(adds)
    whole = plan_one(adding, sandbox, whole)
    whole = replace(whole, result=calls.add(adding, sandbox, whole))
    assert (set(whole.served_by.values()) == {"built-in"}) is (adds == "prefer")
    assert [line for line in reference.rules(host) if "container1" in line]
    netns.run("ip", "addr", "flush", "dev", "net1")
    if has_another:
        netns.run("ip", "addr", "add", "10.88.0.77/24", "dev", "net1")
    if has_another and adds == "off" and backend == "iptables":
        # The reference looks for the other's rule, and does not get rid of a chain that is in use; the next DEL comes.
        with pytest.raises(CniError, match="iptables"):
            calls.delete(chain("fallback"), sandbox, whole)
    calls.delete(chain("fallback"), sandbox, whole)
    assert [line for line in reference.rules(host) if "container1" in line or "CNI-" in line] == []
    assert (addresses(tmp_path / "leases"), netns.links()) == ([], set())
