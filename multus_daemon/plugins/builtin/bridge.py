"""`bridge`: a veth pair whose end on the host is a port of a bridge; the bridge may be the containers' gateway.

The kernel state is that of the reference plugin (containernetworking/plugins `plugins/main/bridge`), so that either can
remove what the other made; `docs/builtin-plugins.md` lists the differences. The bridge and its addresses belong to the
network: they stay after a DEL, and after an ADD that fails.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import bridge_port, contract, interfaces, masquerade, restore, spoofing, veth
from multus_daemon.plugins.builtin.bridge_port import BridgeConfig
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.plugins.builtin.interfaces import located, step
from multus_daemon.plugins.builtin.link_plugin import PairPlugin
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InternalError, Origin
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, Route

KEYS: Final = bridge_port.KEYS
_SHOWN: Final = 10


class _Bridge(PairPlugin[BridgeConfig]):
    def unsupported(self, call: Call) -> str:
        """Name the first unknown key of `vlanTrunk`, or rules that need the host's programs; empty if none."""
        for item in gojson.get_list(call.fields, "vlanTrunk") or ():
            trunk = item if isinstance(item, dict) else {}
            if unknown := contract.unknown_key(trunk, bridge_port.TRUNK_KEYS, within="vlanTrunk: "):
                return unknown
        if gojson.get_bool(call.fields, "macspoofchk") and call.tools is None:
            return "macspoofchk: true"
        return super().unsupported(call)

    def read(self, call: Call) -> BridgeConfig:
        return bridge_port.read(call)

    def make(
        self, call: Call, netns: PodNetns, config: BridgeConfig, undo: Undo, host: Interface | None = None
    ) -> Sequence[Link]:
        pair = restore.new_pair(netns, host)
        undo.arm("remove the veth pair", functools.partial(veth.undo, pair, netns))
        made = bridge_port.connect(netns, config, call.invocation.ifname, pair)
        _, end, container = made
        if config.spoof_check:
            undo.arm("remove the rules against other MAC addresses", functools.partial(spoofing.remove, call))
            (spoofing.restore if host else spoofing.add)(call, end.name, container.mac)
        return made

    def completed(self, call: Call, config: BridgeConfig, answer: Result) -> Result:
        """Return the IPAM plugin's answer with the gateways and default routes that the configuration asks for.

        If the IPAM plugin names no gateway, it is the first address of the subnet.
        """
        ips = tuple([_with_gateway(ip, config) for ip in answer.ips])
        routes = list(answer.routes)
        for ipv4 in (True, False) if config.is_default_gateway else ():
            first = next((ip for ip in ips if ip.is_ipv4 is ipv4), None)
            has_default = any(route.is_default and route.gw and route.is_ipv4 is ipv4 for route in routes)
            if first is not None and not has_default:
                routes.append(Route("0.0.0.0/0" if ipv4 else "::/0", gw=first.gateway))
        return replace(answer, ips=ips, routes=tuple(routes))

    def configure(
        self, call: Call, netns: PodNetns, config: BridgeConfig, made: Sequence[Link], wanted: Result
    ) -> Sequence[Interface]:
        """Set addresses and routes of the container's end, and the gateways' addresses on the bridge."""
        on_host = bridge_port.configure(netns, config, made, wanted)
        bridge, end, *in_vlan = [Interface(link.name, link.mac) for link in on_host]
        return bridge, end, interfaces.made(call, made[-1]), *in_vlan

    def differences(self, call: Call, netns: PodNetns) -> list[Difference]:
        config, (result, own) = self.read(call), restore.recorded(call)
        # The gateways are compared by themselves: `forceAddress` would remove the addresses of others.
        again = dataclasses.replace(config, mac=own.mac or config.mac, is_gateway=False)
        remake = functools.partial(self.remake, call, netns, again, result)
        with located(call), netns.inside():
            with step(f'look for "{config.bridge}"'):
                bridge = netns.host.find_link(config.bridge)
            if bridge is not None and (wrong := restore.wrong_kind(bridge, "bridge")):
                return [dataclasses.replace(wrong, on_host=True)]
            found = [*_bridge(call, netns, bridge, result, config)]
            if config.is_layer3 and config.is_gateway:
                found += _gateways(call, netns, bridge, config, result)
            mtu = config.mtu or restore.VETH_MTU
            pod, host, of_pair = restore.pair(netns, own, result, remake, mtu=mtu)
            found += of_pair
            if host:
                found += _port(netns, bridge, host, config)
            if pod:
                up = not config.disable_container_interface
                found += restore.pod(call, netns, pod, own, restore.changes(pod, result), mtu=mtu, up=up)
        if config.spoof_check and host and (mac := own.mac or (pod.mac if pod else "")):
            found += spoofing.differences(call, host.name, mac)
        if config.is_layer3 and config.masquerade:
            found += masquerade.differences(call, [inet.interface_of(ip.address) for ip in result.ips])
        return found


unsupported, read, add, delete, check, status, keeps, differences = _Bridge().functions


def _with_gateway(ip: IpConfig, config: BridgeConfig) -> IpConfig:
    gateway = ip.gateway
    if not gateway and config.is_gateway:
        network = inet.interface_of(ip.address).network
        try:
            gateway = str(network.network_address + 1)
        except ipaddress.AddressValueError as error:
            raise InternalError(f"no address is left for a gateway of {ip.address}", origin=Origin.NETWORK) from error
    return replace(ip, gateway=gateway)


