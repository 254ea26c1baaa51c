"""The configuration of `bridge`, and the bridge, its ports and its VLANs on the host.

Keys, defaults and messages are the reference plugin's. Functions that change the kernel raise InternalError.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import OPERSTATE_UP, Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract, interfaces, masquerade, veth
from multus_daemon.plugins.builtin.contract import Call, ipam_type
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.plugins.builtin.link_plugin import LinkConfig, own_dns, veth_mtu
from multus_daemon.runtime import deadline
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.result import Result

_DEFAULT_BRIDGE: Final = "cni0"
_VLAN_MAX: Final = 4094
TRUNK_KEYS: Final = ("minID", "maxID", "id")
KEYS: Final = (
    *("bridge", "isGateway", "isDefaultGateway", "forceAddress", "mtu", "hairpinMode", "promiscMode"),
    *("vlan", "vlanTrunk", "preserveDefaultVlan", "macspoofchk", "enabledad", "disableContainerInterface"),
    *("portIsolation", *masquerade.KEYS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig(LinkConfig):
    """A checked configuration of bridge; the MTU is also that of a new bridge."""

    bridge: str
    is_layer3: bool
    """True if an IPAM plugin assigns addresses."""
    is_gateway: bool
    """True if the bridge gets the gateways' addresses."""
    is_default_gateway: bool
    force_address: bool
    masquerade: bool
    hairpin: bool
    promiscuous: bool
    """True: set promiscuous mode on the bridge."""
    vlan: int
    """The port's VLAN for untagged frames; 0: none."""
    trunk: tuple[tuple[int, int], ...]
    """Ranges (first, last) of other VLANs that the port carries, ascending."""
    vlan_filtering: bool
    """True: set VLAN filtering on a new bridge."""
    preserve_default_vlan: bool
    spoof_check: bool
    """True: drop frames from the container with another source MAC address."""
    detect_duplicates: bool
    disable_container_interface: bool
    port_isolation: bool


def read(call: Call) -> BridgeConfig:
    """Read a configuration. Raises DecodingFailureError (6), InvalidEnvironmentError (4), InvalidNetworkConfigError."""
    with contract.reading(call.name):
        config = _read(call)
    if problem := names.ifname_problem(config.bridge):
        raise InvalidNetworkConfigError(f'failed to create bridge "{config.bridge}": {problem}')
    if config.is_layer3 and config.disable_container_interface:
        raise InvalidNetworkConfigError("cannot use IPAM when DisableContainerInterface flag is set")
    if config.hairpin and config.promiscuous:
        raise InvalidNetworkConfigError("cannot set hairpin mode and promiscuous mode at the same time")
    return config


def _read(call: Call) -> BridgeConfig:
    fields = call.fields

    def flag(key: str) -> bool:
        return bool(gojson.get_bool(fields, key))

    bridge, (runtime, given) = gojson.get_str(fields, "bridge"), contract.requests(fields)
    by_args = contract.own_args(call.invocation.args, ("MAC",)).get("MAC")
    vlan = gojson.get_int(fields, "vlan") or 0
    if not 0 <= vlan <= _VLAN_MAX:
        raise InvalidNetworkConfigError(f"invalid VLAN ID {vlan} (must be between 0 and {_VLAN_MAX})")
    trunk = gojson.get_list(fields, "vlanTrunk")
    is_default_gateway = flag("isDefaultGateway")
    return BridgeConfig(
        bridge=_DEFAULT_BRIDGE if bridge is None else bridge,
        is_layer3=bool(ipam_type(call)),
        is_gateway=flag("isGateway") or is_default_gateway,
        is_default_gateway=is_default_gateway,
        force_address=flag("forceAddress"),
        masquerade=masquerade.is_wanted(call),
        mtu=veth_mtu(fields),
        hairpin=flag("hairpinMode"),
        promiscuous=flag("promiscMode"),
        vlan=vlan,
        trunk=_trunk(trunk or ()),
        # An empty trunk enables it too, as in the reference.
        vlan_filtering=vlan != 0 or trunk is not None,
        preserve_default_vlan=flag("preserveDefaultVlan"),
        spoof_check=flag("macspoofchk"),
        detect_duplicates=flag("enabledad"),
        disable_container_interface=flag("disableContainerInterface"),
        port_isolation=flag("portIsolation"),
        mac=contract.mac_address(gojson.get_str(runtime, "mac") or gojson.get_str(given, "mac") or by_args),
        dns=own_dns(fields),
    )


