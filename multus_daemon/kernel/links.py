"""Links, addresses and routes of a network namespace by rtnetlink: `Rtnl`. The messages about links are here too.

Format: rtnetlink(7), struct ifinfomsg, then attributes; linux/if_link.h, linux/if.h, linux/veth.h.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import ANY_TABLE, TABLE_MAIN, Address, IpInterface, Route
from multus_daemon.kernel.transport import (
    NLM_F_CREATE,
    NLM_F_ECHO,
    NLM_F_EXCL,
    Request,
    Socket,
    attribute,
    attributes,
    to_number,
    to_text,
)
from multus_daemon.spec.cni.names import IfName

ANY_LINK: Final = 0

RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_GETLINK: Final = 18
RTM_SETLINK: Final = 19

IFF_UP: Final = 0x1
IFF_PROMISC: Final = 0x100
IFF_ALLMULTI: Final = 0x200
OPERSTATE_UP: Final = "UP"
MACVLAN_MODES: Final[Mapping[str, int]] = MappingProxyType({"private": 1, "vepa": 2, "bridge": 4, "passthru": 8})
"""Names as in ip-link(8), without `source`, which the reference plugin does not have."""

# Family, type of device, index, flags, mask of flags.
_LINK: Final = struct.Struct("=BxHiII")
_OPERSTATES: Final = ("UNKNOWN", "NOTPRESENT", "DOWN", "LOWERLAYERDOWN", "TESTING", "DORMANT", OPERSTATE_UP)
# Without the counters of IPv6, a third of a link's description, which the kernel adds up over all processors.
EXT_MASK_SKIP_STATS: Final = 1 << 3

_IFLA_ADDRESS: Final = 1
_IFLA_IFNAME: Final = 3
_IFLA_MTU: Final = 4
_IFLA_LINK: Final = 5
_IFLA_MASTER: Final = 10
_IFLA_PROTINFO: Final = 12
_IFLA_TXQLEN: Final = 13
_IFLA_OPERSTATE: Final = 16
_IFLA_LINKINFO: Final = 18
_IFLA_GROUP: Final = 27
_IFLA_NET_NS_FD: Final = 28
IFLA_EXT_MASK: Final = 29
_IFLA_INFO_KIND: Final = 1
_IFLA_INFO_DATA: Final = 2
_IFLA_INFO_SLAVE_DATA: Final = 5
_VETH_INFO_PEER: Final = 1
_IFLA_BR_VLAN_FILTERING: Final = 7
_IFLA_MACVLAN_MODE: Final = 1
_IFLA_MACVLAN_BC_QUEUE_LEN: Final = 7
# The family of requests about a bridge's port.
_AF_BRIDGE: Final = 7
_IFLA_BRPORT_MODE: Final = 4
_IFLA_BRPORT_ISOLATED: Final = 33
_NLA_F_NESTED: Final = 1 << 15


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
    """`veth`, `bridge`…; empty for a link that is not a virtual one of a named kind."""
    master: int = 0
    """Index of its bridge; 0 if it is not a port."""
    peer: int = 0
    """For a veth, index of the other end, in that end's namespace; 0 if the kernel does not report it."""
    is_promiscuous: bool = False
    """Set by a request; a packet capture does not count."""
    is_allmulti: bool = False
    """Accepts frames for any multicast address."""
    tx_queue_length: int = 0
    """In packets."""
    mode: str = ""
    """For a macvlan, one of `MACVLAN_MODES`."""
    is_hairpin: bool = False
    is_isolated: bool = False
    """For a port of a bridge, like `is_hairpin`: see `Rtnl.set_port`."""


