"""The pod's default routes, where a network selection names gateways (NPWG multi-network SPEC 4.1.2.1.9).

Done once, after every ADD, for each address family of which a gateway is named; the other family is left alone, and an
empty list asks for nothing. Of several gateways of a family the first is preferred. What the kernel is told, the
results of all attachments are made to say too, so that CHECK, the status and whoever reads the result agree with it.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel.ops import PodNetns
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni.errors import CniError, InternalError, InvalidNetnsError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Route

log = logging.getLogger(__name__)

# What the kernel gives a route that names no metric; the next gateways come behind.
_FIRST_METRIC: Final = {4: 0, 6: 1024}
_ANYWHERE: Final = {4: "0.0.0.0/0", 6: "::/0"}
_MAIN_TABLES: Final = (None, 0, 254)
_NO_SUCH_HOP: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL)


def routes_of(attachment: Attachment) -> tuple[Route, ...]:
    """The default routes that the attachment asks for, in its order; metrics beyond the kernel's first are named."""
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


def moved(netns: PodNetns, pod: str, attachments: tuple[Attachment, ...]) -> tuple[Attachment, ...]:
    """`attachments`, those of the whole container, after the default routes have come to the one that asked for them.

    The same objects where nothing has changed, and nothing is looked at where none asks. Raises CniError; the routes
    are as they were then.
    """
    chosen = next((item for item in attachments if item.default_route), None)
    if chosen is None:
        return attachments
    routes = routes_of(chosen)
    try:
        netns.move_default_routes(chosen.ifname, routes)
    except OSError as error:
        raise _refused(error, chosen, netns).with_context(f"pod {pod}") from error
    log.info("default route of pod %s: %s via %s", pod, chosen.ifname, ", ".join(route.gw for route in routes))
    return tuple(_with_routes(item, routes if item is chosen else (), routes) for item in attachments)


def _with_routes(attachment: Attachment, own: Sequence[Route], all_routes: Sequence[Route]) -> Attachment:
    """The attachment with `own` as the default routes of its result in the families of `all_routes`."""
    if attachment.result is None:
        return attachment
    families = {route.is_ipv4 for route in all_routes}
    before = attachment.result.routes
    kept = tuple(
        route
        for route in before
        if not (route.is_default and route.is_ipv4 in families and route.table in _MAIN_TABLES)
    )
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
