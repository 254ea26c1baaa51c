"""The pod's default routes, where a network selection names gateways (NPWG multi-network SPEC 4.1.2.1.9).

Done once, after every ADD, for each address family with a gateway; the other family stays, and an empty list asks for
nothing. The first of several gateways of a family is preferred. The results of all attachments are changed as the
kernel is, so that CHECK, the status and readers of the result agree with it.
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
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetnsError, InvalidNetworkConfigError
from multus_daemon.spec.cni.remedies import about_pod
from multus_daemon.spec.cni.result import Route

log = logging.getLogger(__name__)

# The kernel's metric of a route without one; the next gateways come behind.
_FIRST_METRIC: Final = {4: 0, 6: 1024}
_ANYWHERE: Final = {4: "0.0.0.0/0", 6: "::/0"}
_MAIN_TABLES: Final = (None, 0, 254)
_NO_SUCH_HOP: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL)


def routes_of(attachment: Attachment) -> tuple[Route, ...]:
    """Return the requested default routes, in order; the metric is set from the second on."""
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
    """The routes that are replaced, by interface."""

    def noted(self, attachment: Attachment) -> Attachment:
        """Return an attachment with those of its routes that the move replaces in `replaced_routes`."""
        replaced = self.replaced.get(attachment.ifname, ())
        if not replaced or attachment.auxiliary:
            return attachment
        return dataclasses.replace(attachment, replaced_routes=tuple(replaced))

    def done(self, attachment: Attachment) -> Attachment:
        """Return an attachment, or the chosen one, as it is after the move; the same object if nothing changes."""
        if attachment is self.chosen:
            return _with_routes(attachment, self.routes, self.routes)
        return self.noted(_with_routes(attachment, (), self.routes))


def move(netns: PodNetns, pod: str, chosen: Attachment) -> Move:
    """Move the default routes to the attachment, which asks for them. Raises CniError, and leaves them as they were."""
    routes = routes_of(chosen)
    try:
        replaced = netns.move_default_routes(chosen.ifname, routes)
    except OSError as error:
        raise about_pod(_refused(error, chosen, netns), pod) from error
    log.info("default route of pod %s: %s via %s", pod, chosen.ifname, ", ".join(route.gw for route in routes))
    return Move(chosen, routes, replaced)


def foresee(netns: PodNetns, pod: str, chosen: Attachment) -> Move:
    """Return the move without making it. Raises CniError."""
    routes = routes_of(chosen)
    try:
        return Move(chosen, routes, netns.default_routes(routes))
    except OSError as error:
        raise about_pod(_refused(error, chosen, netns), pod) from error


def restore(netns: PodNetns, pod: str, attachments: tuple[Attachment, ...]) -> tuple[Attachment, ...]:
    """Give back the default routes that an attachment, which is gone now, has replaced; return all as they are then.

    Unchanged attachments are the same objects. Raises CniError.
    """
    found = []
    for item in attachments:
        routes = item.replaced_routes
        if not routes or item.auxiliary or item.leaving:
            found.append(item)
            continue
        try:
            netns.add_default_routes(item.ifname, routes)
        except OSError as error:
            what = f'default route of network {item.name}, interface "{item.ifname}", of pod {pod}'
            raise InternalError(
                f"{what} can't be put back: {error.strerror or error}", "make the pod anew to have it again"
            ) from error
        log.info("default route of pod %s: %s again", pod, item.ifname)
        found.append(dataclasses.replace(_with_more(item, routes), replaced_routes=()))
    return tuple(found)


def _with_more(attachment: Attachment, routes: Sequence[Route]) -> Attachment:
    """Return the attachment with the default routes in its result too, unless it has some of that family."""
    if attachment.result is None:
        return attachment
    families = {route.is_ipv4 for route in attachment.result.routes if _is_main_default(route)}
    more = [route for route in routes if route.is_ipv4 not in families]
    if not more:
        return attachment
    return attachment.with_result(replace(attachment.result, routes=(*attachment.result.routes, *more)))


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
        return InvalidNetworkConfigError(words, f"{of}: a gateway must be a neighbour on that interface")
    return InternalError(words, of)