class Rtnl(Socket):
    """Links, addresses and routes of the namespace that the thread was in when this was made.

    Every method blocks and raises OSError with the kernel's errno and words; the caller decides which errno is fine.
    """

    # --- links -------------------------------------------------------------------------------------------------------

    def link(self, name: str) -> Link:
        """Return the link of that name; ENODEV if there is none."""
        return decode(self.look_up(look_up(name)))

    def link_at(self, index: int) -> Link:
        """Return the link of that index; ENODEV if there is none."""
        return decode(self.look_up(_at(index)))

    def find_link(self, name: str) -> Link | None:
        """Return the link of that name, None if there is none."""
        return self._found(look_up(name))

    def find_link_at(self, index: int) -> Link | None:
        """Return the link of that index, None if there is none."""
        return self._found(_at(index))

    def _found(self, request: Request) -> Link | None:
        try:
            return decode(self.look_up(request))
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def ports(self, master: int) -> list[Link]:
        """Return the ports of the bridge with that index."""
        return [link for link in self.links() if link.master == master]

    def links(self) -> list[Link]:
        """Return all links."""
        return [decode(body) for body in self.dump(_at(ANY_LINK))]

    def existing(self, names: Sequence[IfName]) -> list[IfName]:
        """Return those of the names that a link has, in one request."""
        errors = self.batch([look_up(name) for name in names])
        for error in errors.values():
            if error.errno != errno.ENODEV:
                raise error
        return [name for position, name in enumerate(names) if position not in errors]

    def add_veth(
        self, name: str, peer: str, peer_netns: int, *, mtu: int = 0, mac: str = "", peer_mac: str = ""
    ) -> Link | None:
        """Add a veth pair: `name` here, up, and `peer` in the namespace of that descriptor, down.

        `mtu`: of both ends in bytes, 0: default; `mac`, `peer_mac`: `aa:bb:cc:dd:ee:ff`, random if empty. EEXIST if one
        of the names is taken. Returns the end that is here, as it was made; None if the kernel omits it (before 6.2).
        """
        common = attribute(_IFLA_MTU, mtu) if mtu > 0 else b""
        other_end = (
            _LINK.pack(0, 0, 0, 0, 0)
            + attribute(_IFLA_IFNAME, peer)
            + attribute(_IFLA_NET_NS_FD, peer_netns)
            + common
            + (attribute(_IFLA_ADDRESS, _mac(peer_mac)) if peer_mac else b"")
        )
        data = attribute(_VETH_INFO_PEER, other_end)
        # Only this end can be made up: the kernel has no other end yet when it makes that one.
        own = common + (attribute(_IFLA_ADDRESS, _mac(mac)) if mac else b"")
        reported = self.request(_new(name, own, "veth", data, NLM_F_ECHO, flags=IFF_UP))
        return decode(reported[0]) if reported else None

    def add_bridge(self, name: str, *, mtu: int = 0, mac: str = "", vlan_filtering: bool = False) -> None:
        """Add a bridge; `mtu` in bytes, 0: default; `mac`: empty for that of its lowest port. EEXIST if it exists."""
        data = attribute(_IFLA_BR_VLAN_FILTERING, b"\1") if vlan_filtering else b""
        own = attribute(_IFLA_MTU, mtu) if mtu > 0 else b""
        own += attribute(_IFLA_ADDRESS, _mac(mac)) if mac else b""
        self.request(_new(name, own, "bridge", data))

    def add_macvlan(
        self, name: str, master: int, netns: int, *, mode: str, mtu: int = 0, mac: str = "", broadcast_queue: int = 0
    ) -> None:
        """Add a macvlan of the link with index `master`, as `name` in the namespace of that descriptor.

        `mode`: one of `MACVLAN_MODES`; `mtu` in bytes, 0: the master's; `mac`: `aa:bb:cc:dd:ee:ff`, random if empty;
        `broadcast_queue` in packets, 0: default. EEXIST if the name is taken, in either namespace.
        """
        data = attribute(_IFLA_MACVLAN_MODE, MACVLAN_MODES[mode])
        if broadcast_queue:
            data += attribute(_IFLA_MACVLAN_BC_QUEUE_LEN, broadcast_queue)
        own = attribute(_IFLA_LINK, master) + attribute(_IFLA_NET_NS_FD, netns)
        if mtu:
            own += attribute(_IFLA_MTU, mtu)
        if mac:
            own += attribute(_IFLA_ADDRESS, _mac(mac))
        self.request(_new(name, own, "macvlan", data))

    def rename(self, index: int, name: str) -> None:
        """Give the link, which is down, another name; EEXIST if it is taken."""
        self.request(_request(RTM_SETLINK, index, attribute(_IFLA_IFNAME, name)))

    def set_up(self, index: int) -> None:
        """Bring the link up."""
        self.request(set_up(index))

    def set_down(self, index: int) -> None:
        """Take the link down."""
        self.request(set_flags(index, 0, IFF_UP))

    def set_promiscuous(self, index: int, on: bool = True) -> None:
        """Set whether the link accepts frames for any address."""
        self.request(set_flags(index, IFF_PROMISC if on else 0, IFF_PROMISC))

    def set_allmulti(self, index: int, on: bool) -> None:
        """Set whether the link accepts frames for any multicast address."""
        self.request(set_flags(index, IFF_ALLMULTI if on else 0, IFF_ALLMULTI))

    def set_mac(self, index: int, mac: str) -> None:
        """Set the link's address. A bridge keeps an address that was set, whatever ports come and go."""
        self.request(_request(RTM_SETLINK, index, attribute(_IFLA_ADDRESS, _mac(mac))))

    def set_mtu(self, index: int, mtu: int) -> None:
        """Set the link's MTU, in bytes."""
        self.request(_request(RTM_SETLINK, index, attribute(_IFLA_MTU, mtu)))

    def set_tx_queue_length(self, index: int, packets: int) -> None:
        """Set how many packets may wait to be sent."""
        self.request(_request(RTM_SETLINK, index, attribute(_IFLA_TXQLEN, packets)))

    def set_master(self, index: int, master: int) -> None:
        """Make the link a port of the bridge with index `master`."""
        self.request(_request(RTM_SETLINK, index, attribute(_IFLA_MASTER, master)))

    def delete_link(self, index: int) -> None:
        """Remove the link, and the other end of a veth; ENODEV if there is none. Takes 20 ms or more (`removal`)."""
        self.request(delete(index))

    # --- ports of a bridge; `rare` imports pyroute2, which few nodes need -------------------------------------------

    def set_port(self, index: int, *, hairpin: bool, isolated: bool) -> None:
        """Set whether a port sends frames back where they came from, and whether it is cut off from isolated ports."""
        settings = attribute(_IFLA_BRPORT_MODE, bytes((hairpin,))) + attribute(
            _IFLA_BRPORT_ISOLATED, bytes((isolated,))
        )
        info = attribute(_IFLA_PROTINFO | _NLA_F_NESTED, settings)
        self.request(_request(RTM_SETLINK, index, info, family=_AF_BRIDGE))

    def add_vlans(self, index: int, first: int, last: int, *, native: bool = False) -> None:
        """Let a port carry the VLANs `first` to `last`; `native`: for frames without a tag, which leave untagged."""
        from multus_daemon.kernel import rare

        self.request(rare.add_vlans(index, first, last, native=native))

    def delete_vlan(self, index: int, vlan: int) -> None:
        """Let a port no longer carry a VLAN."""
        from multus_daemon.kernel import rare

        self.request(rare.delete_vlan(index, vlan))

    def vlans(self, index: int) -> list[int]:
        """Return the VLANs that a port carries; empty if the kernel does not support VLANs of bridges."""
        from multus_daemon.kernel import rare

        ports = map(rare.decode_vlans, self.dump(rare.list_vlans()))
        return [vlan for port, carried in ports if port == index for vlan in carried]

    # --- addresses ---------------------------------------------------------------------------------------------------

    def addresses(self, index: int, family: int = socket.AF_UNSPEC) -> list[Address]:
        """Return the addresses of the link, or of ANY_LINK, of one family or of both, IPv4 first."""
        found = map(inet.decode_address, self.dump(inet.list_addresses(index, family)))
        # Kernels before 4.20 do not filter.
        return [address for link, address in found if index in (ANY_LINK, link)]

    def add_address(self, index: int, address: IpInterface, *, broadcast: bool = True) -> None:
        """Add an address of global scope; `broadcast`: with the broadcast address of an IPv4 network."""
        self.request(inet.add_address(index, address, broadcast=broadcast))

    def delete_address(self, index: int, address: IpInterface) -> None:
        """Remove an address; EADDRNOTAVAIL if the link does not have it."""
        self.request(inet.delete_address(index, address))

    # --- routes ------------------------------------------------------------------------------------------------------

    def add_route(self, route: Route, *, exclusive: bool = True) -> None:
        """Add a route; EEXIST if there is an equal one, and with `exclusive` if there is any to `dst`."""
        self.request(inet.add_route(route, exclusive=exclusive))

    def delete_route(self, route: Route) -> None:
        """Delete the first route that matches; ESRCH if there is none."""
        self.request(inet.delete_route(route))

    def routes(
        self,
        family: int,
        table: int = TABLE_MAIN,
        *,
        oif: int = ANY_LINK,
        to: Container[tuple[int, bytes]] | None = None,
    ) -> list[Route]:
        """Return the routes of one table, or of ANY_TABLE; one for each next hop.

        `oif`: only those over that link. `to`: only those to these prefix lengths and addresses.
        """
        try:
            keep = None if to is None else (lambda body: inet.destination(body) in to)
            found = self.dump(inet.list_routes(family, table, oif), keep)
        except FileNotFoundError:
            # The kernel makes a table with its first route.
            return []
        routes = [route for body in found for route in inet.decode_routes(body)]
        # Kernels before 4.20 do not filter.
        return [item for item in routes if table in (ANY_TABLE, item.table) and oif in (ANY_LINK, item.oif)]


