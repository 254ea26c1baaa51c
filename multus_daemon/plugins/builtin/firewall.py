"""`firewall`: lets the host forward packets of the container; an ingress policy drops packets from other bridges.

Keys, chains, rules and messages are those of the reference plugin (containernetworking/plugins `plugins/meta/firewall`)
with the backend iptables, so that either removes what the other made. The rules between bridges are shared by all
containers, and stay after a DEL. If firewalld runs, the binary is used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel.inet import IpInterface, interface_of
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract, iptables
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Result

KEYS: Final = ("backend", "iptablesAdminChainName", "firewalldZone", "ingressPolicy")
_NOT_CHAINED: Final = "missing prevResult from earlier plugin"
_FIREWALLD: Final = "firewalld"
_SERVICES: Final = ("/sys/fs/cgroup/system.slice", "/sys/fs/cgroup/systemd/system.slice")
_TABLE: Final = "filter"
_FORWARD: Final = "CNI-FORWARD"
_STAGES: Final = ("CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2")
_OPEN: Final = "open"
_POLICIES: Final = (_OPEN, "same-bridge", "isolated")


@dataclass(frozen=True, slots=True)
class _Config:
    admin_chain: str
    """The administrator's chain, which packets traverse before the containers' rules."""
    policy: str


def unsupported(call: Call) -> str:
    """Return the backend if there are no tools, or if it is or would be firewalld; empty if this plugin supports it."""
    backend = gojson.get_str(call.fields, "backend")
    if call.tools is None:
        return 'backend: "iptables"'
    runs = backend == _FIREWALLD or (
        backend != "iptables" and any(call.on_host(f"{path}/{_FIREWALLD}.service").exists() for path in _SERVICES)
    )
    return f'backend: "{_FIREWALLD}"' if runs else ""


def read(call: Call) -> _Config:
    """Read the configuration. Raises DecodingFailureError (6), InvalidNetworkConfigError (7)."""
    with contract.reading(call.name):
        _, chain, _, policy = (gojson.get_str(call.fields, key) or "" for key in KEYS)
    if policy and policy not in _POLICIES:
        advice = f"network {call.name!r}: one of {', '.join(_POLICIES)}"
        raise InvalidNetworkConfigError(f'unknown ingress policy: "{policy}"', remedy=advice)
    if chain and not iptables.CHAIN.fullmatch(chain):
        problem = f"iptablesAdminChainName: {contract.shown(chain)} is not the name of a chain"
        raise InvalidNetworkConfigError(problem, "Invalid chain name")
    return _Config(chain or "CNI-ADMIN", policy or _OPEN)


def add(call: Call, netns: PodNetns) -> Result:
    """Make the rules; return prevResult. If it raises, no rule of the container is left."""
    config, previous = read(call), contract.previous(call, _NOT_CHAINED)
    with Undo() as undo:
        undo.arm("remove the rules", functools.partial(delete, call, netns))
        for version in _addresses(previous):
            _make(call, config, version)
    return previous


def delete(call: Call, netns: PodNetns) -> None:
    """Remove the rules of the container's addresses; do nothing without a result, which has the addresses."""
    read(call)
    for version, addresses in _addresses(call.prev_result or Result()).items():
        own = [rule for _, *rule in _own(addresses)]
        listed = iptables.rules_in(call.host_tools, version, _FORWARD, table=_TABLE) or ()
        found = [("-D", *rule) for rule in listed if rule in own]
        iptables.restore(call.host_tools, version, found, table=_TABLE)


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return one difference for each IP version whose rules are missing. Runs programs, but not for a CHECK.

    Raises CniError.
    """
    config, found, addresses_of = read(call), list[Difference](), _addresses(contract.previous(call, _NOT_CHAINED))
    for version, addresses in addresses_of.items() if call.invocation.verb != "CHECK" else ():
        if _lacking(call, config, version):
            text = f"rules of the firewall for {', '.join(str(item.ip) for item in addresses)} are missing"
            found.append(Difference(text, functools.partial(_make, call, config, version), on_host=True))
    return found


def _addresses(result: Result) -> dict[int, list[IpInterface]]:
    found: dict[int, list[IpInterface]] = {}
    for ip in result.ips:
        address = interface_of(ip.address)
        found.setdefault(address.version, []).append(address)
    return found


# --- the rules -------------------------------------------------------------------------------------------------------


def _make(call: Call, config: _Config, version: int) -> None:
    iptables.settle(call.host_tools, version, lambda: _lacking(call, config, version), table=_TABLE)


def _lacking(call: Call, config: _Config, version: int) -> list[Sequence[str]]:
    """Return the changes that add the missing rules and chains. Raises CniError."""
    tools, admin = call.host_tools, config.admin_chain
    wanted = [*_shared(call, config), *_own(_addresses(contract.previous(call, _NOT_CHAINED))[version])]
    changes = iptables.lacking(tools, version, wanted, table=_TABLE)
    if (
        any(change[-1] == admin for change in changes)
        and iptables.rules_in(tools, version, admin, table=_TABLE) is None
    ):
        changes.insert(0, ("-N", admin))
    return changes


def _own(addresses: Sequence[IpInterface]) -> Iterator[Sequence[str]]:
    """Yield each rule of a container: the command that adds it, and its words after the chain."""
    for address in addresses:
        ip = f"{address.ip}/{address.max_prefixlen}"
        yield "-A", _FORWARD, "-d", ip, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"
        yield "-A", _FORWARD, "-s", ip, "-j", "ACCEPT"


def _shared(call: Call, config: _Config) -> Iterator[Sequence[str]]:
    """Yield the rules that all containers share, in the order in which they are inserted."""
    own = _commented("")
    yield "-I", "FORWARD", *own, "-j", _FORWARD
    yield "-I", _FORWARD, *iptables.COMMENTED, "CNI firewall plugin admin overrides", "-j", config.admin_chain
    if config.policy == _OPEN:
        return
    bridge, (first, second), of_any = _bridge(call, config), _STAGES, _commented("same-bridge|isolated")
    of_policy = _commented(config.policy)
    yield "-I", "FORWARD", *of_any, "-j", first
    yield "-I", first, "-i", bridge, "!", "-o", bridge, *of_policy, "-j", second
    if config.policy == "isolated":
        yield "-I", first, "-i", bridge, "-o", bridge, *of_policy, "-j", "DROP"
    yield "-A", first, *of_any, "-j", "RETURN"
    yield "-I", second, "-o", bridge, *of_any, "-j", "DROP"
    yield "-A", second, *of_any, "-j", "RETURN"


def _commented(policy: str) -> Sequence[str]:
    suffix = f" (ingressPolicy: {policy})" if policy else ""
    return *iptables.COMMENTED, f"CNI firewall plugin rules{suffix}"


def _bridge(call: Call, config: _Config) -> str:
    """Return the name of the bridge, the first interface of the result. Raises InvalidNetworkConfigError."""
    name = next((item.name for item in contract.previous(call, _NOT_CHAINED).interfaces), "")
    if names.ifname_problem(name):
        problem = f'interface needs to be set for ingress policy "{config.policy}"'
        raise InvalidNetworkConfigError(f'{problem}, make sure to chain "firewall" plugin with "bridge"')
    return name
