"""The pod's default routes, if a network selection names gateways (NPWG multi-network SPEC 4.1.2.1.9).

The routes move once, after the ADDs of all networks, in each address family with a gateway; the other family's routes
stay, and an empty list changes nothing. Of several gateways of a family, the first is preferred. The results of all
attachments are changed accordingly, so that CHECK, the network-status and readers of the result agree with the kernel.
"""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidAnnotationError, InvalidNetnsError, about_pod
from multus_daemon.spec.cni.result import Route

log = logging.getLogger(__name__)

# The kernel's metric of a route without one; the next gateways come behind.
_FIRST_METRIC: Final = {4: 0, 6: 1024}
_ANYWHERE: Final = {4: "0.0.0.0/0", 6: "::/0"}
_MAIN_TABLES: Final = (None, 0, 254)
_NO_SUCH_HOP: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL)


def routes_of(attachment: Attachment) -> tuple[Route, ...]:
    """Return the requested default routes, in order; all but the first have a metric."""
    routes: list[Route] = []
    behind = {4: 0, 6: 0}
    for text in attachment.default_route or ():
        gateway = ipaddress.ip_address(text)
        if gateway.version == 6 and gateway.ipv4_mapped:
            gateway = gateway.ipv4_mapped
        version = gateway.version
        priority = _FIRST_METRIC[version] + behind[version] if behind[version] else 0
        routes.append(Route(_ANYWHERE[version], str(gateway), priority=priority))
        behind[version] += 1
    return tuple(routes)


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A move of the pod's default routes to one attachment."""

    chosen: Attachment
    routes: Sequence[Route]
    replaced: Mapping[str, Sequence[Route]]
    """The routes that the move replaces, by interface."""

    def noted(self, attachment: Attachment) -> Attachment:
        """Return the attachment with its routes that the move replaces in `replaced_routes`."""
        replaced = self.replaced.get(attachment.ifname, ())
        if not replaced or attachment.auxiliary:
            return attachment
        return dataclasses.replace(attachment, replaced_routes=tuple(replaced))

    def done(self, attachment: Attachment) -> Attachment:
        """Return any attachment of the pod as it is after the move; the same object if nothing changes."""
        if attachment is self.chosen:
            return _with_routes(attachment, self.routes, self.routes)
        return self.noted(_with_routes(attachment, (), self.routes))


def move(netns: PodNetns, pod: str, chosen: Attachment, *, dry_run: bool = False) -> Move:
    """Move the default routes to the attachment `chosen`, which asks for them; `dry_run`: only return the move.

    Raises CniError; the routes are then as before.
    """
    routes = routes_of(chosen)
    try:
        present = netns.default_routes
        replaced = present.replaced_by(routes) if dry_run else present.replace(chosen.ifname, routes)
    except OSError as error:
        raise about_pod(_refused(error, chosen, netns), pod) from error
    if not dry_run:
        log.info("default route of pod %s: %s via %s", pod, chosen.ifname, ", ".join(route.gw for route in routes))
    return Move(chosen, routes, replaced)


def restore(netns: PodNetns, pod: str, attachments: tuple[Attachment, ...]) -> tuple[Attachment, ...]:
    """Restore the default routes that a detached attachment had replaced; return all `attachments` as they are then.

    Unchanged attachments are the same objects. Raises CniError.
    """
    found = []
    for item in attachments:
        routes = item.replaced_routes
        if not routes or item.auxiliary or item.leaving:
            found.append(item)
            continue
        try:
            netns.default_routes.add(item.ifname, routes)
        except OSError as error:
            what = f'default route of network {item.name}, interface "{item.ifname}", of pod {pod}'
            raise InternalError(
                f"{what} can't be restored: {error.strerror or error}",
                remedy="delete the pod, so that its successor has the route",
            ) from error
        log.info("default route of pod %s: restored on %s", pod, item.ifname)
        found.append(dataclasses.replace(_with_more(item, routes), replaced_routes=()))
    return tuple(found)


def _with_more(attachment: Attachment, routes: Sequence[Route]) -> Attachment:
    """Return the attachment with `routes` added to its result, unless it has default routes of that family."""
    present = attachment.result.routes if attachment.result else ()
    families = {route.is_ipv4 for route in present if _is_main_default(route)}
    more = [route for route in routes if route.is_ipv4 not in families]
    return _with_routes(attachment, more, more)


def _is_main_default(route: Route) -> bool:
    return route.is_default and route.table in _MAIN_TABLES


def _with_routes(attachment: Attachment, own: Sequence[Route], all_routes: Sequence[Route]) -> Attachment:
    """Return the attachment with `own` as the default routes of its result, in the families of `all_routes`."""
    if attachment.result is None:
        return attachment
    families = {route.is_ipv4 for route in all_routes}
    before = attachment.result.routes
    kept = tuple(route for route in before if not (_is_main_default(route) and route.is_ipv4 in families))
    if not own and kept == before:
        return attachment
    return attachment.with_result(replace(attachment.result, routes=(*kept, *own)))


def _refused(error: OSError, chosen: Attachment, netns: PodNetns) -> CniError:
    of = f'network {chosen.name}, interface "{chosen.ifname}", default-route {list(chosen.default_route or ())}'
    words = error.strerror or str(error)
    if not netns.exists:
        return InvalidNetnsError(f"{netns.path} can't be entered: {words}", of)
    if error.errno in _NO_SUCH_HOP:
        return InvalidAnnotationError(words, f"{of}: a gateway must be a neighbour on that interface")
    return InternalError(words, of)