# --- requests --------------------------------------------------------------------------------------------------------


def look_up(name: str) -> Request:
    """Ask for the link of that name."""
    wanted = attribute(_IFLA_IFNAME, name) + attribute(IFLA_EXT_MASK, EXT_MASK_SKIP_STATS)
    return _request(RTM_GETLINK, attrs=wanted)


def _at(index: int) -> Request:
    return _request(RTM_GETLINK, index, attribute(IFLA_EXT_MASK, EXT_MASK_SKIP_STATS))


def set_up(index: int) -> Request:
    """Bring the link up."""
    return _request(RTM_NEWLINK, index, flags=IFF_UP, change=IFF_UP)


def set_flags(index: int, flags: int, change: int) -> Request:
    """Set those of the flags that are in the mask `change`."""
    return _request(RTM_NEWLINK, index, flags=flags, change=change)


def delete(index: int) -> Request:
    """Remove the link."""
    return _request(RTM_DELLINK, index)


def set_group(index: int, group: int) -> Request:
    """Put the link into the group; a link is in one group, by default in 0."""
    return _request(RTM_SETLINK, index, attribute(_IFLA_GROUP, group))


def delete_group(group: int) -> Request:
    """Remove every link of the group, which is not 0."""
    return _request(RTM_DELLINK, attrs=attribute(_IFLA_GROUP, group))


