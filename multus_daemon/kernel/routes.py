"""Replace the default routes of a namespace's main table as a whole; restore them on failure.

A default route may have several next hops, metrics, or no next hop at all (`unreachable`), and may come from a router
advertisement. Each kind can keep a packet from the wanted gateway, so all of them are removed. Routes of other tables
and source-specific ones (`default from ...`) are policy routing, and stay.

Removed routes are remembered in the kernel's own form (linux/rtnetlink.h), so that every property is restored.

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
from multus_daemon.kernel.inet import NEXT_HOP, ROUTE, RTA_MULTIPATH, TABLE_MAIN, Route
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
_OF_NEXT_HOP: Final = (inet.RTA_OIF, inet.RTA_GATEWAY, RTA_MULTIPATH, _RTA_VIA, _RTA_ENCAP_TYPE, _RTA_ENCAP)

# The only flag of a next hop that is a setting; the others are its state, and the kernel refuses them.
_RTNH_F_ONLINK: Final = 0x4
# Offset in struct rta_cacheinfo of the time that a route has left, in ticks of user space (USER_HZ: 100 in a second).
_EXPIRES_OFFSET: Final = 8
_TICKS: Final = 100


class DefaultRoutes:
    """The default routes of a namespace."""

    def __init__(self, kernel: Rtnl) -> None:
        self._kernel = kernel

    def replace(self, ifname: IfName, wanted: Sequence[ResultRoute]) -> Mapping[str, Sequence[ResultRoute]]:
        """Make `wanted`, each with its gateway, the only default routes of their families, over the link `ifname`.

        The kernel chooses the metric of a route with priority 0. Default routes of a family without a wanted route
        stay. Returns the replaced routes by the name of their link. Raises OSError with the kernel's errno (ENODEV: no
        such link) after it has restored the routes.
        """
        oif = self._kernel.link(ifname).index
        replaced: list[Route] = []
        with contextlib.ExitStack() as undo:
            for family, ipv4 in _FAMILIES:
                routes = [_route(item, oif) for item in wanted if item.is_ipv4 is ipv4]
                if routes:
                    replaced += self._clear(family, undo)
                for route in routes:
                    self._add(route, ifname)
                    what = f"default route via {route.gateway} can't be taken back"
                    undo.callback(self._undo, inet.delete_route(route), what)
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
            for body in self._kernel.dump(inet.list_routes(family, TABLE_MAIN))
            if _Found(body).is_default
        ]
        return self._by_link([item for body in bodies for item in inet.decode_routes(body) if item.oif])

    def _by_link(self, routes: Sequence[Route]) -> Mapping[str, Sequence[ResultRoute]]:
        found: dict[str, list[ResultRoute]] = {}
        for item in routes:
            gateway = "" if item.gateway is None else str(item.gateway)
            found.setdefault(self._kernel.link(item.oif).name, []).append(
                ResultRoute(str(item.dst), gateway, priority=item.priority, scope=item.scope or None)
            )
        return found

    def add(self, ifname: IfName, wanted: Sequence[ResultRoute]) -> None:
        """Add the default routes that are missing, over the link `ifname`. Raises OSError."""
        oif = self._kernel.link(ifname).index
        for item in wanted:
            with contextlib.suppress(FileExistsError):
                self._add(_route(item, oif), ifname)

    def _clear(self, family: int, undo: contextlib.ExitStack) -> list[Route]:
        """Remove the default routes of a family; return them, one for each next hop."""
        cleared: list[Route] = []
        for body in self._kernel.dump(inet.list_routes(family, TABLE_MAIN)):
            found = _Found(body)
            if not found.is_default:
                continue
            again = Request(inet.RTM_NEWROUTE, found.description(), NLM_F_CREATE)
            try:
                self._kernel.request(Request(inet.RTM_DELROUTE, found.deletion()))
            except OSError as error:
                # It has disappeared by itself, with its lease or its link.
                if error.errno != errno.ESRCH:
                    raise
            else:
                # The kernel puts it before others of the same metric: in reverse order, each returns to its place.
                undo.callback(self._undo, again, f"a default route of metric {found.metric} can't be put back")
                cleared += [item for item in inet.decode_routes(body) if item.oif]
        return cleared

    def _add(self, route: Route, ifname: IfName) -> None:
        try:
            self._kernel.request(inet.add_route(route))
        except OSError as error:
            raise OSError(
                error.errno, f"default route via {route.gateway} dev {ifname} can't be added: {error.strerror}"
            ) from error

    def _undo(self, request: Request, what: str) -> None:
        try:
            self._kernel.request(request)
        except OSError as error:
            log.error("%s: %s", what, error)


def over(kernel: Rtnl, index: int, table: int = TABLE_MAIN) -> list[tuple[bytes, Route]]:
    """Return the routes over a link, each in the kernel's form too; none with several next hops. Raises OSError."""
    requests = [inet.list_routes(family, table, index) for family in inet.FAMILIES.values()]
    found = [(body, inet.decode_routes(body)) for request in requests for body in kernel.dump(request)]
    # Kernels before 4.20 do not filter.
    own = [(body, first) for body, [first, *more] in found if not more and first.oif == index]
    return [(body, route) for body, route in own if table in (inet.ANY_TABLE, route.table)]


