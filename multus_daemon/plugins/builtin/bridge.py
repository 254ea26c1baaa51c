"""`bridge`: a veth pair whose host end is a port of a bridge, which may be the containers' gateway.

The kernel state is that of the reference plugin (containernetworking/plugins `plugins/main/bridge`), so that either can
remove what the other made; `docs/builtin-plugins.md` lists the differences. The bridge and its addresses belong to the
network: they stay after a DEL, and after an ADD that fails.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import bridge_port, configuration, interfaces, masquerade, restore, spoofing, veth
from multus_daemon.plugins.builtin.bridge_port import BridgeConfig
from multus_daemon.plugins.builtin.contract import Call, Undo, ipam_type, run_ipam
from multus_daemon.plugins.builtin.interfaces import located, step
from multus_daemon.plugins.plugin import Difference
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, Route

# Position of the container's end in the result's interfaces, behind the bridge and the host's end.
_CONTAINER_INTERFACE: Final = 2


def unsupported(call: Call) -> str:
    """Name the first key or value that this plugin does not know."""
    if unknown := configuration.unknown_key(call.fields, bridge_port.KEYS):
        return unknown
    for item in gojson.get_list(call.fields, "vlanTrunk") or ():
        trunk = item if isinstance(item, dict) else {}
        if unknown := configuration.unknown_key(trunk, bridge_port.TRUNK_KEYS, within="vlanTrunk: "):
            return unknown
    if gojson.get_bool(call.fields, "macspoofchk") and call.tools is None:
        return "macspoofchk: true"
    return masquerade.unsupported(call)


def validate(call: Call) -> None:
    """Read the configuration."""
    bridge_port.read(call)


def add(call: Call, netns: PodNetns) -> Result:
    """Make the port, and the bridge if it is missing. If it raises, the port and everything of it is removed.

    The pair comes before the addresses, because an IPAM plugin such as dhcp needs the container's end.
    """
    settings = bridge_port.read(call)
    ifname = call.invocation.ifname
    answer = Result()
    with Undo() as undo:
        interfaces.require_absent(call, netns, kind="veth")
        pair = veth.Pair()
        undo.arm("remove the veth pair", functools.partial(veth.undo, pair, netns))
        with located(call):
            netns.require()
            bridge, host, container = bridge_port.connect(netns, config=settings, ifname=ifname, pair=pair)
        if settings.spoof_check:
            undo.arm("remove the rules against other MAC addresses", functools.partial(spoofing.remove, call))
            spoofing.add(call, host.name, container.mac)
        if settings.is_layer3:
            undo.arm("release the addresses", functools.partial(run_ipam, call, "DEL"))
            answer = _with_gateways(run_ipam(call, "ADD"), settings)
        with located(call), netns.inside():
            on_host = bridge_port.configure(
                netns, config=settings, bridge=bridge, host=host, container=container, wanted=answer
            )
        if settings.is_layer3 and settings.masquerade:
            addresses = [inet.interface_of(ip.address) for ip in answer.ips]
            undo.arm("stop masquerading", functools.partial(masquerade.remove, call, addresses))
            masquerade.add(call, addresses)
    made = [Interface(link.name, link.mac) for link in on_host]
    made.insert(_CONTAINER_INTERFACE, interfaces.made(call, container))
    return replace(answer, interfaces=tuple(made), dns=answer.dns if settings.dns is None else settings.dns)


def delete(call: Call, netns: PodNetns) -> None:
    """Remove the pair, release the addresses, remove the rules; the bridge stays. Absent ones are not an error.

    The addresses are released only after the pair has been removed. Later steps run even if one fails.
    """
    removed = masquerade.remove_link(call, netns)
    failures: list[CniError] = []
    try:
        if ipam_type(call):
            run_ipam(call, "DEL")
    except CniError as error:
        failures.append(error)
    try:
        if spoofing.is_wanted(call):
            spoofing.remove(call)
    except CniError as error:
        failures.append(error)
    try:
        if ipam_type(call):
            masquerade.forget(call, removed)
    except CniError as error:
        failures.append(error)
    if failures:
        first, *others = failures
        raise first.with_context("; then: " + "; ".join(map(str, others))) if others else first


def keeps(call: Call) -> bool:
    """Report whether there may be rules."""
    return configuration.makes_rules(call.fields)


def status(call: Call) -> None:
    """Raise CniError if the configuration is not usable, or the IPAM plugin, if there is one, is not ready."""
    if bridge_port.read(call).is_layer3:
        run_ipam(call, "STATUS")


def _with_gateways(answer: Result, settings: BridgeConfig) -> Result:
    """Assign the addresses to the container's end; add the gateways and default routes that are configured.

    A gateway that the IPAM plugin does not name is the first address of the network.
    """
    ips = tuple([_with_gateway(ip, settings) for ip in answer.ips])
    routes = list(answer.routes)
    for ipv4 in (True, False) if settings.is_default_gateway else ():
        first = next((ip for ip in ips if ip.is_ipv4 is ipv4), None)
        has_default = any(route.is_default and route.gw and route.is_ipv4 is ipv4 for route in routes)
        if first is not None and not has_default:
            routes.append(Route("0.0.0.0/0" if ipv4 else "::/0", gw=first.gateway))
    return replace(answer, ips=ips, routes=tuple(routes))


def _with_gateway(ip: IpConfig, settings: BridgeConfig) -> IpConfig:
    gateway = ip.gateway
    if not gateway and settings.is_gateway:
        network = inet.interface_of(ip.address).network
        try:
            gateway = str(network.network_address + 1)
        except ipaddress.AddressValueError as error:
            raise InternalError(f"no address is left for a gateway of {ip.address}") from error
    return replace(ip, interface=_CONTAINER_INTERFACE, gateway=gateway)


def check(call: Call, netns: PodNetns) -> None:
    """Compare bridge, port and container with prevResult; run the IPAM plugin's CHECK."""
    settings = bridge_port.read(call)
    with located(call), netns.inside():
        pass
    if settings.is_layer3:
        run_ipam(call, "CHECK")
    previous, container = interfaces.previous_result(call, "bridge")
    bridge = next((item for item in previous.interfaces if item.name == settings.bridge and not item.sandbox), None)
    if bridge is None:
        raise InternalError(
            f"CNI created bridge {settings.bridge} was not found in prevResult",
            "has the configuration's 'bridge' changed since ADD?",
        )
    with located(call), netns.inside():
        master = _check_bridge(netns, bridge, settings)
        link = interfaces.check(netns, container, previous, "veth")
        _check_port(netns, link, master, previous)