def _mac(value: str) -> bytes:
    return bytes.fromhex(value.replace(":", ""))


def _new(name: str, own: bytes, kind: str, data: bytes, more_flags: int = 0, *, flags: int = 0) -> Request:
    """Add a link that must not exist yet. `more_flags`: NLM_F_…; `flags`: IFF_…."""
    info = attribute(_IFLA_INFO_KIND, kind) + (attribute(_IFLA_INFO_DATA, data) if data else b"")
    attrs = attribute(_IFLA_IFNAME, name) + own + attribute(_IFLA_LINKINFO, info)
    request_flags = NLM_F_CREATE | NLM_F_EXCL | more_flags
    return _request(RTM_NEWLINK, attrs=attrs, flags=flags, change=flags, request_flags=request_flags)


def _request(
    kind: int,
    index: int = 0,
    attrs: bytes = b"",
    *,
    family: int = 0,
    flags: int = 0,
    change: int = 0,
    request_flags: int = 0,
) -> Request:
    return Request(kind, _LINK.pack(family, 0, index, flags, change) + attrs, request_flags)


# --- descriptions ----------------------------------------------------------------------------------------------------


def gone(body: bytes) -> int:
    """Decode the body of an RTM_DELLINK: the index of the link that was removed, 0 if the link still exists.

    The bridge sends the same message, with its own family, for a link that is no longer its port.
    """
    family, _, index, _, _ = _LINK.unpack_from(body)
    return int(index) if family == socket.AF_UNSPEC else 0


def decode(body: bytes) -> Link:
    """Decode the body of an RTM_NEWLINK. Raises OSError (EBADMSG)."""
    _, _, index, flags, _ = _LINK.unpack_from(body)
    found = attributes(body, _LINK.size)
    info = attributes(found.get(_IFLA_LINKINFO, b""))
    kind = to_text(info.get(_IFLA_INFO_KIND))
    state = found.get(_IFLA_OPERSTATE, b"\0")[0]
    mode = ""
    if kind == "macvlan":
        number = to_number(attributes(info.get(_IFLA_INFO_DATA, b"")).get(_IFLA_MACVLAN_MODE))
        mode = next((name for name, value in MACVLAN_MODES.items() if value == number), "")
    port = attributes(info.get(_IFLA_INFO_SLAVE_DATA, b""))  # of a bridge; other masters have longer values there
    return Link(
        index=index,
        name=to_text(found.get(_IFLA_IFNAME)),
        mac=found.get(_IFLA_ADDRESS, b"").hex(":"),
        mtu=to_number(found.get(_IFLA_MTU)),
        is_up=bool(flags & IFF_UP),
        operstate=_OPERSTATES[state] if state < len(_OPERSTATES) else "",
        kind=kind,
        master=to_number(found.get(_IFLA_MASTER)),
        peer=to_number(found.get(_IFLA_LINK)),
        is_promiscuous=bool(flags & IFF_PROMISC),
        is_allmulti=bool(flags & IFF_ALLMULTI),
        tx_queue_length=to_number(found.get(_IFLA_TXQLEN)),
        mode=mode,
        is_hairpin=port.get(_IFLA_BRPORT_MODE) == b"\1",
        is_isolated=port.get(_IFLA_BRPORT_ISOLATED) == b"\1",
    )