def _trunk(items: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """Return the VLANs of `vlanTrunk` as ranges, merged and ascending.

    An item has the keys `minID` and `maxID`, or `id`, or all three.
    """
    vlans: set[tuple[int, int]] = set()
    for item in items:
        if not isinstance(item, dict):
            raise gojson.JsonError(f"vlanTrunk: each item must be an object, not {gojson.kind_of(item)}")
        first, last, single = (gojson.get_int(item, key) for key in TRUNK_KEYS)
        if first is not None and last is not None:
            for name, value in (("minID", first), ("maxID", last)):
                if not 0 < value <= _VLAN_MAX:
                    raise InvalidNetworkConfigError(f"incorrect trunk {name} parameter", f"{value}")
            if last < first:
                raise InvalidNetworkConfigError("minID is greater than maxID in trunk parameter", f"{first}, {last}")
            vlans.add((first, last))
        elif first is not None or last is not None:
            missing = "minID" if first is None else "maxID"
            raise InvalidNetworkConfigError(
                f"minID and maxID should be configured simultaneously, {missing} is missing"
            )
        if single is not None:
            if not 0 < single <= _VLAN_MAX:
                raise InvalidNetworkConfigError("incorrect trunk id parameter", f"{single}")
            vlans.add((single, single))
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(vlans):
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
        else:
            ranges.append((first, last))
    return tuple(ranges)


# --- the kernel ------------------------------------------------------------------------------------------------------

_PORT_POLL_SECONDS: Final = (0.001, 0.1)
NATIVE_VLAN: Final = 1


def connect(netns: PodNetns, config: BridgeConfig, ifname: str, pair: veth.Pair) -> tuple[Link, Link, Link]:
    """Make the bridge, and the veth pair with the host's end as a port; return bridge, host's and container's end.

    The container's end stays down.
    """
    with contract.prefixed(f'failed to create bridge "{config.bridge}"'), step(f'set up "{config.bridge}"'):
        bridge = ensure_bridge(netns, config)
    host, container = veth.make(netns, ifname, pair, mtu=config.mtu, mac=config.mac)
    add_port(netns, host, config)
    return bridge, host, container


def add_port(netns: PodNetns, host: Link, config: BridgeConfig) -> None:
    """Make the host's end a port of the bridge, with its hairpin mode, isolation and VLANs."""
    with step(f'connect "{host.name}" to bridge {config.bridge}'):
        netns.host.change(host.index, master=netns.host.link(config.bridge).index)
    # Both are off on a new port.
    if config.hairpin or config.port_isolation:
        with step(f"set up hairpin mode and isolation for {host.name}"):
            netns.host.set_port(host.index, hairpin=config.hairpin, isolated=config.port_isolation)
    _set_vlans(netns, host, config, config.trunk)


def configure(netns: PodNetns, config: BridgeConfig, made: Sequence[Link], wanted: Result) -> list[Link]:
    """Set addresses and routes of the container's end and the gateways, and bring the end up; `made`: by `connect`.

    Returns bridge and host's end as they are then, and the VLAN interface of the bridge, if that has the gateways.
    """
    bridge, host, container = made
    ifname, gateway = container.name, None
    if config.is_layer3:
        if config.detect_duplicates:
            interfaces.try_sysctl("ipv6", "conf", ifname, "enhanced_dad", value="1")
        interfaces.try_sysctl("ipv6", "conf", ifname, "accept_dad", value="1" if config.detect_duplicates else "0")
        interfaces.try_sysctl("ipv4", "conf", ifname, "arp_notify", value="1")
        interfaces.bring_up(netns, container, wanted, interfaces.routes(container, wanted))
        if config.is_gateway:
            gateway = ensure_vlan_interface(netns, bridge, config) if config.vlan else None
            for address in gateways(wanted):
                _ensure_address(netns, gateway or bridge, address, force=config.force_address)
            interfaces.enable_forwarding(netns, wanted.ips)
    elif not config.disable_container_interface:
        interfaces.bring_up(netns, container, wanted, [])
    if not config.disable_container_interface:
        host = _until_forwarding(netns, host)
    with step(f'find "{bridge.name}"'):
        # Its MAC address may have become that of its lowest port.
        bridge = netns.host.link(bridge.name)
    return [bridge, host, *([gateway] if gateway else [])]


def ensure_bridge(netns: PodNetns, config: BridgeConfig, mac: str = "") -> Link:
    """Return the bridge; if it is missing, make it with a fixed MAC address, `mac` or a random one.

    An existing bridge keeps its MTU and its VLAN filtering.
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
        raise InternalError(f'"{name}" already exists but is not a bridge', origin=Origin.NETWORK)
    if config.promiscuous and not link.is_promiscuous:
        with step(f'set promiscuous mode on "{name}"'):
            host.change(link.index, promiscuous=True)
    with netns.on_host():
        veth.ignore_advertisements(name)
    if not link.is_up:
        host.change(link.index, up=True)
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
    """Let the port carry the VLANs of the configuration, besides those that it carries already."""
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


def gateways(wanted: Result) -> list[IpInterface]:
    """Return the addresses of the result's gateways, IPv4 first."""
    # A binary of the list may have added addresses without a gateway.
    ips = sorted((ip for ip in wanted.ips if ip.gateway), key=lambda ip: not ip.is_ipv4)
    return [inet.interface_of(f"{ip.gateway}/{ip.address.partition('/')[2]}") for ip in ips]


def _ensure_address(netns: PodNetns, link: Link, address: IpInterface, *, force: bool) -> None:
    """Set the address on the link. `force`: replace any other IPv4 address, or overlapping IPv6 address."""
    with step(f'read the addresses of "{link.name}"'):
        present = [item.address for item in netns.host.addresses(link.index, inet.FAMILIES[address.version])]
    if address in present:
        return
    for other in present:
        if not is_replaced(other, address):
            continue
        if not force:
            raise InternalError(
                f'failed to set bridge addr: "{link.name}" already has an IP address different from {address}',
                remedy=f"it has {other}; forceAddress: true replaces it",
                origin=Origin.NETWORK,
            )
        with step(f'remove IP address {other} from "{link.name}"'):
            netns.host.request(inet.delete_address(link.index, other))
    add_address(netns, link.name, address)


def is_replaced(other: IpInterface, address: IpInterface) -> bool:
    """Return True if a bridge that gets `address` with `forceAddress` loses the other address."""
    return other.version == address.version and (address.version == 4 or address.network.overlaps(other.network))


def add_address(netns: PodNetns, name: str, address: IpInterface) -> None:
    """Add an IP address to the bridge, or to its VLAN interface, and fix its present MAC address."""
    with step(f'add IP address {address} to "{name}"'):
        index = netns.host.link(name).index
        try:
            netns.host.request(inet.add_address(index, address))
        except FileExistsError:
            # Another ADD was first.
            return
    # Set explicitly, so that it does not follow the lowest port as ports come and go. A bridge that has lost its last
    # port has none (and the reference fails then): it keeps the address that our port has given it.
    with step(f'set the MAC address of "{name}"'):
        netns.host.change(index, mac=netns.host.link(name).mac)


def ensure_vlan_interface(netns: PodNetns, bridge: Link, config: BridgeConfig, mac: str = "") -> Link:
    """Return `<bridge>.<vlan>`, a veth whose other end is a port of the bridge in the VLAN. It stays after a DEL.

    If it is missing, it is made with `mac`, or with a random address.
    """
    name, kernel, pair = f"{bridge.name}.{config.vlan}", netns.host, veth.Pair()
    with step(f'create vlan interface "{name}"'):
        existing = kernel.find_link(name)
        if existing is not None:
            return existing
        try:
            port = veth.add(kernel, name, kernel, netns.host_netns, pair, mtu=bridge.mtu, mac=mac)
        except InternalError:
            if existing := kernel.find_link(name):
                # Another ADD was first.
                return existing
            raise
        try:
            link = kernel.link(name)
            with netns.on_host():
                veth.ignore_advertisements(port.name)
            kernel.change(port.index, master=bridge.index)
            _set_vlans(netns, port, config, trunk=())
            kernel.change(link.index, up=True)
        except (OSError, InternalError):
            with contextlib.suppress(OSError):
                kernel.delete_link(kernel.link(name).index)
            raise
    return link
