"""Links, addresses and routes of one network namespace, as typed requests.

Every method blocks and raises OSError with the kernel's errno and words; who calls says which errno is no failure.
Sent as the reference plugins send them: routes have protocol `boot`, an IPv4 address brings its broadcast address.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyroute2.netlink.rtnl import (
    RTM_DELADDR,
    RTM_DELLINK,
    RTM_DELROUTE,
    RTM_GETADDR,
    RTM_GETLINK,
    RTM_GETROUTE,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTM_NEWROUTE,
    RTM_SETLINK,
)
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from multus_daemon.netlink import macvlan
from multus_daemon.netlink.transport import NLM_F_CREATE, NLM_F_EXCL, Socket

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# rtnetlink(7), linux/if.h, linux/if_addr.h, linux/rtnetlink.h
IFF_UP: Final = 0x1
IFF_PROMISC: Final = 0x100
IFF_ALLMULTI: Final = 0x200
IFA_F_DADFAILED: Final = 0x08
IFA_F_TENTATIVE: Final = 0x40
ANY_LINK: Final = 0
OPERSTATE_UP: Final = "UP"
TABLE_MAIN: Final = 254
SCOPE_GLOBAL: Final = 0
SCOPE_LINK: Final = 253
SCOPE_HOST: Final = 254
# In a request to delete: any scope.
SCOPE_NOWHERE: Final = 255

_TABLE_FIELD_MAX: Final = 255
_PROTOCOL_BOOT: Final = 3
_TYPE_UNICAST: Final = 1
# Counters make up half of a link's description, and nobody here reads them.
_EXT_MASK_SKIP_STATS: Final = 1 << 3
_MACVLAN_MODE: Final = ("IFLA_LINKINFO", "IFLA_INFO_DATA", "IFLA_MACVLAN_MODE")
# linux/if_bridge.h and linux/netlink.h: what is asked of a bridge through one of its ports.
_AF_BRIDGE: Final = 7
_EXT_MASK_VLANS: Final = 1 << 1
_BRIDGE_FLAGS_MASTER: Final = 1
_VLAN_PVID: Final = 1 << 1
_VLAN_UNTAGGED: Final = 1 << 2
_VLAN_RANGE_BEGIN: Final = 1 << 3
_VLAN_RANGE_END: Final = 1 << 4
_NLA_F_NESTED: Final = 1 << 15
# From this prefix length on there is no broadcast address (RFC 3021).
_NO_BROADCAST: Final = 31


@dataclass(frozen=True, slots=True)
class Link:
    """A network interface."""

    index: int
    name: str
    mac: str
    mtu: int
    is_up: bool
    operstate: str
    """`UP`, `DOWN`, `LOWERLAYERDOWN`, `UNKNOWN`…, as `ip link` shows it."""
    kind: str
    """`veth`, `bridge`…; empty for what is no virtual link of a named kind."""
    master: int = 0
    """Index of the bridge that it is a port of; 0: of none."""
    peer: int = 0
    """Of a veth: index of the other end, in that end's namespace."""
    is_promiscuous: bool = False
    """As somebody has set it: a packet capture does not count."""
    is_allmulti: bool = False
    """Takes in frames for any multicast address; as somebody has set it."""
    tx_queue_length: int = 0
    """In packets."""
    mode: str = ""
    """Of a macvlan: one of `macvlan.MODES`."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address of a link."""

    address: IpInterface
    flags: int

    @property
    def is_tentative(self) -> bool:
        """True while duplicate address detection runs."""
        return bool(self.flags & IFA_F_TENTATIVE)

    @property
    def is_duplicate(self) -> bool:
        """True where duplicate address detection has found another owner."""
        return bool(self.flags & IFA_F_DADFAILED)


@dataclass(frozen=True, slots=True)
class Route:
    """A route of one next hop. `dst` keeps its host bits: whether they are an error is for the kernel to say."""

    dst: IpInterface
    oif: int
    """Index of the link."""
    gateway: IpAddress | None = None
    source: IpAddress | None = None
    scope: int = SCOPE_GLOBAL
    table: int = TABLE_MAIN
    priority: int = 0


def _family(address: IpAddress | IpInterface) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


