"""Requests of a pod that its networks do not meet: that no plugin can take, or that the result does not show.

By NPWG multi-network SPEC 4.1.2.1.3.2, .4.2, .7.2, .8.2 and .10.2 the attachment fails where no plugin of the network
declares the capability. Upstream passes the request over in silence. Here it is an Event and a line in the log, since
pods of today rely on starting; with `strictRequests` it is the error that the SPEC wants.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.cni import gojson
from multus_daemon.cni.errors import UnsupportedFieldError
from multus_daemon.cni.result import Result
from multus_daemon.ports import Attachment, ClusterStore, Pod

log = logging.getLogger(__name__)

EVENT: Final = "RequestNotMet"
# Capability, as runtimeConfig has it, to the key of the selection element.
KEYS: Final = {
    "ips": "ips",
    "mac": "mac",
    "infinibandGUID": "infiniband-guid",
    "bandwidth": "bandwidth",
    "portMappings": "portMappings",
}
# These travel in CNI_ARGS too, so a plugin may meet them that declares nothing; the result tells.
_SHOWN: Final = frozenset({"ips", "mac"})
_SHOWN_CHARACTERS: Final = 200


class UnmetRequestError(UnsupportedFieldError):
    """A request that is not met, where that is an error."""


@dataclass(frozen=True, slots=True)
class Unmet:
    """One request that is not met."""

    key: str
    """As the selection element has it."""
    problem: str
    advice: str


def count_nothing(key: str) -> None:
    """The default counter."""


class Requests:
    """Tells of the requests that are not met, or fails for them. `count` is called with the key of each."""

    def __init__(self, cluster: ClusterStore, count: Callable[[str], None] = count_nothing) -> None:
        self._cluster = cluster
        self._count = count

    def before_add(self, pod: Pod, attachments: Sequence[Attachment], *, strict: bool) -> None:
        """What no plugin of its network can take. Raises UnmetRequestError (2) if `strict`."""
        for attachment in attachments:
            for unmet in undeclared(attachment, KEYS.keys() if strict else KEYS.keys() - _SHOWN):
                self._tell(pod, unmet, strict)

    def after_add(self, pod: Pod, attachments: Sequence[Attachment], *, strict: bool) -> None:
        """What the results do not show. Raises UnmetRequestError (2) if `strict`."""
        for attachment in attachments:
            for unmet in not_shown(attachment):
                self._tell(pod, unmet, strict)

    def _tell(self, pod: Pod, unmet: Unmet, strict: bool) -> None:
        self._count(unmet.key)
        problem = f"{unmet.problem} (pod {pod})"
        if strict:
            raise UnmetRequestError(problem, unmet.advice)
        log.warning("%s; %s", problem, unmet.advice)
        self._cluster.event(pod, "Warning", EVENT, f"{problem}; {unmet.advice}")


def undeclared(attachment: Attachment, capabilities: Collection[str]) -> list[Unmet]:
    """Those requests, of `capabilities`, for which no plugin of the network declares the capability."""
    return [
        Unmet(
            key,
            f"{key} {_value(attachment, capability)} can't be met: no plugin of network {attachment.name} declares the "
            f'capability "{capability}"',
            _advice(capability),
        )
        for capability, key in KEYS.items()
        if capability in capabilities
        and capability in attachment.asked
        and capability not in attachment.config.capabilities
    ]


def not_shown(attachment: Attachment) -> list[Unmet]:
    """The requested hardware address and IP addresses that the result of the ADD does not have.

    Not judged: a hardware address where the result has none in the sandbox, as all results before CNI 0.3.0.
    """
    result = attachment.result or Result()
    found = []
    for capability in sorted(_SHOWN):
        if capability not in attachment.asked:
            continue
        wanted = attachment.capability_args[capability]
        shown = _macs(attachment, result) if capability == "mac" else [ip.address for ip in result.ips]
        if _is_met(capability, wanted, shown):
            continue
        declared = capability in attachment.config.capabilities
        found.append(
            Unmet(
                capability,
                f"{capability} {_value(attachment, capability)} not met: {attachment.ifname} of network "
                f"{attachment.name} has {_cut(', '.join(shown)) or 'none'}",
                f'a plugin of the network declares the capability "{capability}" and did not go by it'
                if declared
                else _advice(capability),
            )
        )
    return found


def _is_met(capability: str, wanted: Any, shown: list[str]) -> bool:
    if capability == "mac":
        return not shown or _hex(wanted) in map(_hex, shown)
    return all(any(_is_address(text, address) for address in shown) for text in wanted)


def _macs(attachment: Attachment, result: Result) -> list[str]:
    """Hardware addresses of the attachment's interface; of all in the sandbox where none has its name."""
    inside = [item for item in result.interfaces if item.sandbox and item.mac]
    return [item.mac for item in inside if item.name == attachment.ifname] or [item.mac for item in inside]


def _hex(mac: str) -> str:
    """A hardware address without the separators, of which there are several forms."""
    return mac.lower().translate({ord(separator): None for separator in ":-."})


def _is_address(wanted: str, shown: str) -> bool:
    """Whether `shown`, in CIDR form, is the address `wanted`; the prefix length counts where it is given."""
    address, slash, length = wanted.partition("/")
    ip, bits = ipaddress.ip_address(address), int(length or 0)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip, bits = ip.ipv4_mapped, max(bits - 96, 0)
    found = ipaddress.ip_interface(shown)
    return found.ip == ip and (not slash or found.network.prefixlen == bits)


def _advice(capability: str) -> str:
    return f'set "capabilities": {{"{capability}": true}} in the plugin that shall take it, or ask for none'


def _value(attachment: Attachment, capability: str) -> str:
    value = attachment.capability_args[capability]
    match value:
        case str():
            text = value
        case _ if capability == "ips":
            text = ", ".join(value)
        case _:
            text = gojson.dumps(value).decode()
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
