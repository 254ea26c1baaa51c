"""Unsupported capability args: requests of a pod that no plugin can take, or that the result does not show.

NPWG multi-network SPEC 4.1.2.1.3.2, .4.2, .7.2, .8.2 and .10.2 demand that the attachment fails if no plugin of the
network declares the capability. Upstream ignores the request in silence. Here it is an Event and a line in the log,
since pods of today rely on starting; with `strictRequests` it is the error of the SPEC.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.spec.attachment import Attachment, Pod
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import UnsupportedFieldError
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


@dataclass(frozen=True, slots=True)
class UnsupportedArg:
    """One capability arg of the pod that is not supported."""

    key: str
    """The key of the selection element."""
    problem: str
    advice: str


class UnsupportedArgError(UnsupportedFieldError):
    """A capability arg is not supported, and strictRequests makes that an error."""

    def __init__(self, arg: UnsupportedArg, pod: Pod) -> None:
        super().__init__(f"{arg.problem} (pod {pod})", arg.advice)
        self.key = arg.key


@dataclass(frozen=True, slots=True)
class Notice:
    """A Warning about a pod that starts nevertheless."""

    reason: str
    """The Event's reason."""
    text: str
    key: str = ""
    """The key of the capability arg that is not supported; empty for another notice."""


def before_add(pod: Pod, networks: Iterable[tuple[Attachment, Set[str]]], *, strict: bool) -> tuple[Notice, ...]:
    """Return the capability args that no plugin of the network can take; with each attachment those of the pod.

    Raises UnsupportedArgError (2) if `strict`.
    """
    wanted = KEYS.keys() if strict else KEYS.keys() - _SHOWN
    args = (arg for attachment, asked in networks if asked for arg in undeclared(attachment, wanted & asked))
    return _notices(pod, args, strict)


def after_add(pod: Pod, networks: Iterable[tuple[Attachment, Set[str]]], *, strict: bool) -> tuple[Notice, ...]:
    """Return the capability args that the results do not show; arguments and exceptions as `before_add`."""
    return _notices(
        pod, (arg for attachment, asked in networks if asked for arg in not_shown(attachment, asked)), strict
    )


def _notices(pod: Pod, args: Iterable[UnsupportedArg], strict: bool) -> tuple[Notice, ...]:
    notices = []
    for arg in args:
        if strict:
            raise UnsupportedArgError(arg, pod)
        notices.append(Notice(EVENT, f"{arg.problem} (pod {pod}); {arg.advice}", arg.key))
    return tuple(notices)


def unknown_keys(pod: Pod, elements: Iterable[NetworkSelection]) -> tuple[Notice, ...]:
    """Return the keys of the pod's annotations that have no meaning: a misspelt request would go unnoticed."""
    texts = [f"network {element}: {', '.join(element.unknown)}" for element in elements if element.unknown]
    text = f"{' / '.join(texts)} (pod {pod}); correct the annotation in the pod's template"
    return (Notice(UNKNOWN_KEY, text[:EVENT_MESSAGE_MAX]),) if texts else ()


def undeclared(attachment: Attachment, asked: Collection[str]) -> list[UnsupportedArg]:
    """Return the capability args, of those `asked`, that no plugin of the network declares."""
    return [
        UnsupportedArg(
            key,
            f"{key} {_value(attachment, capability)} can't be met: no plugin of network {attachment.name} declares the "
            f'capability "{capability}"',
            _advice(capability),
        )
        for capability, key in KEYS.items()
        if capability in asked and capability not in attachment.config.capabilities
    ]


def not_shown(attachment: Attachment, asked: Collection[str]) -> list[UnsupportedArg]:
    """Return the hardware address and the IP addresses, if `asked`, that the result of the ADD does not have.

    A hardware address passes if the result has none in the sandbox, as all results before CNI 0.3.0.
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
            UnsupportedArg(
                capability,
                f"{capability} {_value(attachment, capability)} not met: {attachment.ifname} of network "
                f"{attachment.name} has {_cut(', '.join(shown)) or 'none'}",
                f'a plugin of the network declares the capability "{capability}" and did not go by it'
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
    """Return the hardware addresses of the attachment's interface; of all in the sandbox if none has its name."""
    inside = [item for item in result.interfaces if item.sandbox and item.mac]
    return [item.mac for item in inside if item.name == attachment.ifname] or [item.mac for item in inside]


def _hex(mac: str) -> str:
    """Return a hardware address without its separators, of which there are several forms."""
    return mac.lower().translate({ord(separator): None for separator in ":-."})


def _address(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int | None]:
    """Return a requested address and its prefix length; None without one."""
    host, slash, length = text.partition("/")
    ip, bits = ipaddress.ip_address(host), int(length or 0)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip, bits = ip.ipv4_mapped, max(bits - 96, 0)
    return ip, bits if slash else None


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
