"""Kernel operations of `bridge`. The functions raise InternalError."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Final

from multus_daemon import deadlines
from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import OPERSTATE_UP, Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import interfaces, veth
from multus_daemon.plugins.builtin.bridge.config import BridgeConfig
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.runtime import deadline
from multus_daemon.spec.cni.errors import InternalError
from multus_daemon.spec.cni.result import Result

_PORT_POLL_SECONDS: Final = (0.001, 0.1)
NATIVE_VLAN: Final = 1
_NO_MAC: Final = "00:00:00:00:00:00"


def connect(netns: PodNetns, *, config: BridgeConfig, ifname: str, pair: veth.Pair) -> tuple[Link, Link, Link]:
    """Make the bridge, and the pair with the host's end as a port; return bridge, host's and container's end.

    The container's end stays down.
    """
    try:
        with step(f'set up "{config.bridge}"'):
            bridge = ensure_bridge(netns, config)
    except InternalError as error:
        raise InternalError(f'failed to create bridge "{config.bridge}": {error.msg}', error.details) from error
    host, container = veth.make(netns, ifname, pair, mtu=config.mtu, mac=config.mac)
    add_port(netns, host, bridge, config)
    return bridge, host, container


def add_port(netns: PodNetns, host: Link, bridge: Link, config: BridgeConfig) -> None:
    """Make the host's end a port of the bridge, with its hairpin mode, isolation and VLANs."""
    with step(f'connect "{host.name}" to bridge {bridge.name}'):
        netns.host.set_master(host.index, bridge.index)
    # Both are off on a new port.
    if config.hairpin or config.port_isolation:
        with step(f"set up hairpin mode and isolation for {host.name}"):
            netns.host.set_port(host.index, hairpin=config.hairpin, isolated=config.port_isolation)
    _set_vlans(netns, host, config, config.trunk)


def configure(
    netns: PodNetns, *, config: BridgeConfig, bridge: Link, host: Link, container: Link, wanted: Result
) -> list[Link]:
    """Set the container's addresses and routes, its gateways, and its link up.

    Returns bridge and host's end as they are then, and the interface in the network's VLAN if that has the gateways.
    """
    ifname, gateway = container.name, None
    if config.is_layer3:
        if config.detect_duplicates:
            interfaces.try_sysctl("ipv6", "conf", ifname, "enhanced_dad", value="1")
        interfaces.try_sysctl("ipv6", "conf", ifname, "accept_dad", value="1" if config.detect_duplicates else "0")
        interfaces.try_sysctl("ipv4", "conf", ifname, "arp_notify", value="1")
        interfaces.bring_up(netns, container, wanted, interfaces.routes(container, wanted))
        if config.is_gateway:
            gateway = _set_up_gateways(netns, bridge, config, wanted)
    elif not config.disable_container_interface:
        interfaces.bring_up(netns, container, wanted, [])
    if not config.disable_container_interface:
        host = _until_forwarding(netns, host)
    with step(f'find "{bridge.name}"'):
        # Its MAC address may have become that of its lowest port.
        bridge = netns.host.link(bridge.name)
    return [bridge, host, *([gateway] if gateway else [])]


def ensure_bridge(netns: PodNetns, config: BridgeConfig, mac: str = "") -> Link:
    """Return the bridge; make it if it is missing, with `mac` or a random one, which ports do not change.

    An existing one keeps its MTU and its VLAN filtering.
    """
    name, host = config.bridge, netns.host
    link = host.find_link(name)
    if link is None:
        # Another ADD may make it first.
        with step(f'add "{name}"'), contextlib.suppress(FileExistsError):
            mac = mac or veth.random_mac()
            host.add_bridge(name, mtu=config.mtu, mac=mac, vlan_filtering=config.vlan_filtering)
        link = host.link(name)
    if link.kind != "bridge":
        raise InternalError(f'"{name}" already exists but is not a bridge')
    if config.promiscuous and not link.is_promiscuous:
        with step(f'set promiscuous mode on "{name}"'):
            host.set_promiscuous(link.index)
    with netns.on_host():
        veth.ignore_advertisements(name)
    if not link.is_up:
        host.set_up(link.index)
    return link


def _set_vlans(netns: PodNetns, port: Link, config: BridgeConfig, trunk: tuple[tuple[int, int], ...]) -> None:
    if not (config.vlan or trunk):
        return
    if not config.preserve_default_vlan:
        with step(f'remove default vlan on interface "{port.name}"'):
            for vlan in netns.host.vlans(port.index):
                netns.host.delete_vlan(port.index, vlan)
    add_vlans(netns, port, config, trunk)


