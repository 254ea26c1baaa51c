"""`flannel`: calls another plugin, usually `bridge`, with the node's subnet, which flanneld writes to a file.

Composed configuration, saved file and messages are those of the reference plugin (flannel-io/cni-plugin), so that
either can remove what the other made; `docs/builtin-plugins.md` lists the differences.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.contract import Call, Undo, read_file, write_file
from multus_daemon.plugins.builtin.interfaces import located, step
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Difference, Invocation
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.result import Result, read_route, write_route

log = logging.getLogger(__name__)

DEFAULT_SUBNET_FILE: Final = "/run/flannel/subnet.env"
DEFAULT_DATA_DIR: Final = "/var/lib/cni/flannel"
DEFAULT_TYPE: Final = "bridge"
_DEFAULT_IPAM: Final = "host-local"
KEYS: Final = ("subnetFile", "dataDir", "delegate")
_SUBNET_LIMIT: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Delegate:
    plugin_type: str
    stdin: bytes
    fields: Mapping[str, Any]


def read(call: Call) -> _Delegate:
    """Read and compose the configuration; the delegate checks the composed one. Raises CniError."""
    _saved_at(call)
    return _compose(call)


def called_by(call: Call) -> Mapping[str, Invocation]:
    """Return the call of the delegate by its type, and of the delegate's IPAM plugin. Raises CniError."""
    composed = _compose(call)
    types = (composed.plugin_type, gojson.get_str(gojson.get_object(composed.fields, "ipam") or {}, "type"))
    return dict.fromkeys(filter(None, types), _invocation(call, "ADD", composed))


def add(call: Call, netns: PodNetns) -> Result:
    """Compose the delegate's configuration, save it for DEL, run the delegate."""
    composed = _compose(call)
    path = _saved_at(call)
    with located(call), netns.inside(), step("look for the interface"):
        existed = netns.pod.find_link(call.invocation.ifname) is not None
    with Undo() as undo:
        with step("save the delegate's configuration for DEL"):
            before = read_file(path)
            undo.arm("restore the saved configuration", functools.partial(write_file, path, before))
            write_file(path, composed.stdin)
        if not existed:
            undo.arm("run the delegate's DEL", functools.partial(_run, call, "DEL", composed))
        return _run(call, "ADD", composed)


def delete(call: Call, netns: PodNetns) -> None:
    """Run the delegate's DEL with the saved configuration; without a saved one, do nothing."""
    path = _saved_at(call)
    with step("read the delegate's configuration"):
        # A temporary file of an ADD that was killed.
        fs.sweep(path.parent, name=path.name)
        saved = read_file(path)
    if saved is None:
        return
    try:
        composed = decoded(saved)
    except gojson.JsonError as error:
        # With an error, the DEL would be repeated forever.
        log.warning("network %s: failed to parse netconf %s: %s", call.name, path, error)
        return
    _run(call, "DEL", composed)
    with step("remove the delegate's configuration"):
        write_file(path, None)


def differences(call: Call, netns: PodNetns) -> list[Difference] | None:
    """Return the delegate's differences, with the configuration that the ADD saved. Raises CniError."""
    path = _saved_at(call)
    with contract.reading(call.name), step("read the delegate's configuration"):
        saved = read_file(path)
        composed = _compose(call) if saved is None else decoded(saved)
    delegated = replace(_invocation(call, call.invocation.verb, composed), prev_result=call.prev_result)
    return call.plugin_for(composed.plugin_type, delegated).differences(delegated, netns, call.not_compared)


def check(call: Call, netns: PodNetns) -> None:
    """Do nothing, as the reference plugin."""


def keeps(call: Call) -> bool:
    """Return True if the saved configuration exists, without which DEL does nothing."""
    return _saved_at(call).exists()


def _run(call: Call, verb: str, composed: _Delegate) -> Result:
    delegated = _invocation(call, verb, composed)
    return call.plugin_for(composed.plugin_type, delegated).run(delegated, call.netns)


def _invocation(call: Call, verb: str, composed: _Delegate) -> Invocation:
    recorded = call.prev_result if verb == "DEL" else None
    return replace(
        call.invocation, verb=verb, fields=composed.fields, prev_result=None, raw=composed.stdin, recorded=recorded
    )


def _saved_at(call: Call) -> Path:
    with contract.reading(call.name):
        directory = contract.path(call.fields, "dataDir", DEFAULT_DATA_DIR)
    return call.on_host(directory) / call.invocation.container_id


def decoded(saved: bytes) -> _Delegate:
    """Read a saved configuration. Raises JsonError."""
    fields = gojson.loads_object(saved)
    plugin_type = gojson.get_str(fields, "type")
    if not plugin_type:
        raise gojson.JsonError("the type of the saved delegate is missing")
    return _Delegate(plugin_type, saved, fields)


# --- the composed configuration --------------------------------------------------------------------------------------


def _compose(call: Call) -> _Delegate:
    with contract.reading(call.name, "failed to load flannel netconf file: failed to load netconf"):
        path = contract.path(call.fields, "subnetFile", DEFAULT_SUBNET_FILE)
        try:
            content = fs.read_limited(call.on_host(path), limit=_SUBNET_LIMIT)
            subnets = read_subnets(content.decode("utf-8", "replace"), path)
        except (OSError, SubnetError) as error:
            reason = f"open {path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise InternalError(
                f"failed to load flannel 'subnet.env' file: {reason}. Check the flannel pod log for this node.",
                f"network {call.name!r}",
                remedy="start flannel's pod on this node, which writes the file, or name the file in 'subnetFile'",
            ) from error
        composed = _composed(call, subnets)
    return decoded(gojson.dumps(composed, sort_keys=False))