def _check_bridge(netns: PodNetns, expected: Interface, settings: BridgeConfig) -> Link:
    with step(f'find bridge "{expected.name}"'):
        link = netns.host.link(expected.name)
    if link.kind != "bridge":
        raise InternalError(f'interface "{expected.name}" does not have link type of bridge')
    if link.mac != expected.mac.lower() and not _has_mac_of_port(netns, link):
        interfaces.require_mac(link, expected, f'bridge "{expected.name}"')
    if link.is_promiscuous is not settings.promiscuous:
        raise InternalError(
            f'bridge "{expected.name}" is {"" if link.is_promiscuous else "not "}promiscuous, '
            f"and promiscMode is {str(settings.promiscuous).lower()}"
        )
    return link


def _has_mac_of_port(netns: PodNetns, bridge: Link) -> bool:
    """Return True if the bridge has the MAC address of a port: it takes the lowest one unless an address was set.

    ADD sets one on a bridge that it makes or that it gives an address, not on another one.
    """
    with step(f'list the ports of "{bridge.name}"'):
        return bridge.mac in {port.mac for port in netns.host.ports(bridge.index)}


def _check_port(netns: PodNetns, container: Link, bridge: Link, previous: Result) -> None:
    """Require that the other end of the pair is a port of the bridge, with the name and MAC address of prevResult."""
    for expected in previous.interfaces:
        with step("look for the port"):
            link = None if expected.sandbox else netns.host.find_link(expected.name)
        if link is None:
            continue
        # A veth has the other end's index, as its own namespace numbers it.
        if link.index == container.peer and link.peer == container.index and link.master == bridge.index:
            interfaces.require_mac(link, expected, f'"{link.name}"')
            return
    raise InternalError(
        f'the other end of "{container.name}" is no port of bridge "{bridge.name}" by any name in prevResult'
    )