# --- the bridge ------------------------------------------------------------------------------------------------------


def _bridge(
    call: Call, netns: PodNetns, bridge: Link | None, result: Result, settings: BridgeConfig
) -> Iterator[Difference]:
    name, entry = settings.bridge, _entry(result, settings.bridge)
    # With the recorded MAC address: it may be that of the pods' gateway.
    repair = functools.partial(bridge_port.ensure_bridge, netns, settings, entry.mac if entry else "")
    if bridge is None:
        yield Difference(f'bridge "{name}" is not there', repair, on_host=True)
        return
    yield from restore.link(netns.host, bridge, on_host=True)
    if settings.promiscuous and not bridge.is_promiscuous:
        yield Difference(f'bridge "{name}" is not promiscuous', repair, on_host=True)
    if call.invocation.verb != "CHECK":
        return
    # As the reference. Other networks and the administrator may change these, so no repair does.
    if entry is None:
        yield Difference(f'bridge "{name}" is not in prevResult: was it another at the time of the ADD?')
    elif bridge.mac != entry.mac.lower() and not _has_mac_of_port(netns, bridge):
        yield Difference(f'MAC address of bridge "{name}" is {bridge.mac}, not {entry.mac.lower()}')
    if bridge.is_promiscuous and not settings.promiscuous:
        yield Difference(f'bridge "{name}" is promiscuous, and promiscMode is false')


def _entry(result: Result, name: str) -> Interface | None:
    """Return what the ADD has recorded of an interface of the host."""
    return next((item for item in result.interfaces if (item.name, item.sandbox) == (name, "")), None)


def _has_mac_of_port(netns: PodNetns, bridge: Link) -> bool:
    """Return True if the bridge's MAC address is that of a port: the kernel uses the lowest one unless one was set.

    ADD sets a MAC address on a bridge that it makes or to which it adds an IP address, and on no other.
    """
    with step(f'list the ports of "{bridge.name}"'):
        return any(link.mac == bridge.mac for link in netns.host.links() if link.master == bridge.index)


def _gateways(
    call: Call, netns: PodNetns, bridge: Link | None, settings: BridgeConfig, result: Result
) -> Iterator[Difference]:
    holder, name = bridge, settings.bridge
    if settings.vlan:
        name = f"{name}.{settings.vlan}"
        with step(f'look for "{name}"'):
            holder = netns.host.find_link(name)
        if holder is None:
            # With the recorded MAC address: the pods know their gateway by it.
            entry = _entry(result, name)
            mac = entry.mac if entry else ""
            yield Difference(
                f'interface "{name}" is not there',
                lambda: bridge_port.ensure_vlan_interface(netns, netns.host.link(settings.bridge), settings, mac),
                on_host=True,
            )
        else:
            yield from restore.link(netns.host, holder, on_host=True)
            yield from _vlan_port(netns, bridge, holder, settings)
    with step(f'read the addresses of "{name}"'):
        present = [item.address for item in netns.host.addresses(holder.index)] if holder else []
    # A binary of the list may have reported another length.
    others = {item.ip for item in present} if "addresses" in call.not_compared else set()
    for gateway in _left(bridge_port.gateways(result), settings):
        if gateway not in present and gateway.ip not in others:
            # Beside those that the link has.
            repair = functools.partial(bridge_port.add_address, netns, name, gateway)
            yield Difference(f'gateway address {gateway} is not on "{name}"', repair, on_host=True)
    yield from restore.forwarding(netns, result.ips)


def _vlan_port(netns: PodNetns, bridge: Link | None, holder: Link, settings: BridgeConfig) -> Iterator[Difference]:
    if holder.kind == "veth":
        with step(f'find the port of "{holder.name}"'):
            port = netns.host.link(holder.peer or holder.index)
        yield from restore.link(netns.host, port, on_host=True)
        plain = dataclasses.replace(settings, trunk=(), hairpin=False, port_isolation=False)
        yield from _port(netns, bridge, port, plain)


def _left(gateways: list[IpInterface], settings: BridgeConfig) -> list[IpInterface]:
    """Return the gateways' addresses that are left after ADD has set each: with `forceAddress` one replaces another."""
    if not settings.force_address:
        return gateways
    left: list[IpInterface] = []
    for item in gateways:
        if item not in left:
            left = [*(other for other in left if not bridge_port.is_replaced(other, item)), item]
    return left


# --- the port --------------------------------------------------------------------------------------------------------


def _port(netns: PodNetns, bridge: Link | None, port: Link, settings: BridgeConfig) -> Iterator[Difference]:
    if bridge is None or port.master != bridge.index:
        text = f"port {port.name} is not on bridge {settings.bridge}"
        yield Difference(text, lambda: bridge_port.add_port(netns, port, settings), on_host=True)
        return
    hairpin, isolated = settings.hairpin or port.is_hairpin, settings.port_isolation or port.is_isolated
    lacking = [
        *(["hairpin mode"] if hairpin and not port.is_hairpin else []),
        *(["isolation"] if isolated and not port.is_isolated else []),
    ]
    if lacking:
        repair = functools.partial(netns.host.set_port, port.index, hairpin=hairpin, isolated=isolated)
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
