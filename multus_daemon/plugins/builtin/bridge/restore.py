"""`bridge` compared with the record: the bridge, its port and the pod's interface, and what brings each back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import masquerade, restore, spoofing, veth
from multus_daemon.plugins.builtin.bridge import config, kernel
from multus_daemon.plugins.builtin.bridge.config import BridgeConfig
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.plugins.builtin.interfaces import located, step
from multus_daemon.plugins.plugin import Difference
from multus_daemon.spec.cni.result import Interface, Result


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return what is not as the recorded result has it. Raises CniError."""
    settings = config.read(call)
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
        kernel.ensure_bridge(netns, settings, entry.mac if entry else "")


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
    for gateway in _left(kernel.gateways(result), settings):
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
    kernel.add_address(netns, link, gateway)


def _ensure_vlan_interface(netns: PodNetns, settings: BridgeConfig) -> None:
    with step(f'find "{settings.bridge}"'):
        bridge = netns.host.link(settings.bridge)
    kernel.ensure_vlan_interface(netns, bridge, settings)


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
        wanted.add(settings.vlan or kernel.NATIVE_VLAN)
        with step(f'read the VLANs of "{port.name}"'):
            absent = sorted(wanted.difference(netns.host.vlans(port.index)))
        if absent:
            repair = functools.partial(kernel.add_vlans, netns, port, settings, settings.trunk)
            text = ", ".join(map(str, absent[:_SHOWN])) + (", ..." if absent[_SHOWN:] else "")
            yield Difference(f"port {port.name} does not carry VLAN {text}", repair, on_host=True)


_SHOWN = 10


def _connect(netns: PodNetns, settings: BridgeConfig, port: Link) -> None:
    with step(f'find "{settings.bridge}"'):
        bridge = netns.host.link(settings.bridge)
    kernel.add_port(netns, port, bridge, settings)


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
        bridge, end, container = kernel.connect(netns, config=settings, ifname=own.name, pair=pair)
        restore.set_mac(netns, end, host)
        if settings.spoof_check:
            with netns.on_host():
                spoofing.restore(call, end.name, container.mac)
        kernel.configure(netns, config=settings, bridge=bridge, host=end, container=container, wanted=result)