# --- what is not as the record has it ---------------------------------------------------------------------------------


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return what is not as the recorded result has it. Raises CniError."""
    settings = bridge_port.read(call)
    result, own = restore.recorded(call)
    host_entry = veth.host_end(result.interfaces)
    bridge_entry = next(
        (item for item in result.interfaces if (item.name, item.sandbox) == (settings.bridge, "")), None
    )
    remake = functools.partial(_remake, call, netns, settings, result, own, host_entry)
    with located(call), netns.inside():
        with step(f'look for "{settings.bridge}"'):
            bridge = netns.host.find_link(settings.bridge)
        if bridge is not None and bridge.kind != "bridge":
            wrong = restore.wrong_kind(bridge, "bridge")
            return [dataclasses.replace(wrong, on_host=True)] if wrong else []
        found = [*_bridge(netns, bridge, bridge_entry, settings)]
        if settings.is_layer3 and settings.is_gateway:
            found += _gateways(call, netns, bridge, settings, result)
        pair = restore.pair(netns, own, host_entry, remake)
        if pair.difference:
            found.append(pair.difference)
        mtu = settings.mtu or restore.VETH_MTU
        if pair.host:
            mac = host_entry.mac if host_entry else ""
            found += restore.link(netns.host, pair.host, mac=mac, mtu=mtu, on_host=True)
            found += _port(netns, bridge, pair.host, settings)
        if pair.pod:
            up = not settings.disable_container_interface
            found += restore.pod(call, netns, pair.pod, own, restore.changes(pair.pod, result), mtu=mtu, up=up)
    if settings.spoof_check and pair.host and (mac := own.mac or (pair.pod.mac if pair.pod else "")):
        found += spoofing.differences(call, pair.host.name, mac)
    if settings.is_layer3 and settings.masquerade:
        found += masquerade.differences(call, [inet.interface_of(ip.address) for ip in result.ips])
    return found


# --- the bridge ------------------------------------------------------------------------------------------------------


def _bridge(
    netns: PodNetns, bridge: Link | None, entry: Interface | None, settings: BridgeConfig
) -> Iterator[Difference]:
    repair = functools.partial(_ensure, netns, entry, settings)
    if bridge is None:
        yield Difference(f'bridge "{settings.bridge}" is not there', repair, on_host=True)
        return
    yield from restore.link(netns.host, bridge, on_host=True)
    if settings.promiscuous and not bridge.is_promiscuous:
        yield Difference(f'bridge "{bridge.name}" is not promiscuous', repair, on_host=True)


def _ensure(netns: PodNetns, entry: Interface | None, settings: BridgeConfig) -> None:
    """Make the bridge if it is missing, with the recorded MAC address: it may be that of the pods' gateway."""
    with step(f'set up "{settings.bridge}"'):
        bridge_port.ensure_bridge(netns, settings, entry.mac if entry else "")


def _gateways(
    call: Call, netns: PodNetns, bridge: Link | None, settings: BridgeConfig, result: Result
) -> Iterator[Difference]:
    holder = bridge
    if settings.vlan:
        name = f"{settings.bridge}.{settings.vlan}"
        with step(f'look for "{name}"'):
            holder = netns.host.find_link(name)
        if holder is None:
            repair = functools.partial(_ensure_vlan_interface, netns, settings)
            yield Difference(f'interface "{name}" is not there', repair, on_host=True)
        else:
            yield from restore.link(netns.host, holder, on_host=True)
            yield from _vlan_port(netns, bridge, holder, settings)
    name = holder.name if holder else f"{settings.bridge}.{settings.vlan}" if settings.vlan else settings.bridge
    with step(f'read the addresses of "{name}"'):
        present = [item.address for item in netns.host.addresses(holder.index)] if holder else []
    # A binary of the list may have reported another length.
    others = {item.ip for item in present} if "addresses" in call.not_compared else set()
    for gateway in _left(bridge_port.gateways(result), settings):
        if gateway not in present and gateway.ip not in others:
            repair = functools.partial(_add_gateway, netns, name, gateway)
            yield Difference(f'gateway address {gateway} is not on "{name}"', repair, on_host=True)
    yield from restore.forwarding(netns, result.ips)


def _vlan_port(netns: PodNetns, bridge: Link | None, holder: Link, settings: BridgeConfig) -> Iterator[Difference]:
    """Yield the differences of the port behind the bridge's interface in the VLAN, both of which are on the host."""
    if holder.kind == "veth":
        with step(f'find the port of "{holder.name}"'):
            port = netns.host.link_at(holder.peer or holder.index)
        yield from restore.link(netns.host, port, on_host=True)
        plain = dataclasses.replace(settings, trunk=(), hairpin=False, port_isolation=False)
        yield from _port(netns, bridge, port, plain)