def _composed(call: Call, subnets: Subnets) -> dict[str, Any]:
    """Return `delegate` with flannel's additions, keys in the reference's order.

    As in the reference, the case of keys matters here: `mtu` is added beside `MTU`. Raises JsonError, CniError.
    """
    given = gojson.get_object(call.fields, "delegate") or {}
    plugin_type = given.get("type", DEFAULT_TYPE)
    if not isinstance(plugin_type, str):
        raise InvalidNetworkConfigError(
            "'delegate' dictionary, if present, must have (string) 'type' field", f"network {call.name!r}"
        )
    for key in ("name", "ipam"):
        if key in given:
            raise InvalidNetworkConfigError(
                f"'delegate' dictionary must not have '{key}' field, it'll be set by flannel", f"network {call.name!r}"
            )
    runtime = gojson.get_object(call.fields, "runtimeConfig")
    version = gojson.get_str(call.fields, "cniVersion")
    ipam = _ipam(gojson.get_object(call.fields, "ipam") or {}, subnets)
    composed = {
        # The delegate masquerades if flanneld does not.
        "ipMasq": not subnets.masquerades,
        "mtu": subnets.mtu,
        **({"isGateway": True} if plugin_type == DEFAULT_TYPE else {}),
        **given,
        "name": call.name,
        "type": plugin_type,
        **({"runtimeConfig": runtime} if runtime is not None else {}),
        **({"cniVersion": version} if version else {}),
        "ipam": None,
    }
    # A route's keys are in the order of the library's struct, those of all other objects are sorted.
    return _sorted(composed) | {"ipam": ipam}


def _ipam(given: Mapping[str, Any], subnets: Subnets) -> dict[str, Any]:
    """Return `ipam` with the node's subnets as ranges, and with routes to the cluster's networks after its own."""
    written = given.get("routes") or []
    if not isinstance(written, list):
        raise gojson.JsonError(f"routes: an array is needed, not {gojson.kind_of(written)}")
    for item in written:
        if not isinstance(item, dict):
            raise gojson.JsonError(f"routes: an object is needed, not {gojson.kind_of(item)}")
    try:
        routes = [write_route(read_route(item)) for item in written]
    except gojson.JsonError as error:
        raise InternalError(
            f"failed to assemble Delegate IPAM: failed to read IPAM routes: failed to parse ipam.routes: {error}",
            origin=Origin.NETWORK,
        ) from error
    routes += [{"dst": network} for network in subnets.networks]
    ranges = [[{"subnet": subnet}] for subnet in subnets.subnets]
    return _sorted({"type": _DEFAULT_IPAM, **given, "ranges": ranges, "routes": None}) | {"routes": routes}


def _sorted(fields: Mapping[str, Any]) -> dict[str, Any]:
    ordered: dict[str, Any] = json.loads(json.dumps(fields, sort_keys=True))
    return ordered


# --- subnet.env: `KEY=value` lines as flannel `pkg/subnet` WriteSubnetFile writes them; no quotes, no comments -------

_MTU_MAX: Final = 2**32 - 1


class SubnetError(ValueError):
    """flanneld's file can't be used; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Subnets:
    """The content of subnet.env. Networks and subnets are in CIDR notation without host bits, IPv4 first."""

    networks: Sequence[str]
    """The cluster's networks."""
    subnets: Sequence[str]
    """The node's, at most one of each family."""
    mtu: int
    """MTU in bytes."""
    masquerades: bool
    """True if flanneld itself masquerades."""


def read_subnets(text: str, path: str) -> Subnets:
    """Read the content of the file at `path`; unknown lines are ignored. Raises SubnetError."""
    values: dict[str, Any] = {}
    for line in text.split("\n"):
        key, equals, value = line.removesuffix("\r").partition("=")
        if key in _KEYS:
            if not equals:
                raise SubnetError(f"{path}: {key} has no value")
            values[key] = _KEYS[key](value)
    if missing := [key for keys in _NEEDED if values.keys().isdisjoint(keys) for key in keys]:
        raise SubnetError(f"{path} is missing {', '.join(missing)}")
    networks, subnets, (mtu,), (masquerades,) = ([values[key] for key in keys if key in values] for keys in _NEEDED)
    return Subnets([item for given in networks for item in given], subnets, mtu, masquerades)


def _networks(value: str) -> list[str]:
    return list(dict.fromkeys(map(_network, value.split(","))))


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(contract.ip_prefix(text), strict=False))
    except ValueError as error:
        raise SubnetError(f"invalid CIDR address: {text[:60]}") from error


def _mtu(value: str) -> int:
    # No signs, no white space, no underscores.
    if not (value.isascii() and value.isdigit()) or len(value) > len(str(_MTU_MAX)) or int(value) > _MTU_MAX:
        raise SubnetError(f'parsing "{value[:40]}": invalid MTU')
    return int(value)


_NEEDED: Final = (
    ("FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"),
    ("FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"),
    ("FLANNEL_MTU",),
    ("FLANNEL_IPMASQ",),
)
"""One of each is needed."""
_KEYS: Final[Mapping[str, Callable[[str], Any]]] = {
    **dict.fromkeys(_NEEDED[0], _networks),
    **dict.fromkeys(_NEEDED[1], _network),
    "FLANNEL_MTU": _mtu,
    "FLANNEL_IPMASQ": "true".__eq__,
}
