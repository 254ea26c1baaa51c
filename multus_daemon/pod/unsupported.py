"""Find requests of a pod (capability args) that no plugin can take, or that the result does not show.

NPWG multi-network SPEC 4.1.2.1.3.2, .4.2, .7.2, .8.2 and .10.2 demand that the attachment fails if no plugin of the
network declares the capability. Upstream ignores the request in silence. This daemon sends an Event and logs it, as
existing pods rely on starting; with `strictRequests` it is an error.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.spec.attachment import Attachment, Pod
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import UnsupportedFieldError, about_pod
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX

EVENT: Final = "RequestNotMet"
UNKNOWN_KEY: Final = "UnknownKey"
# From the capability in runtimeConfig to the key of the selection element.
KEYS: Final = {
    "ips": "ips",
    "mac": "mac",
    "infinibandGUID": "infiniband-guid",
    "bandwidth": "bandwidth",
    "portMappings": "portMappings",
}
# These travel in CNI_ARGS too, so a plugin that declares nothing may take them; the result shows whether it did.
_SHOWN: Final = frozenset({"ips", "mac"})
_SHOWN_CHARACTERS: Final = 200


class UnsupportedArgError(UnsupportedFieldError):
    """A capability arg that the pod requests is not met. With `strictRequests` its ADD raises this error."""

    def __init__(self, key: str, problem: str, advice: str) -> None:
        """`key`: the key in the element of the pod's annotation."""
        super().__init__(problem, remedy=advice)
        self.key = key


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning for the author of a pod that starts nevertheless."""

    reason: str
    """The Event's reason."""
    text: str
    key: str = ""
    """The key of the capability arg that is not supported; empty for another notice."""


def before_add(pod: Pod, networks: Iterable[tuple[Attachment, Set[str]]], *, strict: bool) -> tuple[Notice, ...]:
    """Return a notice for each requested capability arg that no plugin takes. `networks`: with the requested keys.

    Raises UnsupportedArgError (2) if `strict`.
    """
    wanted = KEYS.keys() if strict else KEYS.keys() - _SHOWN
    return _notices(pod, (arg for item, asked in networks for arg in undeclared(item, wanted & asked)), strict)


def after_add(pod: Pod, networks: Iterable[tuple[Attachment, Set[str]]], *, strict: bool) -> tuple[Notice, ...]:
    """Return a notice for each requested capability arg that the result does not show; otherwise as `before_add`."""
    return _notices(pod, (arg for item, asked in networks if asked for arg in not_shown(item, asked)), strict)


def _notices(pod: Pod, unsupported: Iterable[UnsupportedArgError], strict: bool) -> tuple[Notice, ...]:
    notices = []
    for error in unsupported:
        if strict:
            raise about_pod(error, pod)
        notices.append(Notice(EVENT, str(about_pod(error, pod)), error.key))
    return tuple(notices)


def unknown_keys(pod: Pod, elements: Iterable[NetworkSelection]) -> tuple[Notice, ...]:
    """Return a notice of the unknown keys in `elements`, which may be misspelt."""
    texts = [f"network {element}: {', '.join(element.unknown)}" for element in elements if element.unknown]
    text = f"{' / '.join(texts)} (pod {pod}); correct the annotation in the pod's template"
    return (Notice(UNKNOWN_KEY, text[:EVENT_MESSAGE_MAX]),) if texts else ()


def undeclared(attachment: Attachment, asked: Collection[str]) -> list[UnsupportedArgError]:
    """Return an error for each capability arg in `asked` that no plugin of the network declares."""
    return [
        UnsupportedArgError(
            key,
            f"{key} {_value(attachment, capability)} can't be met: no plugin of network {attachment.name} declares the "
            f'capability "{capability}"',
            _advice(capability),
        )
        for capability, key in KEYS.items()
        if capability in asked and capability not in attachment.config.capabilities
    ]


def not_shown(attachment: Attachment, asked: Collection[str]) -> list[UnsupportedArgError]:
    """Return an error for a requested hardware address and IP addresses (if in `asked`) that the result does not have.

    A hardware address is not an error if the result has none in the sandbox, like all results before CNI 0.3.0.
    """
    result = attachment.result or Result()
    missing = []
    for capability in sorted(_SHOWN.intersection(asked)):
        wanted = attachment.capability_args[capability]
        shown = _macs(attachment, result) if capability == "mac" else [ip.address for ip in result.ips]
        if _is_met(capability, wanted, shown):
            continue
        declared = capability in attachment.config.capabilities
        missing.append(
            UnsupportedArgError(
                capability,
                f"{capability} {_value(attachment, capability)} not met: {attachment.ifname} of network "
                f"{attachment.name} has {_cut(', '.join(shown)) or 'none'}",
                f'a plugin of the network declares the capability "{capability}" and ignored the request'
                if declared
                else _advice(capability),
            )
        )
    return missing


def _is_met(capability: str, wanted: Any, shown: list[str]) -> bool:
    if capability == "mac":
        return not shown or _hex(wanted) in map(_hex, shown)
    # Both may be long, and a pod's author writes one of them: each is read once.
    interfaces = [ipaddress.ip_interface(text) for text in shown]
    present = {(item.ip, bits) for item in interfaces for bits in (None, item.network.prefixlen)}
    return all(_address(text) in present for text in wanted)


def _macs(attachment: Attachment, result: Result) -> list[str]:
    """Return the hardware address of the attachment's interface; those of all in the sandbox if none has its name."""
    inside = [item for item in result.interfaces if item.sandbox and item.mac]
    return [item.mac for item in inside if item.name == attachment.ifname] or [item.mac for item in inside]


def _hex(mac: str) -> str:
    """Return a hardware address without its separators, which may be `:`, `-` or `.`."""
    return mac.lower().translate({ord(separator): None for separator in ":-."})


def _address(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int | None]:
    """Return a requested address and its prefix length, which is None if the text has none."""
    host, slash, length = text.partition("/")
    ip, bits = ipaddress.ip_address(host), int(length or 0)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip, bits = ip.ipv4_mapped, max(bits - 96, 0)
    return ip, bits if slash else None


def _advice(capability: str) -> str:
    return f'set "capabilities": {{"{capability}": true}} in the plugin that shall take it, or ask for none'


def _value(attachment: Attachment, capability: str) -> str:
    value = attachment.capability_args[capability]
    if capability == "ips":
        value = ", ".join(value)
    return _cut(value if isinstance(value, str) else gojson.dumps(value).decode())


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
