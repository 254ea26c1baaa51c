"""The default routes of a namespace's main table, replaced as a whole, and put back where that fails.

A default route may have several next hops, metrics, or no next hop at all (`unreachable`), and may come from a router
advertisement: each kind can keep a packet from the gateway that was asked for, so all of them go. Routes of other
tables and source-specific ones (`default from ...`) are policy routing, and stay.

Routes are kept in the kernel's own form (rtnetlink(7), linux/rtnetlink.h), so that whatever they have is put back.

NB: where the kernel accepts router advertisements on a link (sysctl `accept_ra`), a later one brings a route of that
router back, with metric 1024 as ours; of two such routes the kernel takes the one whose router has the higher
preference and is reachable.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import struct
from collections.abc import Sequence
from typing import Final

from multus_daemon.kernel import attributes, inet
from multus_daemon.kernel.attributes import attribute
from multus_daemon.kernel.inet import (
    NEXT_HOP,
    ROUTE,
    RTA_GATEWAY,
    RTA_MULTIPATH,
    RTA_OIF,
    RTA_PRIORITY,
    RTA_TABLE,
    RTM_DELROUTE,
    RTM_NEWROUTE,
    SCOPE_NOWHERE,
    TABLE_MAIN,
    Route,
)
from multus_daemon.kernel.rtnl import Rtnl
from multus_daemon.kernel.transport import NLM_F_CREATE, Request
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Route as ResultRoute

log = logging.getLogger(__name__)

_UNSIGNED: Final = struct.Struct("=I")

_RTA_CACHEINFO: Final = 12
_RTA_VIA: Final = 18
_RTA_ENCAP_TYPE: Final = 21
_RTA_ENCAP: Final = 22
_RTA_EXPIRES: Final = 23
_RTA_NH_ID: Final = 30
# What an object of next hops says itself, and the kernel refuses beside its id.
_OF_NEXT_HOP: Final = (RTA_OIF, RTA_GATEWAY, RTA_MULTIPATH, _RTA_VIA, _RTA_ENCAP_TYPE, _RTA_ENCAP)

# The flag of a next hop that is a setting; the others tell of its state, and the kernel takes none of them.
_RTNH_F_ONLINK: Final = 0x4
# Where struct rta_cacheinfo has the time that a route has left, in ticks of user space (USER_HZ: 100 in a second).
_EXPIRES_OFFSET: Final = 8
_TICKS: Final = 100


class DefaultRoutes(Rtnl):
    """The default routes of the namespace that the thread was in when this was made."""

    def replace(self, ifname: IfName, wanted: Sequence[ResultRoute]) -> None:
        """Make `wanted`, each with its gateway, the only default routes of their families, over the link `ifname`.

        A family of which nothing is wanted is left alone. Raises OSError with the kernel's errno, ENODEV where there
        is no such link; everything is as it was then.
        """
        oif = self.link(ifname).index
        with contextlib.ExitStack() as undo:
            for family, ipv4 in ((socket.AF_INET, True), (socket.AF_INET6, False)):
                routes = [_route(item, oif) for item in wanted if item.is_ipv4 is ipv4]
                if routes:
                    self._clear(family, undo)
                for route in routes:
                    self._add(route, ifname)
                    undo.callback(self._take_back, route)
            undo.pop_all()

    def _clear(self, family: int, undo: contextlib.ExitStack) -> None:
        for body in self._socket.dump(inet.list_routes(family, TABLE_MAIN)):
            found = _Found(body)
            if not found.is_default:
                continue
            try:
                self._socket.request(Request(RTM_DELROUTE, found.deletion()))
            except OSError as error:
                # It has gone by itself: its lease or its link has.
                if error.errno != errno.ESRCH:
                    raise
            else:
                undo.callback(self._put_back, found)

    def _add(self, route: Route, ifname: IfName) -> None:
        try:
            self.add_route(route)
        except OSError as error:
            raise OSError(
                error.errno, f"no default route via {route.gateway} dev {ifname}: {error.strerror}"
            ) from error

    def _take_back(self, route: Route) -> None:
        try:
            self.delete_route(route)
        except OSError as error:
            log.error("default route via %s can't be taken back: %s", route.gateway, error)

    def _put_back(self, found: _Found) -> None:
        """Before those of the same metric: done in reverse order, each comes to where it was."""
        try:
            self._socket.request(Request(RTM_NEWROUTE, found.description(), NLM_F_CREATE))
        except OSError as error:
            log.error("a default route of metric %d can't be put back: %s", found.metric, error)


class _Found:
    """A route as the kernel tells of it, in what comes behind the header of an RTM_NEWROUTE. Raises OSError."""

    def __init__(self, body: bytes) -> None:
        self._fields = ROUTE.unpack_from(body)
        self._attributes = list(attributes.each(body, ROUTE.size))
        self._values = {attributes.plain(kind): value for kind, value in self._attributes}

    @property
    def metric(self) -> int:
        return self._number(RTA_PRIORITY)

    @property
    def is_default(self) -> bool:
        """True for a default route of the main table, whatever the packet's source."""
        _, destination, source, _, table, *_ = self._fields
        # Kernels before 4.20 do not filter by table.
        return not destination and not source and (self._number(RTA_TABLE) or table) == TABLE_MAIN

    def _number(self, kind: int) -> int:
        return attributes.to_number(self._values.get(kind))

    def deletion(self) -> bytes:
        """Takes the first default route of that metric and origin, all of its next hops; any of them will do."""
        family, _, _, tos, _, protocol, *_ = self._fields
        fields = ROUTE.pack(family, 0, 0, tos, TABLE_MAIN, protocol, SCOPE_NOWHERE, 0, 0)
        return fields + attributes.number(RTA_PRIORITY, self.metric)

    def description(self) -> bytes:
        """Makes the same route anew."""
        *fields, flags = self._fields
        parts = [ROUTE.pack(*fields, flags & _RTNH_F_ONLINK)]
        for kind, value in self._attributes:
            plain = attributes.plain(kind)
            if plain == _RTA_CACHEINFO:
                ticks = _UNSIGNED.unpack_from(value, _EXPIRES_OFFSET)[0]
                if ticks:
                    parts.append(attributes.number(_RTA_EXPIRES, max(ticks // _TICKS, 1)))
            elif plain == RTA_MULTIPATH and _RTA_NH_ID not in self._values:
                parts.append(attribute(kind, _without_state(value)))
            elif plain not in _OF_NEXT_HOP or _RTA_NH_ID not in self._values:
                parts.append(attribute(kind, value))
        return b"".join(parts)


def _route(wanted: ResultRoute, oif: int) -> Route:
    return Route(
        dst=ipaddress.ip_interface(wanted.dst),
        oif=oif,
        gateway=ipaddress.ip_address(wanted.gw),
        priority=wanted.priority,
    )


def _without_state(hops: bytes) -> bytes:
    """The next hops of RTA_MULTIPATH, of their flags only what is a setting."""
    parts, offset = [], 0
    while offset + NEXT_HOP.size <= len(hops):
        length, flags, weight, oif = NEXT_HOP.unpack_from(hops, offset)
        end = offset + max(attributes.aligned(length), NEXT_HOP.size)
        parts.append(NEXT_HOP.pack(length, flags & _RTNH_F_ONLINK, weight, oif))
        parts.append(hops[offset + NEXT_HOP.size : end])
        offset = end
    return b"".join(parts)