class Rtnl:
    """The requests, over one socket of the namespace that the thread was in when this was made."""

    def __init__(self) -> None:
        self._socket = Socket()

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    # --- links -------------------------------------------------------------------------------------------------------

    def link(self, name: str) -> Link:
        """The link of that name; ENODEV where there is none."""
        message = ifinfmsg()
        message["attrs"] = [("IFLA_IFNAME", name), ("IFLA_EXT_MASK", _EXT_MASK_SKIP_STATS)]
        return _link(self._socket.request(RTM_GETLINK, message, answer=ifinfmsg)[0])

    def link_at(self, index: int) -> Link:
        """The link of that index; ENODEV where there is none."""
        message = ifinfmsg()
        message["index"], message["attrs"] = index, [("IFLA_EXT_MASK", _EXT_MASK_SKIP_STATS)]
        return _link(self._socket.request(RTM_GETLINK, message, answer=ifinfmsg)[0])

    def find_link(self, name: str) -> Link | None:
        """The link of that name, None where there is none."""
        try:
            return self.link(name)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def add_veth(self, name: str, peer: str, peer_netns: int, *, mtu: int = 0, mac: str = "") -> None:
        """A veth pair, `name` here and `peer` in the namespace of that descriptor; `mtu` of both in bytes, 0: default.

        `mac`: of `name`, `aa:bb:cc:dd:ee:ff`; a random one where it is empty. EEXIST where one of the names is taken.
        """
        common = [("IFLA_MTU", mtu)] if mtu > 0 else []
        other_end = {"attrs": [("IFLA_IFNAME", peer), ("IFLA_NET_NS_FD", peer_netns), *common]}
        details = {"attrs": [("VETH_INFO_PEER", other_end)]}
        info = {"attrs": [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", details)]}
        message = ifinfmsg()
        own = [("IFLA_ADDRESS", mac)] if mac else []
        message["attrs"] = [("IFLA_IFNAME", name), *common, *own, ("IFLA_LINKINFO", info)]
        self._socket.request(RTM_NEWLINK, message, NLM_F_CREATE | NLM_F_EXCL)

    def add_bridge(self, name: str, *, mtu: int = 0, vlan_filtering: bool = False) -> None:
        """A bridge; `mtu` in bytes, 0: default. EEXIST where the name is taken."""
        info: dict[str, Any] = {"attrs": [("IFLA_INFO_KIND", "bridge")]}
        if vlan_filtering:
            info["attrs"].append(("IFLA_INFO_DATA", {"attrs": [("IFLA_BR_VLAN_FILTERING", 1)]}))
        message = ifinfmsg()
        message["attrs"] = [
            ("IFLA_IFNAME", name),
            *([("IFLA_MTU", mtu)] if mtu > 0 else []),
            ("IFLA_LINKINFO", info),
        ]
        self._socket.request(RTM_NEWLINK, message, NLM_F_CREATE | NLM_F_EXCL)

    def add_macvlan(
        self, name: str, master: int, netns: int, *, mode: str, mtu: int = 0, mac: str = "", broadcast_queue: int = 0
    ) -> None:
        """A macvlan of the link with index `master`, `name` in the namespace of that descriptor.

        `mode`: one of `macvlan.MODES`; `mtu` in bytes, 0: the master's; `mac`: `aa:bb:cc:dd:ee:ff`, empty: a random
        one; `broadcast_queue` in packets, 0: default. EEXIST where the name is taken, in either namespace.
        """
        body = macvlan.description(name, master, netns, mode=mode, mtu=mtu, mac=mac, broadcast_queue=broadcast_queue)
        self._socket.request_bytes(RTM_NEWLINK, body, NLM_F_CREATE | NLM_F_EXCL)

    def rename(self, index: int, name: str) -> None:
        """Give the link, which is down, another name; EEXIST where it is taken."""
        self._set_link(index, [("IFLA_IFNAME", name)])

    def set_up(self, index: int) -> None:
        """Bring the link up."""
        self._set_flags(index, IFF_UP, IFF_UP)

    def set_down(self, index: int) -> None:
        """Take the link down."""
        self._set_flags(index, 0, IFF_UP)

    def set_promiscuous(self, index: int, on: bool = True) -> None:
        """Have the link take in frames for any address, or not."""
        self._set_flags(index, IFF_PROMISC if on else 0, IFF_PROMISC)

    def set_allmulti(self, index: int, on: bool) -> None:
        """Have the link take in frames for any multicast address, or not."""
        self._set_flags(index, IFF_ALLMULTI if on else 0, IFF_ALLMULTI)

    def _set_flags(self, index: int, flags: int, change: int) -> None:
        message = ifinfmsg()
        message["index"], message["flags"], message["change"] = index, flags, change
        self._socket.request(RTM_NEWLINK, message)

    def set_mac(self, index: int, mac: str) -> None:
        """Set the link's address. A bridge whose address was set keeps it, whatever ports come and go."""
        self._set_link(index, [("IFLA_ADDRESS", mac)])

    def set_mtu(self, index: int, mtu: int) -> None:
        """Set the link's MTU, in bytes."""
        self._set_link(index, [("IFLA_MTU", mtu)])

    def set_tx_queue_length(self, index: int, packets: int) -> None:
        """Set how many packets may wait to be sent."""
        self._set_link(index, [("IFLA_TXQLEN", packets)])

    def set_master(self, index: int, master: int) -> None:
        """Make the link a port of the bridge with index `master`."""
        self._set_link(index, [("IFLA_MASTER", master)])

    def _set_link(self, index: int, attributes: list[tuple[str, Any]]) -> None:
        message = ifinfmsg()
        message["index"], message["attrs"] = index, attributes
        self._socket.request(RTM_SETLINK, message)

    def delete_link(self, index: int) -> None:
        """Remove the link, and the other end where it is a veth; ENODEV where there is none. Takes 20 ms and more."""
        message = ifinfmsg()
        message["index"] = index
        self._socket.request(RTM_DELLINK, message)

    # --- ports of a bridge -------------------------------------------------------------------------------------------

    def set_port(self, index: int, *, hairpin: bool, isolated: bool) -> None:
        """Whether a port sends frames back to where they came from, and whether it is cut off from isolated ports."""
        settings = [("IFLA_BRPORT_MODE", int(hairpin)), ("IFLA_BRPORT_ISOLATED", int(isolated))]
        self._set_port(index, [("IFLA_PROTINFO", {"attrs": settings}, _NLA_F_NESTED)])

    def add_vlans(self, index: int, first: int, last: int, *, native: bool = False) -> None:
        """Let a port carry the VLANs `first` to `last`; `native`: frames without a tag belong to it, and leave so."""
        flags = _VLAN_PVID | _VLAN_UNTAGGED if native else 0
        ends = [(first, flags)]
        if first != last:
            ends = [(first, flags | _VLAN_RANGE_BEGIN), (last, flags | _VLAN_RANGE_END)]
        self._set_port(index, _vlans(ends))

    def delete_vlan(self, index: int, vlan: int) -> None:
        """Let a port carry a VLAN no more."""
        self._set_port(index, _vlans([(vlan, 0)]), kind=RTM_DELLINK)

    def vlans(self, index: int) -> list[int]:
        """The VLANs that a port carries; none where the kernel does not know VLANs of bridges."""
        message = ifinfmsg()
        message["family"], message["attrs"] = _AF_BRIDGE, [("IFLA_EXT_MASK", _EXT_MASK_VLANS)]
        found = self._socket.dump(RTM_GETLINK, message, answer=ifinfmsg)
        specs = [item.get_attr("IFLA_AF_SPEC") for item in found if item["index"] == index]
        return [vlan["vid"] for spec in specs if spec is not None for vlan in spec.get_attrs("IFLA_BRIDGE_VLAN_INFO")]

    def _set_port(self, index: int, attributes: list[tuple[Any, ...]], *, kind: int = RTM_SETLINK) -> None:
        message = ifinfmsg()
        message["family"], message["index"], message["attrs"] = _AF_BRIDGE, index, attributes
        self._socket.request(kind, message)

    # --- addresses ---------------------------------------------------------------------------------------------------

    def addresses(self, index: int, family: int = socket.AF_UNSPEC) -> list[Address]:
        """The link's addresses, or those of ANY_LINK, of one family or of both, IPv4 first."""
        message = ifaddrmsg()
        message["family"], message["index"] = family, index
        found = self._socket.dump(RTM_GETADDR, message, answer=ifaddrmsg)
        # Kernels before 4.20 do not filter.
        return [_address(item) for item in found if index in (ANY_LINK, item["index"])]

    def add_address(self, index: int, address: IpInterface, *, broadcast: bool = True) -> None:
        """Add an address of global scope; `broadcast`: with the broadcast address that an IPv4 network has."""
        text = str(address.ip)
        message = ifaddrmsg()
        message["family"], message["prefixlen"], message["index"] = _family(address), address.network.prefixlen, index
        message["attrs"] = [("IFA_LOCAL", text), ("IFA_ADDRESS", text)]
        if broadcast and address.version == 4 and address.network.prefixlen < _NO_BROADCAST:
            message["attrs"].append(("IFA_BROADCAST", str(address.network.broadcast_address)))
        self._socket.request(RTM_NEWADDR, message, NLM_F_CREATE | NLM_F_EXCL)

    def delete_address(self, index: int, address: IpInterface) -> None:
        """Take an address away; EADDRNOTAVAIL where the link has none such."""
        text = str(address.ip)
        message = ifaddrmsg()
        message["family"], message["prefixlen"], message["index"] = _family(address), address.network.prefixlen, index
        message["attrs"] = [("IFA_LOCAL", text), ("IFA_ADDRESS", text)]
        self._socket.request(RTM_DELADDR, message)

    # --- routes ------------------------------------------------------------------------------------------------------

    def add_route(self, route: Route, *, exclusive: bool = True) -> None:
        """Add a route; EEXIST where `exclusive` and there is one to `dst`, and for one that is the same in all."""
        message = _route_message(route)
        message["proto"], message["type"] = _PROTOCOL_BOOT, _TYPE_UNICAST
        self._socket.request(RTM_NEWROUTE, message, NLM_F_CREATE | (NLM_F_EXCL if exclusive else 0))

    def delete_route(self, route: Route) -> None:
        """Delete the first route that fits; ESRCH where there is none."""
        self._socket.request(RTM_DELROUTE, _route_message(route))

    def routes(self, family: int, table: int = TABLE_MAIN) -> list[Route]:
        """The routes of one table; one for each next hop."""
        message = rtmsg()
        message["family"], message["table"] = family, _table_field(table)
        message["attrs"] = [("RTA_TABLE", table)]
        try:
            found = self._socket.dump(RTM_GETROUTE, message, answer=rtmsg)
        except FileNotFoundError:
            # The kernel makes a table with its first route.
            return []
        return [route for item in found for route in _routes(item) if route.table == table]


def _link(message: Any) -> Link:
    kind = message.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") or ""
    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME"),
        mac=message.get_attr("IFLA_ADDRESS") or "",
        mtu=message.get_attr("IFLA_MTU") or 0,
        is_up=bool(message["flags"] & IFF_UP),
        operstate=message.get_attr("IFLA_OPERSTATE") or "",
        kind=kind,
        master=message.get_attr("IFLA_MASTER") or 0,
        peer=message.get_attr("IFLA_LINK") or 0,
        is_promiscuous=bool(message["flags"] & IFF_PROMISC),
        is_allmulti=bool(message["flags"] & IFF_ALLMULTI),
        tx_queue_length=message.get_attr("IFLA_TXQLEN") or 0,
        mode=(message.get_nested(*_MACVLAN_MODE) or "") if kind == "macvlan" else "",
    )


def _vlans(ends: list[tuple[int, int]]) -> list[tuple[Any, ...]]:
    """The attribute for VLAN ids and their flags. Without the MASTER flag it would be the port's own hardware."""
    items: list[tuple[str, Any]] = [("IFLA_BRIDGE_FLAGS", _BRIDGE_FLAGS_MASTER)]
    items += [("IFLA_BRIDGE_VLAN_INFO", {"vid": vlan, "flags": flags}) for vlan, flags in ends]
    return [("IFLA_AF_SPEC", {"attrs": items})]


def _address(message: Any) -> Address:
    # IFA_LOCAL is the link's own address where IFA_ADDRESS is that of a point-to-point peer; IPv6 has only the latter.
    text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
    flags = message.get_attr("IFA_FLAGS")
    return Address(
        ipaddress.ip_interface(f"{text}/{message['prefixlen']}"), message["flags"] if flags is None else flags
    )


def _route_message(route: Route) -> Any:
    message = rtmsg()
    message["family"], message["dst_len"] = _family(route.dst), route.dst.network.prefixlen
    message["table"] = _table_field(route.table)
    message["scope"] = route.scope
    attributes: list[tuple[str, Any]] = [("RTA_OIF", route.oif)]
    if route.dst.network.prefixlen:
        attributes.append(("RTA_DST", str(route.dst.ip)))
    if route.gateway is not None:
        attributes.append(("RTA_GATEWAY", str(route.gateway)))
    if route.source is not None:
        attributes.append(("RTA_PREFSRC", str(route.source)))
    if route.priority > 0:
        attributes.append(("RTA_PRIORITY", route.priority))
    if route.table > _TABLE_FIELD_MAX:
        attributes.append(("RTA_TABLE", route.table))
    message["attrs"] = attributes
    return message


def _table_field(table: int) -> int:
    """What the header's field of 8 bits says; 0 leaves it to the attribute RTA_TABLE."""
    return table if table <= _TABLE_FIELD_MAX else 0


def _routes(message: Any) -> list[Route]:
    # A default route has no RTA_DST.
    anywhere = ipaddress.IPv4Address(0) if message["family"] == socket.AF_INET else ipaddress.IPv6Address(0)
    dst = ipaddress.ip_interface(f"{message.get_attr('RTA_DST') or anywhere}/{message['dst_len']}")
    hops: Sequence[tuple[int, str | None]] = [
        (hop["oif"], hop.get_attr("RTA_GATEWAY")) for hop in message.get_attr("RTA_MULTIPATH") or ()
    ] or [(message.get_attr("RTA_OIF") or 0, message.get_attr("RTA_GATEWAY"))]
    source = message.get_attr("RTA_PREFSRC")
    return [
        Route(
            dst=dst,
            oif=oif,
            gateway=ipaddress.ip_address(gateway) if gateway else None,
            source=ipaddress.ip_address(source) if source else None,
            scope=message["scope"],
            table=message.get_attr("RTA_TABLE") or message["table"],
            priority=message.get_attr("RTA_PRIORITY") or 0,
        )
        for oif, gateway in hops
    ]
