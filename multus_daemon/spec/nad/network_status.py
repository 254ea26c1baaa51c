"""The network-status annotation of a pod (NPWG multi-network SPEC section 5).

Content and format are those of network-attachment-definition-client's `pkg/utils`, which upstream uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import DecodingFailureError, Origin
from multus_daemon.spec.cni.names import ifname_problem
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, write_dns
from multus_daemon.spec.nad.selection import ELEMENTS_MAX

ANNOTATION: Final = "k8s.v1.cni.cncf.io/network-status"
EDITED: Final = "its annotation was changed after its start"
"""Text for people: why a running pod has only some of the networks that it asks for. An ADD attaches all or none."""
NOT_FOLLOWED: Final = (
    "put them into the template that the pod is made from, so that it is made anew; a pod that runs gets them only "
    "with the setting hotplug, or from a hot-plug controller"
)

# Written even if empty. `default` is mandatory (SPEC 5.3.5), although upstream omits a false one; an empty
# `default-route` repeats the selection.
_ALWAYS: Final = ("name", "default", "dns", "default-route")
# Keys that identify a network's state; other writers of the annotation may know the rest better.
_COMPARED: Final = ("name", "interface", "ips", "mac", "mtu", "default", "gateway", "default-route")
_COMPARED_OF_HOT_PLUGGED: Final = ("interface", "ips", "mac")


def entries_for(
    name: str,
    ifname: str,
    result: Result,
    *,
    cluster_network: bool,
    device_info: Mapping[str, Any] | None = None,
    default_route: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Return an entry for each interface of one attachment in the pod, keys in the order of the Go struct.

    `name`: `<namespace>/<name>` of the NetworkAttachmentDefinition, else the network's name; `ifname`: CNI_IFNAME.
    `default_route`: the gateways of the selection, None without the key (SPEC 5.3.6.4). Each attachment has an entry
    (SPEC 4.2, 5.2): a result without an interface in the pod, as before CNI 0.3.0, has one with `ifname` and the
    addresses without an interface.
    """
    # NB: upstream writes the text `<nil>` for a default route without gateway; here it is omitted.
    shared = {
        "dns": write_dns(result.dns),
        "device-info": device_info,
        "gateway": [route.gw for route in result.routes if route.is_default and route.gw],
        "default-route": None if default_route is None else list(default_route),
    }
    if len(result.interfaces) == 1:
        only = result.interfaces[0]
        shown = only if only.sandbox else Interface(name="")
        return [_entry(name, shown, [ip.ip for ip in result.ips], cluster_network, shared)]
    inside = [index for index, item in enumerate(result.interfaces) if item.sandbox]
    if not inside:
        unowned = [ip.ip for ip in result.ips if _belongs_to_none(ip)]
        return [_entry(name, Interface(name=ifname), unowned, cluster_network, shared)]
    addresses = _addresses(result.ips, inside)
    routed = (ip.interface for ip in result.ips if ip.gateway and ip.interface in addresses)
    default = next(routed, inside[0]) if cluster_network else None
    return [_entry(name, result.interfaces[index], addresses[index], index == default, shared) for index in inside]


def render(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the annotation's value: a JSON list whose items, not the list itself, are indented."""
    return "[" + ",".join(gojson.dumps_indented(entry, sort_keys=False).decode() for entry in entries) + "]"


def parse(text: str) -> list[dict[str, Any]]:
    """Read an annotation's value; empty text means no entries. Raises DecodingFailureError."""
    if not text.strip():
        return []
    try:
        entries = gojson.loads(text)
    except gojson.JsonError as error:
        raise DecodingFailureError(f"network-status: {error}", origin=Origin.ANNOTATION) from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DecodingFailureError("network-status is not a JSON list of objects", origin=Origin.ANNOTATION)
    return entries


def interfaces_of_others(present: Iterable[Mapping[str, Any]], own: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the interfaces that entries in `present` have and entries in `own` do not have, at most ELEMENTS_MAX."""
    known = {_key(entry) for entry in own}
    named = (str(entry.get("interface") or "") for entry in present if _key(entry) not in known)
    return list(itertools.islice((name for name in dict.fromkeys(named) if not ifname_problem(name)), ELEMENTS_MAX))


def brought_up_to_date(
    present: Sequence[Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]],
    *,
    hot_plugged: Sequence[Mapping[str, Any]] = (),
    there: Collection[str],
    gone: Collection[str] = (),
) -> list[Mapping[str, Any]] | None:
    """Return the entries that the annotation must have instead of `present`; None if `present` is up to date.

    `own`: entries that the record gives for the networks of the pod's ADD. `hot_plugged`: entries for hot-plugged
    networks, which their client may write under another name. `there`: interfaces that exist. `gone`: interfaces whose
    DEL has begun. An entry of neither stays if its interface is in `there`, or if it has a device and is not in `gone`.
    """
    by_key = {_key(entry): entry for entry in present}
    wanted: list[Mapping[str, Any]] = []
    for entries, keys in ((own, _COMPARED), (hot_plugged, _COMPARED_OF_HOT_PLUGGED)):
        for entry in entries:
            shown = by_key.get(_key(entry), {})
            is_same = all((shown.get(key) or None) == (entry.get(key) or None) for key in keys)
            wanted.append(shown if shown and is_same else entry)
    known = {_key(entry) for entry in wanted}
    unknown = (entry for entry in present if _key(entry) not in known)
    others = (entry for entry in unknown if entry.get("interface") in there or entry.get("device-info"))
    wanted += [entry for entry in others if entry.get("interface") not in gone]
    # Compared as texts: pair by pair would take quadratic time for a long annotation of a user.
    return None if {gojson.dumps(entry) for entry in wanted} == {gojson.dumps(entry) for entry in present} else wanted


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return what identifies an entry: its interface; for an entry without an interface, the network's name."""
    interface = str(entry.get("interface") or "")
    return interface, "" if interface else str(entry.get("name") or "")


def _entry(name: str, interface: Interface, ips: list[str], default: bool, shared: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": name,
        "interface": interface.name,
        "ips": ips,
        # Only with the interface's name (SPEC 5.3.4).
        "mac": interface.mac if interface.name else "",
        "mtu": interface.mtu,
        "default": default,
        **shared,
    }
    return {key: value for key, value in fields.items() if value or (key in _ALWAYS and value is not None)}


def _addresses(ips: Iterable[IpConfig], inside: Sequence[int]) -> dict[int, list[str]]:
    """Return addresses by the index of their interface; those without one belong to the last in `inside`."""
    addresses: dict[int, list[str]] = {index: [] for index in inside}
    for ip in ips:
        index = inside[-1] if ip.interface is None or _belongs_to_none(ip) else ip.interface
        if index in addresses:
            addresses[index].append(ip.ip)
    return addresses


def _belongs_to_none(ip: IpConfig) -> bool:
    return ip.interface is None or ip.interface < 0
