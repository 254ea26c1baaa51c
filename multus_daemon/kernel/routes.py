"""Replace the default routes of a namespace's main table as a whole; restore them on failure.

A default route may have several next hops, metrics, or no next hop at all (`unreachable`), and may come from a router
advertisement. Each kind can keep a packet from the wanted gateway, so all of them are removed. Routes of other tables
and source-specific ones (`default from ...`) are policy routing, and stay.

Routes are kept in the kernel's own form (rtnetlink(7), linux/rtnetlink.h), so that every property is restored.

NB: if the kernel accepts router advertisements on a link (sysctl `accept_ra`), a later one brings a route of that
router back, with metric 1024 like ours. Of the two, the kernel takes the one whose router has the higher preference and
is reachable.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from multus_daemon.kernel import inet
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
    SCOPE_GLOBAL,
    SCOPE_NOWHERE,
    TABLE_MAIN,
    Route,
)
from multus_daemon.kernel.links import Rtnl
from multus_daemon.kernel.transport import KIND_MASK, NLM_F_CREATE, Request, attribute, attributes, to_number
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Route as ResultRoute

log = logging.getLogger(__name__)

_FAMILIES: Final = ((socket.AF_INET, True), (socket.AF_INET6, False))
_UNSIGNED: Final = struct.Struct("=I")
_WITH_FLAGS: Final = 0xFFFF

_RTA_CACHEINFO: Final = 12
_RTA_VIA: Final = 18
_RTA_ENCAP_TYPE: Final = 21
_RTA_ENCAP: Final = 22
_RTA_EXPIRES: Final = 23
_RTA_NH_ID: Final = 30
# A next hop object has these itself, and the kernel refuses them beside its id.
_OF_NEXT_HOP: Final = (RTA_OIF, RTA_GATEWAY, RTA_MULTIPATH, _RTA_VIA, _RTA_ENCAP_TYPE, _RTA_ENCAP)

# The only flag of a next hop that is a setting; the others are its state, and the kernel refuses them.
_RTNH_F_ONLINK: Final = 0x4
# Offset in struct rta_cacheinfo of the time that a route has left, in ticks of user space (USER_HZ: 100 in a second).
_EXPIRES_OFFSET: Final = 8
_TICKS: Final = 100


class DefaultRoutes(Rtnl):
    """The default routes of the namespace that the thread was in when this was made."""

    def replace(self, ifname: IfName, wanted: Sequence[ResultRoute]) -> Mapping[str, Sequence[ResultRoute]]:
        """Make `wanted`, each with its gateway, the only default routes of their families, over the link `ifname`.

        A family without a wanted route is left alone. Returns the routes that were replaced, by link. Raises OSError
        with the kernel's errno, ENODEV if there is no such link; the routes are as before then.
        """
        oif = self.link(ifname).index
        replaced: list[Route] = []
        with contextlib.ExitStack() as undo:
            for family, ipv4 in _FAMILIES:
                routes = [_route(item, oif) for item in wanted if item.is_ipv4 is ipv4]
                if routes:
                    replaced += self._clear(family, undo)
                for route in routes:
                    self._add(route, ifname)
                    undo.callback(self._take_back, route)
            found = self._by_link(replaced)
            undo.pop_all()
        return found

    def replaced_by(self, wanted: Sequence[ResultRoute]) -> Mapping[str, Sequence[ResultRoute]]:
        """Return the routes that `replace` would replace, by link; change nothing. Raises OSError."""
        asked = {item.is_ipv4 for item in wanted}
        bodies = [
            body
            for family, ipv4 in _FAMILIES
            if ipv4 in asked
            for body in self.dump(inet.list_routes(family, TABLE_MAIN))
            if _Found(body).is_default
        ]
        return self._by_link([item for body in bodies for item in inet.decode_routes(body) if item.oif])

    def _by_link(self, routes: Sequence[Route]) -> Mapping[str, Sequence[ResultRoute]]:
        found: dict[str, list[ResultRoute]] = {}
        for item in routes:
            gateway = "" if item.gateway is None else str(item.gateway)
            found.setdefault(self.link_at(item.oif).name, []).append(
                ResultRoute(str(item.dst), gateway, priority=item.priority, scope=item.scope or None)
            )
        return found

    def add(self, ifname: IfName, wanted: Sequence[ResultRoute]) -> None:
        """Add default routes over the link `ifname`; one that is there is fine. Raises OSError."""
        oif = self.link(ifname).index
        for item in wanted:
            with contextlib.suppress(FileExistsError):
                self._add(_route(item, oif), ifname)

    def _clear(self, family: int, undo: contextlib.ExitStack) -> list[Route]:
        """Remove the default routes of a family; return them, one for each next hop."""
        cleared: list[Route] = []
        for body in self.dump(inet.list_routes(family, TABLE_MAIN)):
            found = _Found(body)
            if not found.is_default:
                continue
            try:
                self.request(Request(RTM_DELROUTE, found.deletion()))
            except OSError as error:
                # It has disappeared by itself, with its lease or its link.
                if error.errno != errno.ESRCH:
                    raise
            else:
                undo.callback(self._put_back, found)
                cleared += [item for item in inet.decode_routes(body) if item.oif]
        return cleared

    def _add(self, route: Route, ifname: IfName) -> None:
        try:
            self.add_route(route)
        except OSError as error:
            raise OSError(
                error.errno, f"default route via {route.gateway} dev {ifname} can't be added: {error.strerror}"
            ) from error

    def _take_back(self, route: Route) -> None:
        try:
            self.delete_route(route)
        except OSError as error:
            log.error("default route via %s can't be taken back: %s", route.gateway, error)

    def _put_back(self, found: _Found) -> None:
        # The kernel puts it before others of the same metric: in reverse order, each returns to its place.
        try:
            self.request(Request(RTM_NEWROUTE, found.description(), NLM_F_CREATE))
        except OSError as error:
            log.error("a default route of metric %d can't be put back: %s", found.metric, error)


class _Found:
    """A route in the kernel's form: the body of an RTM_NEWROUTE. Raises OSError."""

    def __init__(self, body: bytes) -> None:
        self._fields = ROUTE.unpack_from(body)
        self._attributes = attributes(body, ROUTE.size, mask=_WITH_FLAGS)
        self._values = {kind & KIND_MASK: value for kind, value in self._attributes.items()}
        self.metric = to_number(self._values.get(RTA_PRIORITY))

    @property
    def is_default(self) -> bool:
        """True for a default route of the main table for packets from any source."""
        _, destination, source, _, table, *_ = self._fields
        # Kernels before 4.20 do not filter by table.
        return not destination and not source and (to_number(self._values.get(RTA_TABLE)) or table) == TABLE_MAIN

    def deletion(self) -> bytes:
        """Encode the deletion of the first default route of that metric and origin, with all of its next hops."""
        family, _, _, tos, _, protocol, *_ = self._fields
        fields = ROUTE.pack(family, 0, 0, tos, TABLE_MAIN, protocol, SCOPE_NOWHERE, 0, 0)
        return fields + attribute(RTA_PRIORITY, self.metric)

    def description(self) -> bytes:
        """Encode a request for the same route."""
        *fields, flags = self._fields
        parts = [ROUTE.pack(*fields, flags & _RTNH_F_ONLINK)]
        for kind, value in self._attributes.items():
            plain = kind & KIND_MASK
            if plain == _RTA_CACHEINFO:
                ticks = _UNSIGNED.unpack_from(value, _EXPIRES_OFFSET)[0]
                if ticks:
                    parts.append(attribute(_RTA_EXPIRES, max(ticks // _TICKS, 1)))
            elif plain == RTA_MULTIPATH and _RTA_NH_ID not in self._values:
                parts.append(attribute(kind, _without_state(value)))
            elif plain not in _OF_NEXT_HOP or _RTA_NH_ID not in self._values:
                parts.append(attribute(kind, value))
        return b"".join(parts)


def _route(wanted: ResultRoute, oif: int) -> Route:
    gateway = ipaddress.ip_address(wanted.gw) if wanted.gw else None
    scope = wanted.scope or SCOPE_GLOBAL
    return Route(ipaddress.ip_interface(wanted.dst), oif, gateway, priority=wanted.priority, scope=scope)


def _without_state(hops: bytes) -> bytes:
    """Return the next hops of RTA_MULTIPATH without those flags that are not settings."""
    parts, offset = [], 0
    while offset + NEXT_HOP.size <= len(hops):
        length, flags, weight, oif = NEXT_HOP.unpack_from(hops, offset)
        end = offset + max((length + 3) & ~3, NEXT_HOP.size)
        parts.append(NEXT_HOP.pack(length, flags & _RTNH_F_ONLINK, weight, oif))
        parts.append(hops[offset + NEXT_HOP.size : end])
        offset = end
    return b"".join(parts)
