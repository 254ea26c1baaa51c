"""`portmap`: makes rules that lead from ports of the host to ports of the container.

Keys, checks, messages and rules are those of the reference plugin (containernetworking/plugins `plugins/meta/portmap`),
so that either removes what the other made; `docs/builtin-plugins.md` lists the differences.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from multus_daemon.kernel.inet import IpInterface, interface_of
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import backends, contract, hostports, interfaces, iptables, restore
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.plugins.builtin.hostports import HostPorts, PortMapping
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InternalError, InvalidAnnotationError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Result

KEYS: Final = ("backend", "snat", "masqAll", "conditionsV4", "conditionsV6", "markMasqBit", "externalSetMarkChain")
_MARK_BIT: Final = 13
_MARK_BIT_MAX: Final = 31
_PORT_MAX: Final = 65535
_NO_ROUTE: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH)
_PROTOCOLS: Final = ("tcp", "udp", "sctp", "udplite", "dccp")
# They become a part of a program's input.
_CONDITION: Final = re.compile(r"[\w.:,/!=<>&|^{}@*+ -]{1,128}")


def unsupported(call: Call) -> str:
    """Return the key of the host ports if there are no tools to make rules; else empty."""
    return "runtimeConfig.portMappings" if call.tools is None and _given(call) else ""


def add(call: Call, netns: PodNetns) -> Result:
    """Make the rules; return prevResult. If it raises, no rule is left."""
    ports, previous = read(call), contract.previous(call, "must be called as chained plugin")
    if ports.mappings:
        with Undo() as undo:
            undo.arm("remove the rules", functools.partial(_remove, call, ports))
            for target in _targets(previous, call.invocation.ifname):
                _make(call, netns, ports, target)
    return previous


def delete(call: Call, netns: PodNetns) -> None:
    """Remove the container's rules of both backends."""
    ports = read(call)
    if ports.mappings:
        _remove(call, ports)
        _forget_flows(netns, ports)