def again(body: bytes, *, oif: int = 0, table: int = 0) -> Request:
    """Return a request to add the route in the message `body` again; `oif`, `table`: 0 for the same link or table."""
    return Request(inet.RTM_NEWROUTE, _Found(body).description(oif=oif, table=table), NLM_F_CREATE)


class _Found:
    """A route of the kernel: the body of an RTM_NEWROUTE message. Raises OSError (EBADMSG)."""

    def __init__(self, body: bytes) -> None:
        self._fields = ROUTE.unpack_from(body)
        self._attributes = attributes(body, ROUTE.size, mask=_WITH_FLAGS)
        self._values = {kind & KIND_MASK: value for kind, value in self._attributes.items()}
        self.metric = to_number(self._values.get(inet.RTA_PRIORITY))

    @property
    def is_default(self) -> bool:
        """True for a default route of the main table for packets from any source."""
        _, destination, source, _, table, *_ = self._fields
        # Kernels before 4.20 do not filter by table.
        return not destination and not source and (to_number(self._values.get(inet.RTA_TABLE)) or table) == TABLE_MAIN

    def deletion(self) -> bytes:
        """Encode a request to delete the first default route with this metric and protocol, with all its next hops."""
        family, _, _, tos, _, protocol, *_ = self._fields
        fields = ROUTE.pack(family, 0, 0, tos, TABLE_MAIN, protocol, inet.SCOPE_NOWHERE, 0, 0)
        return fields + attribute(inet.RTA_PRIORITY, self.metric)

    def description(self, *, oif: int = 0, table: int = 0) -> bytes:
        """Encode a request to add the same route again; `oif`, `table`: 0 for the same link or table."""
        *fields, flags = self._fields
        parts = [ROUTE.pack(*fields, flags & _RTNH_F_ONLINK)]
        if table:
            before, after = fields[:4], fields[5:]
            parts = [ROUTE.pack(*before, 0, *after, flags & _RTNH_F_ONLINK), attribute(inet.RTA_TABLE, table)]
        for kind, value in self._attributes.items():
            plain = kind & KIND_MASK
            if plain == inet.RTA_OIF and oif:
                parts.append(attribute(kind, oif))
            elif plain == inet.RTA_TABLE and table:
                continue
            elif plain == _RTA_CACHEINFO:
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
    scope = wanted.scope or inet.SCOPE_GLOBAL
    return Route(ipaddress.ip_interface(wanted.dst), oif, gateway, priority=wanted.priority, scope=scope)


def _without_state(hops: bytes) -> bytes:
    """Return the next hops of RTA_MULTIPATH without the flags that show state (such as `dead`)."""
    return b"".join(
        NEXT_HOP.pack(NEXT_HOP.size + len(hop), flags & _RTNH_F_ONLINK, weight, oif) + hop
        for flags, weight, oif, hop in inet.next_hops(hops)
    )
