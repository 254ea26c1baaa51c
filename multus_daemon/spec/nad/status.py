"""The network-status annotation of a pod (NPWG multi-network SPEC section 5), in the bytes that its readers know.

Derivation and form are those of network-attachment-definition-client's `pkg/utils`, as upstream writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import DecodingFailureError
from multus_daemon.spec.cni.names import ifname_problem
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, write_dns
from multus_daemon.spec.nad.device_info import DeviceInfo
from multus_daemon.spec.nad.selection import ELEMENTS_MAX

ANNOTATION: Final = "k8s.v1.cni.cncf.io/network-status"

# There even where they say nothing. `default` must be (SPEC 5.3.5), though upstream leaves a false one out; an empty
# `default-route` is what the selection had.
_ALWAYS: Final = ("name", "default", "dns", "default-route")
# What a pod's networks differ by. The rest comes with these, and another writer of the annotation may know it better.
_COMPARED: Final = ("name", "interface", "ips", "mac", "mtu", "default", "gateway", "default-route")
_COMPARED_OF_HOT_PLUGGED: Final = ("interface", "ips", "mac")


def entries_for(
    name: str,
    ifname: str,
    result: Result,
    *,
    cluster_network: bool,
    device_info: DeviceInfo | None = None,
    default_route: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """The status of one attachment: an entry for each interface in the pod, keys in the order of the Go struct.

    `name`: `<namespace>/<name>` of the NetworkAttachmentDefinition, else the network's name; `ifname`: what its plugins
    were called with. `default_route`: the gateways that the selection asked for, None where it has no such key (SPEC
    5.3.6.4). Each attachment has an entry (SPEC 4.2, 5.2): where the result tells of no interface in the pod, as no
    result of before CNI 0.3.0 does, one with `ifname` and the addresses that belong to no interface.
    """
    # NB: upstream writes the text `<nil>` for a default route without gateway. It is left out here.
    shared = {
        "dns": write_dns(result.dns),
        "device-info": device_info.to_object() if device_info else None,
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
    default = _default_index(result.ips, inside) if cluster_network else None
    addresses = _addresses(result.ips, inside)
    return [_entry(name, result.interfaces[index], addresses[index], index == default, shared) for index in inside]


def render(entries: Iterable[Mapping[str, Any]]) -> str:
    """The annotation's value: a JSON list whose items, not the list itself, are indented."""
    return "[" + ",".join(gojson.dumps_indented(entry, sort_keys=False).decode() for entry in entries) + "]"


def parse(text: str) -> list[dict[str, Any]]:
    """The entries in an annotation's value; empty text is none. Raises DecodingFailureError."""
    if not text.strip():
        return []
    try:
        entries = gojson.loads(text)
    except gojson.JsonError as error:
        raise DecodingFailureError(f"network-status is not JSON: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DecodingFailureError("network-status is no JSON list of objects")
    return entries


def interfaces_of_others(present: Iterable[Mapping[str, Any]], own: Iterable[Mapping[str, Any]]) -> list[str]:
    """The interfaces that entries in `present` name and none in `own` does, as many as a pod may have at most."""
    known = {_key(entry) for entry in own}
    named = (str(entry.get("interface") or "") for entry in present if _key(entry) not in known)
    return list(itertools.islice((name for name in dict.fromkeys(named) if not ifname_problem(name)), ELEMENTS_MAX))


def brought_up_to_date(
    present: Sequence[Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]],
    *,
    hot_plugged: Sequence[Mapping[str, Any]] = (),
    there: Collection[str],
) -> list[Mapping[str, Any]] | None:
    """What the annotation with the entries `present` has to hold; None where it holds that already.

    `own`: what is on record of the pod's own networks, `hot_plugged`: of those that came later, whose entries their
    client writes, under a name of its choice. An entry of neither stays where its interface is one of those that are
    `there`, or where it is of a device, which has none.
    """
    by_key = {_key(entry): entry for entry in present}
    wanted: list[Mapping[str, Any]] = [
        found if (found := by_key.get(_key(entry))) is not None and _is_same(found, entry, _COMPARED) else entry
        for entry in own
    ]
    for entry in hot_plugged:
        found = by_key.get(_key(entry))
        wanted.append(found if found is not None and _is_same(found, entry, _COMPARED_OF_HOT_PLUGGED) else entry)
    known = {_key(entry) for entry in wanted}
    others = [
        entry
        for entry in present
        if _key(entry) not in known and (entry.get("interface") in there or entry.get("device-info"))
    ]
    wanted += others
    # As texts: who may write the annotation may make it long, and pair by pair would take that squared.
    return None if {gojson.dumps(entry) for entry in wanted} == {gojson.dumps(entry) for entry in present} else wanted


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    """What tells an entry from the others: its interface, or the name of the network where it has none."""
    interface = str(entry.get("interface") or "")
    return interface, "" if interface else str(entry.get("name") or "")


def _is_same(found: Mapping[str, Any], own: Mapping[str, Any], keys: Iterable[str]) -> bool:
    """Whether these keys say the same in both; what says nothing is absent."""
    return all((found.get(key) or None) == (own.get(key) or None) for key in keys)


def _entry(name: str, interface: Interface, ips: list[str], default: bool, shared: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": name,
        "interface": interface.name,
        "ips": ips,
        # Never without the interface's name (SPEC 5.3.4).
        "mac": interface.mac if interface.name else "",
        "mtu": interface.mtu,
        "default": default,
        **shared,
    }
    return {key: value for key, value in fields.items() if value or (key in _ALWAYS and value is not None)}


def _addresses(ips: Iterable[IpConfig], inside: Sequence[int]) -> dict[int, list[str]]:
    """The addresses of each interface in the pod; those that belong to none by their index go to the last one."""
    found: dict[int, list[str]] = {index: [] for index in inside}
    for ip in ips:
        index = inside[-1] if ip.interface is None or _belongs_to_none(ip) else ip.interface
        if index in found:
            found[index].append(ip.ip)
    return found


def _belongs_to_none(ip: IpConfig) -> bool:
    return ip.interface is None or ip.interface < 0


def _default_index(ips: Iterable[IpConfig], inside: list[int]) -> int | None:
    """The interface of the first address with a gateway, else the first in the pod."""
    there = frozenset(inside)
    return next((ip.interface for ip in ips if ip.gateway and ip.interface in there), inside[0])