def add_vlans(netns: PodNetns, port: Link, config: BridgeConfig, trunk: tuple[tuple[int, int], ...]) -> None:
    """Let the port carry the VLANs of the configuration; those that it carries stay."""
    kernel = netns.host
    with step(f'set up vlan tag on interface "{port.name}"'):
        if config.vlan:
            kernel.add_vlans(port.index, config.vlan, config.vlan, native=True)
        for first, last in trunk:
            kernel.add_vlans(port.index, first, last)
    if not config.vlan:
        with step(f'set up default native vlan tag on interface "{port.name}"'):
            kernel.add_vlans(port.index, NATIVE_VLAN, NATIVE_VLAN, native=True)


def _until_forwarding(netns: PodNetns, port: Link) -> Link:
    """Wait until the port is up; return it."""
    end = time.monotonic() + deadlines.BRIDGE_PORT_UP_SECONDS
    pause, longest = _PORT_POLL_SECONDS
    while True:
        with step(f'find "{port.name}"'):
            current = netns.host.link(port.name)
        if current.operstate == OPERSTATE_UP:
            return current
        if time.monotonic() >= end:
            raise InternalError(f"bridge port in error state: {current.operstate.lower()}", f'"{port.name}" is not up')
        deadline.pause(pause)
        pause = min(pause * 2, longest)


def _set_up_gateways(netns: PodNetns, bridge: Link, config: BridgeConfig, wanted: Result) -> Link | None:
    """Set each gateway's address on the bridge or its interface in the VLAN, and enable forwarding.

    Returns the interface in the VLAN.
    """
    in_vlan = ensure_vlan_interface(netns, bridge, config) if config.vlan else None
    for gateway in gateways(wanted):
        _ensure_address(netns, in_vlan or bridge, gateway, force=config.force_address)
    interfaces.enable_forwarding(netns, wanted.ips)
    return in_vlan


def gateways(wanted: Result) -> list[IpInterface]:
    """Return the gateways' addresses, IPv4 first."""
    # A binary of the list may have added addresses without a gateway.
    ips = sorted((ip for ip in wanted.ips if ip.gateway), key=lambda ip: not ip.is_ipv4)
    return [inet.interface_of(f"{ip.gateway}/{ip.address.partition('/')[2]}") for ip in ips]


def _ensure_address(netns: PodNetns, link: Link, address: IpInterface, *, force: bool) -> None:
    """Set the address on the link. With `force` it replaces any other IPv4 address, or an overlapping IPv6 one."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with step(f'read the addresses of "{link.name}"'):
        present = [item.address for item in netns.host.addresses(link.index, family)]
    if address in present:
        return
    for other in present:
        if address.version == 6 and not address.network.overlaps(other.network):
            continue
        if not force:
            raise InternalError(
                f'failed to set bridge addr: "{link.name}" already has an IP address different from {address}',
                f"it has {other}; forceAddress: true replaces it",
            )
        with step(f'remove IP address {other} from "{link.name}"'):
            netns.host.delete_address(link.index, other)
    add_address(netns, link, address)


def add_address(netns: PodNetns, link: Link, address: IpInterface) -> None:
    """Add an address to the bridge, or to its interface in the VLAN, and fix the MAC address that goes with it."""
    with step(f'add IP address {address} to "{link.name}"'):
        try:
            netns.host.add_address(link.index, address)
        except FileExistsError:
            # Another ADD was first.
            return
    # Set explicitly, so that it does not follow the lowest port as ports come and go. A bridge that has lost its last
    # port has none (and the reference fails then): it keeps the address that our port has given it.
    with step(f'set the MAC address of "{link.name}"'):
        own = link if link.mac != _NO_MAC else netns.host.link(link.name)
        netns.host.set_mac(link.index, own.mac)


def ensure_vlan_interface(netns: PodNetns, bridge: Link, config: BridgeConfig) -> Link:
    """Return `<bridge>.<vlan>`, one end of a pair whose other end is a port in the VLAN. It stays after a DEL."""
    name, kernel, pair = f"{bridge.name}.{config.vlan}", netns.host, veth.Pair()
    with step(f'create vlan interface "{name}"'):
        existing = kernel.find_link(name)
        if existing is not None:
            return existing
        try:
            veth.add(kernel, name, kernel, netns.host_netns, pair, mtu=bridge.mtu)
        except InternalError:
            if existing := kernel.find_link(name):
                # Another ADD was first.
                return existing
            raise
        try:
            link, port = kernel.link(name), kernel.link(pair.host_name)
            with netns.on_host():
                veth.ignore_advertisements(port.name)
            kernel.set_master(port.index, bridge.index)
            _set_vlans(netns, port, config, trunk=())
            kernel.set_up(link.index)
        except (OSError, InternalError):
            with contextlib.suppress(OSError):
                kernel.delete_link(kernel.link(name).index)
            raise
    return link