def _left(gateways: list[IpInterface], settings: BridgeConfig) -> list[IpInterface]:
    """Return the addresses that ADD leaves of those that it has set, one after the other."""
    if not settings.force_address:
        return gateways
    left: list[IpInterface] = []
    for item in gateways:
        if item not in left:
            left = [
                other
                for other in left
                if other.version != item.version or (item.version == 6 and not item.network.overlaps(other.network))
            ]
            left.append(item)
    return left


def _add_gateway(netns: PodNetns, name: str, gateway: IpInterface) -> None:
    """Add the address beside those that the link has."""
    with step(f'find "{name}"'):
        link = netns.host.link(name)
    bridge_port.add_address(netns, link, gateway)


def _ensure_vlan_interface(netns: PodNetns, settings: BridgeConfig) -> None:
    with step(f'find "{settings.bridge}"'):
        bridge = netns.host.link(settings.bridge)
    bridge_port.ensure_vlan_interface(netns, bridge, settings)


# --- the port --------------------------------------------------------------------------------------------------------


def _port(netns: PodNetns, bridge: Link | None, port: Link, settings: BridgeConfig) -> Iterator[Difference]:
    if bridge is None or port.master != bridge.index:
        repair = functools.partial(_connect, netns, settings, port)
        yield Difference(f"port {port.name} is not on bridge {settings.bridge}", repair, on_host=True)
        return
    hairpin, isolated = settings.hairpin or port.is_hairpin, settings.port_isolation or port.is_isolated
    lacking = [
        *(["hairpin mode"] if hairpin and not port.is_hairpin else []),
        *(["isolation"] if isolated and not port.is_isolated else []),
    ]
    if lacking:
        repair = functools.partial(_set_port, netns, port, hairpin=hairpin, isolated=isolated)
        yield Difference(f"port {port.name} is without {' and '.join(lacking)}", repair, on_host=True)
    if settings.vlan or settings.trunk:
        wanted = {vlan for first, last in settings.trunk for vlan in range(first, last + 1)}
        wanted.add(settings.vlan or bridge_port.NATIVE_VLAN)
        with step(f'read the VLANs of "{port.name}"'):
            absent = sorted(wanted.difference(netns.host.vlans(port.index)))
        if absent:
            repair = functools.partial(bridge_port.add_vlans, netns, port, settings, settings.trunk)
            text = ", ".join(map(str, absent[:_SHOWN])) + (", ..." if absent[_SHOWN:] else "")
            yield Difference(f"port {port.name} does not carry VLAN {text}", repair, on_host=True)


_SHOWN = 10


def _connect(netns: PodNetns, settings: BridgeConfig, port: Link) -> None:
    with step(f'find "{settings.bridge}"'):
        bridge = netns.host.link(settings.bridge)
    bridge_port.add_port(netns, port, bridge, settings)


def _set_port(netns: PodNetns, port: Link, *, hairpin: bool, isolated: bool) -> None:
    with step(f"set up hairpin mode and isolation for {port.name}"):
        netns.host.set_port(port.index, hairpin=hairpin, isolated=isolated)


def _remake(
    call: Call, netns: PodNetns, settings: BridgeConfig, result: Result, own: Interface, host: Interface | None
) -> None:
    """Make the pair anew, with the recorded names, MAC addresses, addresses and routes."""
    # The gateways are compared by themselves: `forceAddress` would remove the addresses of others.
    settings = dataclasses.replace(settings, mac=own.mac or settings.mac, is_gateway=False)
    with Undo() as undo, located(call), netns.inside():
        pair = restore.new_pair(netns, host)
        undo.arm("remove the veth pair", functools.partial(veth.undo, pair, netns))
        bridge, end, container = bridge_port.connect(netns, config=settings, ifname=own.name, pair=pair)
        restore.set_mac(netns, end, host)
        if settings.spoof_check:
            with netns.on_host():
                spoofing.restore(call, end.name, container.mac)
        bridge_port.configure(netns, config=settings, bridge=bridge, host=end, container=container, wanted=result)
