"""Links, addresses and routes of a network namespace by rtnetlink: `Rtnl`. The messages about links are here too.

Format: rtnetlink(7), struct ifinfomsg, then attributes; linux/if_link.h, linux/if.h, linux/veth.h.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.kernel import inet, kinds
from multus_daemon.kernel.inet import ANY_TABLE, TABLE_MAIN, Address, Route
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
_IFLA_IFALIAS: Final = 20
_IFLA_GROUP: Final = 27
_IFLA_NET_NS_FD: Final = 28
IFLA_EXT_MASK: Final = 29
_IFLA_INFO_KIND: Final = 1
_IFLA_INFO_DATA: Final = 2
_IFLA_INFO_SLAVE_DATA: Final = 5
_VETH_INFO_PEER: Final = 1
_IFLA_BR_VLAN_FILTERING: Final = 7
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
    """True if a program set the flag of the link; not for a packet capture."""
    is_allmulti: bool = False
    """True if it accepts frames for any multicast address."""
    tx_queue_length: int = 0
    """Length of its transmit queue in packets."""
    mode: str = ""
    """For a macvlan or ipvlan, one of the modes in `kinds`."""
    number: int = 0
    """For a vlan its VLAN, for a VRF its routing table."""
    is_hairpin: bool = False
    is_isolated: bool = False
    """`is_hairpin` and `is_isolated` are for ports of a bridge: see `Rtnl.set_port`."""
    alias: str = ""
    """Alias of the link (`ip link set alias`), any text."""


class Rtnl(Socket):
    """Links, addresses and routes of the namespace that the thread was in when this was made.

    Every method blocks and raises OSError with the kernel's errno and text; the caller decides which errno to ignore.
    """

    # --- links -------------------------------------------------------------------------------------------------------

    def link(self, link: str | int) -> Link:
        """Return the link of that name or index; ENODEV if there is none."""
        return decode(self.look_up(look_up(link)))

    def find_link(self, link: str | int) -> Link | None:
        """Return the link of that name or index, None if there is none."""
        try:
            return self.link(link)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return None
            raise

    def links(self) -> list[Link]:
        """Return all links."""
        return [decode(body) for body in self.dump(look_up(ANY_LINK))]

    def existing(self, names: Sequence[IfName]) -> list[IfName]:
        """Return the names of `names` that are taken by a link. Sends one batch of requests."""
        errors = self.batch([look_up(name) for name in names])
        for error in errors.values():
            if error.errno != errno.ENODEV:
                raise error
        return [name for position, name in enumerate(names) if position not in errors]

    def add_veth(
        self, name: str, peer: str, peer_netns: int, *, mtu: int = 0, mac: str = "", peer_mac: str = ""
    ) -> Link:
        """Add a veth pair: `name`, up, in this namespace, and `peer`, down, in that of the descriptor `peer_netns`.

        `mtu`: of both ends in bytes, 0: default; `mac`, `peer_mac`: `aa:bb:cc:dd:ee:ff`, random if empty. EEXIST if one
        of the names is taken. Returns the end in this namespace.
        """
        other_end = _LINK.pack(0, 0, 0, 0, 0) + attribute(_IFLA_IFNAME, peer) + attribute(_IFLA_NET_NS_FD, peer_netns)
        data = attribute(_VETH_INFO_PEER, other_end + _settings(mtu, peer_mac))
        # Only this end can be made up: the kernel has no other end yet when it makes that one.
        reported = self.request(_new(name, _settings(mtu, mac), "veth", data, NLM_F_ECHO, flags=IFF_UP))
        # Kernels before 6.2 do not describe it.
        return decode(reported[0]) if reported else self.link(name)

    def add_bridge(self, name: str, *, mtu: int = 0, mac: str = "", vlan_filtering: bool = False) -> None:
        """Add a bridge; `mtu` in bytes, 0: default; `mac`: empty for that of its lowest port. EEXIST if it exists."""
        data = attribute(_IFLA_BR_VLAN_FILTERING, b"\1") if vlan_filtering else b""
        self.add_link(name, "bridge", data, mtu=mtu, mac=mac)

    def add_link(
        self,
        name: str,
        kind: str,
        data: bytes = b"",
        *,
        below: int = 0,
        netns: int | None = None,
        mtu: int = 0,
        mac: str = "",
        up: bool = False,
    ) -> None:
        """Add a link of that kind; `data`: its attributes (`kinds`); `below`: index of the link that it is on top of.

        `netns`: as `name` in the namespace of that descriptor; `mtu` in bytes, 0: the kernel's default, or that of the
        link below; `mac` as for `add_veth`. EEXIST if the name is taken, in either namespace.
        """
        own = attribute(_IFLA_LINK, below) if below else b""
        own += attribute(_IFLA_NET_NS_FD, netns) if netns is not None else b""
        self.request(_new(name, own + _settings(mtu, mac), kind, data, flags=IFF_UP if up else 0))

    def change(self, index: int, **values: Any) -> None:
        """Change attributes of the link; `values` as for the function `change`."""
        self.request(change(index, **values))

    def delete_link(self, index: int) -> None:
        """Remove the link, and the other end of a veth; ENODEV if it does not exist. Takes over 20 ms (`removal`)."""
        self.request(delete(index))

    # --- ports of a bridge; `rare` imports pyroute2, which few nodes need -------------------------------------------

    def set_port(self, index: int, *, hairpin: bool, isolated: bool) -> None:
        """Set whether frames may go back to the port they came from, and whether the port reaches no isolated port."""
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

    # --- addresses and routes; `inet` has the requests that change them ----------------------------------------------

    def addresses(self, index: int, family: int = socket.AF_UNSPEC) -> list[Address]:
        """Return the addresses of the link, or of ANY_LINK, of one family or of both, IPv4 first."""
        found = map(inet.decode_address, self.dump(inet.list_addresses(index, family)))
        # Kernels before 4.20 do not filter.
        return [address for link, address in found if index in (ANY_LINK, link)]

    def route_to(self, address: inet.IpAddress) -> int:
        """Return the index of the link by which a packet to the address leaves; ENETUNREACH if there is none."""
        (route,) = inet.decode_routes(self.look_up(inet.route_to(address)))
        return route.oif

    def routes(
        self,
        family: int = socket.AF_UNSPEC,
        table: int = TABLE_MAIN,
        *,
        oif: int = ANY_LINK,
        to: Container[tuple[int, bytes]] | None = None,
    ) -> list[Route]:
        """Return the routes of one table, or of ANY_TABLE, of one family or of both, IPv4 first; one for each next hop.

        `oif`: only those over that link. `to`: only those to these prefix lengths and addresses.
        """
        keep = None if to is None else (lambda body: inet.destination(body) in to)
        found: list[bytes] = []
        for each in (family,) if family else inet.FAMILIES.values():
            # The kernel makes a table with its first route.
            with contextlib.suppress(FileNotFoundError):
                found += self.dump(inet.list_routes(each, table, oif), keep)
        routes = [route for body in found for route in inet.decode_routes(body)]
        # Kernels before 4.20 do not filter.
        return [item for item in routes if table in (ANY_TABLE, item.table) and oif in (ANY_LINK, item.oif)]


# --- requests --------------------------------------------------------------------------------------------------------


def look_up(link: str | int) -> Request:
    """Ask for the link of that name or index."""
    mask = attribute(IFLA_EXT_MASK, EXT_MASK_SKIP_STATS)
    if isinstance(link, int):
        return _request(RTM_GETLINK, link, mask)
    return _request(RTM_GETLINK, attrs=attribute(_IFLA_IFNAME, link) + mask)


def change(
    index: int,
    *,
    name: str | None = None,
    mac: str | None = None,
    mtu: int | None = None,
    tx_queue_length: int | None = None,
    master: int | None = None,
    group: int | None = None,
    up: bool | None = None,
    promiscuous: bool | None = None,
    allmulti: bool | None = None,
    alias: str | None = None,
    netns: int | None = None,
) -> Request:
    """Change attributes of the link: see `Link`. `name`: the link must be down; EEXIST if the name is taken.

    `master`: index of the bridge whose port it becomes. A bridge keeps a `mac` that was set, whichever ports it has. A
    link is in one `group`, by default in 0. `netns`: descriptor of a namespace to which the link is moved first, which
    sets it down and removes its addresses.
    """
    values = (
        (_IFLA_NET_NS_FD, netns),
        (_IFLA_IFNAME, name),
        (_IFLA_ADDRESS, None if mac is None else _raw(mac)),
        (_IFLA_MTU, mtu),
        (_IFLA_TXQLEN, tx_queue_length),
        (_IFLA_MASTER, master),
        (_IFLA_GROUP, group),
        (_IFLA_IFALIAS, None if alias is None else alias.encode()),
    )
    attrs = b"".join([attribute(kind, value) for kind, value in values if value is not None])
    given = ((IFF_UP, up), (IFF_PROMISC, promiscuous), (IFF_ALLMULTI, allmulti))
    mask = sum(flag for flag, on in given if on is not None)
    return _request(RTM_SETLINK, index, attrs, flags=sum(flag for flag, on in given if on), change=mask)


def delete(index: int) -> Request:
    """Remove the link."""
    return _request(RTM_DELLINK, index)


def delete_group(group: int) -> Request:
    """Remove every link of the group, which must not be 0."""
    return _request(RTM_DELLINK, attrs=attribute(_IFLA_GROUP, group))


def _raw(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def _settings(mtu: int, mac: str) -> bytes:
    """Return the attributes MTU and MAC address of a new link; the kernel chooses if they are 0 or empty."""
    return (attribute(_IFLA_MTU, mtu) if mtu > 0 else b"") + (attribute(_IFLA_ADDRESS, _raw(mac)) if mac else b"")


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
    mode, number = kinds.decode(kind, info.get(_IFLA_INFO_DATA, b""))
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
        number=number,
        is_hairpin=port.get(_IFLA_BRPORT_MODE) == b"\1",
        is_isolated=port.get(_IFLA_BRPORT_ISOLATED) == b"\1",
        alias=to_text(found.get(_IFLA_IFALIAS)),
    )