def keeps(call: Call) -> bool:
    """Return True if the container has host ports."""
    return bool(read(call).mappings)


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return a difference for each address of the pod whose rules are missing. Runs programs, but not for a CHECK.

    Raises CniError.
    """
    ports, previous, found = read(call), contract.previous(call), list[Difference]()
    is_compared = ports.mappings and call.invocation.verb != "CHECK"
    for target in _targets(previous, call.invocation.ifname) if is_compared else ():
        has_iptables, has_nft = (
            functools.partial(has, call.host_tools, ports, target)
            for has in (hostports.has_iptables, hostports.has_nft)
        )
        if not backends.has(ports.backend, in_iptables=has_iptables, in_nftables=has_nft):
            numbers = ", ".join(str(item.host_port) for item in ports.mappings)
            repair = functools.partial(_make, call, netns, ports, target)
            found.append(Difference(f"host ports {numbers} do not lead to {target.ip}", repair, on_host=True))
        # An absent link is a difference of the plugin that made it.
        with netns.on_host(), contextlib.suppress(OSError):
            if parts := _sysctl(netns, ports, target):
                enable = functools.partial(_route_localhost, netns, ports, target)
                found += restore.sysctl(parts, "1", enable, on_host=True)
    return found


# --- the rules -------------------------------------------------------------------------------------------------------


def _make(call: Call, netns: PodNetns, ports: HostPorts, target: IpInterface) -> None:
    _route_localhost(netns, ports, target)
    by_iptables, by_nftables = (
        functools.partial(add, call.host_tools, ports, target) for add in (hostports.add_iptables, hostports.add_nft)
    )
    with contract.prefixed("unable to setup DNAT"):
        backends.make(call.host_tools, ports.backend, by_iptables=by_iptables, by_nftables=by_nftables)
    _forget_flows(netns, ports)


def _route_localhost(netns: PodNetns, ports: HostPorts, target: IpInterface) -> None:
    with netns.on_host(), interfaces.step(f"route localhost to {target.ip}"):
        if parts := _sysctl(netns, ports, target):
            interfaces.try_sysctl(*parts, value="1")


def _sysctl(netns: PodNetns, ports: HostPorts, target: IpInterface) -> tuple[str, ...]:
    """Return the host's sysctl (`route_localnet`) that lets packets to 127.0.0.1 leave over the link to the container.

    Empty if none is needed, or the host has no route to the container. Raises OSError.
    """
    if not ports.snat or target.version != 4:
        return ()
    try:
        index = netns.host.route_to(target.ip)
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return ()
        raise
    return "ipv4", "conf", netns.host.link(index).name, "route_localnet"


def _remove(call: Call, ports: HostPorts) -> None:
    """Remove the rules; of both IP versions if the addresses are not known. Raises CniError."""
    versions = (
        sorted({item.version for item in _targets(call.prev_result, call.invocation.ifname)})
        if call.prev_result
        else (4, 6)
    )
    removals = [
        (name, functools.partial(remove, call.host_tools, version, ports))
        for name, remove in ((backends.IPTABLES, hostports.remove_iptables), (backends.NFTABLES, hostports.remove_nft))
        for version in versions
    ]
    removals.sort(key=lambda item: ports.backend not in ("", item[0]))
    if failures := backends.remove(ports.backend, removals, is_added=bool(call.prev_result), in_one=True):
        raise InternalError(
            f"failed to remove the host ports: {'; '.join(failures)}",
            f"the rules contain {ports.chain} or {ports.container_id}",
        )


def _targets(result: Result, ifname: str) -> list[IpInterface]:
    """Return the first address of each family that the container has on the interface."""
    found: dict[int, IpInterface] = {}
    # A plugin may name an interface that its result does not have: the address is taken for the container's.
    others = {index for index, item in enumerate(result.interfaces) if not item.sandbox or item.name != ifname}
    for ip in result.ips:
        if ip.interface not in others:
            address = interface_of(ip.address)
            found.setdefault(address.version, address)
    return list(found.values())


def _forget_flows(netns: PodNetns, ports: HostPorts) -> None:
    if numbers := [item.host_port for item in ports.mappings if item.protocol == "udp"]:
        from multus_daemon.kernel import flows  # only for UDP

        with netns.on_host(), interfaces.step("forget flows to the host ports"):
            flows.forget_udp(numbers)


# --- the configuration -----------------------------------------------------------------------------------------------


def _given(call: Call) -> Sequence[Any]:
    return gojson.get_list(contract.requests(call.fields)[0], "portMappings") or ()


def read(call: Call) -> HostPorts:
    """Read the configuration. Raises DecodingFailureError, InvalidNetworkConfigError, InvalidAnnotationError."""
    fields = call.fields
    with contract.reading(call.name):
        snat, bit = gojson.get_bool(fields, "snat"), gojson.get_int(fields, "markMasqBit")
        chain, backend = gojson.get_str(fields, "externalSetMarkChain") or "", gojson.get_str(fields, "backend") or ""
        conditions = {version: _conditions(fields, f"conditionsV{version}") for version in (4, 6)}
        mappings = [_mapping(contract.as_object(item, "portMappings")) for item in _given(call)]
        masquerade_all = bool(gojson.get_bool(fields, "masqAll"))
    if chain and bit is not None:
        raise InvalidNetworkConfigError("Cannot specify externalSetMarkChain and markMasqBit")
    if chain and not iptables.CHAIN.fullmatch(chain):
        raise InvalidNetworkConfigError(f"externalSetMarkChain: {contract.shown(chain)} is not the name of a chain")
    if bit is not None and not 0 <= bit <= _MARK_BIT_MAX:
        raise InvalidNetworkConfigError(f"MasqMarkBit must be between 0 and {_MARK_BIT_MAX}", f"markMasqBit is {bit}")
    return HostPorts(
        network=call.name,
        container_id=call.invocation.container_id,
        mappings=mappings,
        backend=_backend(fields, backend, conditions),
        snat=snat is not False,
        masquerade_all=masquerade_all,
        mark=1 << (_MARK_BIT if bit is None else bit),
        mark_chain=chain,
        conditions=conditions,
    )


def _backend(fields: Mapping[str, Any], backend: str, conditions: Mapping[int, Sequence[str]]) -> str:
    """Return the backend that `backend` or another option names; empty: any. Raises InvalidNetworkConfigError."""
    options: dict[str, list[str]] = {
        backends.IPTABLES: ["externalSetMarkChain"] if gojson.get_str(fields, "externalSetMarkChain") else [],
        backends.NFTABLES: [],
    }
    if backend and backend not in options:
        raise InvalidNetworkConfigError(f'unrecognized backend "{backend}"')
    for version, words in conditions.items():
        if words:
            is_iptables = words[0].startswith(("-", "!"))
            options[backends.IPTABLES if is_iptables else backends.NFTABLES].append(f"conditionsV{version}")
    chosen = backend or next((name for name, keys in options.items() if keys), "")
    for other, keys in options.items():
        if chosen and other != chosen and keys:
            raise InvalidNetworkConfigError(
                f"{chosen} backend was requested but configuration contains {other}-specific options [{' '.join(keys)}]"
            )
    return chosen


def _conditions(fields: Mapping[str, Any], key: str) -> Sequence[str]:
    words = gojson.get_strings(fields, key) or ()
    for word in words:
        if not _CONDITION.fullmatch(word):
            raise InvalidNetworkConfigError(f"{key}: {contract.shown(word)} is not allowed in a rule")
    return words


def _mapping(fields: Mapping[str, Any]) -> PortMapping:
    host, container = (gojson.get_int(fields, key) or 0 for key in ("hostPort", "containerPort"))
    protocol, address = (gojson.get_str(fields, "protocol") or "").lower(), gojson.get_str(fields, "hostIP") or ""
    for what, port in (("container", container), ("host", host)):
        if not 0 < port <= _PORT_MAX:
            raise InvalidAnnotationError(f"Invalid {what} port number: {port}", f"portMappings: {what}Port")
    if protocol not in _PROTOCOLS:
        raise InvalidAnnotationError(f"portMappings: protocol {contract.shown(protocol)} is none of tcp, udp, sctp")
    try:
        return PortMapping(host, container, protocol, contract.ip_address(address) if address else None)
    except ValueError as error:
        raise InvalidAnnotationError(f"portMappings: hostIP {contract.shown(address)} is not an IP address") from error
