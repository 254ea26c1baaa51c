"""`flannel`: calls another plugin, usually `bridge`, to attach the container to the node's subnet from flanneld.

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
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin.contract import Call, Undo, read_file, write_file
from multus_daemon.plugins.builtin.interfaces import located, step
from multus_daemon.plugins.plugin import Difference
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Result, read_route, write_route

log = logging.getLogger(__name__)

DEFAULT_SUBNET_FILE: Final = "/run/flannel/subnet.env"
DEFAULT_DATA_DIR: Final = "/var/lib/cni/flannel"
DEFAULT_TYPE: Final = "bridge"
_DEFAULT_IPAM: Final = "host-local"
_KEYS: Final = configuration.COMMON_KEYS.union(("subnetFile", "dataDir", "delegate"))
_SUBNET_LIMIT: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Delegate:
    """The configuration of the plugin that flannel calls."""

    plugin_type: str
    stdin: bytes
    fields: Mapping[str, Any]


def unsupported(call: Call) -> str:
    """Name the first key that this plugin does not know; the delegate's keys belong to the delegate."""
    return configuration.unknown_key(call.fields, _KEYS)


def validate(call: Call) -> None:
    """Read and compose the configuration; the delegate checks the composed one."""
    _saved_at(call)
    _compose(call)


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
    """Run the delegate's DEL with the saved configuration. Without one there is nothing to remove."""
    path = _saved_at(call)
    with step("read the delegate's configuration"):
        # A temporary file of an ADD that was killed.
        fs.sweep(path.parent, name=path.name)
        saved = read_file(path)
    if saved is None:
        return
    try:
        composed = _decoded(saved)
    except gojson.JsonError as error:
        # With an error, the DEL would be repeated forever.
        log.warning("network %s: failed to parse netconf %s: %s", call.name, path, error)
        return
    _run(call, "DEL", composed)
    with step("remove the delegate's configuration"):
        write_file(path, None)


def differences(call: Call, netns: PodNetns) -> list[Difference] | None:
    """Return those of the delegate, by the configuration that the ADD saved. Raises CniError."""
    path = _saved_at(call)
    with configuration.reading(call.name), step("read the delegate's configuration"):
        saved = read_file(path)
        composed = _compose(call) if saved is None else _decoded(saved)
    delegated = replace(_invocation(call, call.invocation.verb, composed), prev_result=call.prev_result)
    return call.plugin_for(composed.plugin_type, delegated).differences(delegated, netns, call.not_compared)


def keeps(call: Call) -> bool:
    """Report whether the saved configuration exists, without which DEL does nothing."""
    return _saved_at(call).exists()


def _run(call: Call, verb: str, composed: _Delegate) -> Result:
    """Raises CniError, the delegate's own unchanged."""
    delegated = _invocation(call, verb, composed)
    return call.plugin_for(composed.plugin_type, delegated).run(delegated, call.netns)


def _invocation(call: Call, verb: str, composed: _Delegate) -> Invocation:
    recorded = call.prev_result if verb == "DEL" else None
    return replace(
        call.invocation, verb=verb, fields=composed.fields, prev_result=None, raw=composed.stdin, recorded=recorded
    )


def _saved_at(call: Call) -> Path:
    with configuration.reading(call.name):
        directory = configuration.path(call.fields, "dataDir", DEFAULT_DATA_DIR)
    return call.on_host(directory) / call.invocation.container_id


def _decoded(saved: bytes) -> _Delegate:
    """Raises JsonError."""
    return _Delegate(type_of(saved), saved, gojson.loads_object(saved))


def type_of(saved: bytes) -> str:
    """Return the plugin's type in a saved configuration. Raises JsonError if there is none."""
    plugin_type = gojson.get_str(gojson.loads_object(saved), "type")
    if not plugin_type:
        raise gojson.JsonError("type: a string is needed")
    return plugin_type


# --- the composed configuration --------------------------------------------------------------------------------------


def _compose(call: Call) -> _Delegate:
    """Raises CniError."""
    with configuration.reading(call.name, "failed to load flannel netconf file: failed to load netconf"):
        path = configuration.path(call.fields, "subnetFile", DEFAULT_SUBNET_FILE)
        try:
            content = fs.read_limited(call.on_host(path), limit=_SUBNET_LIMIT)
            subnets = read_subnets(content.decode("utf-8", "replace"), path)
        except (OSError, SubnetError) as error:
            reason = f"open {path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            raise InternalError(
                f"failed to load flannel 'subnet.env' file: {reason}. Check the flannel pod log for this node.",
                f"network {call.name!r}",
            ) from error
        composed = _composed(call, subnets)
    stdin = gojson.dumps(composed, sort_keys=False)
    return _Delegate(composed["type"], stdin, gojson.loads_object(stdin))


def _composed(call: Call, subnets: Subnets) -> dict[str, Any]:
    """Return `delegate` with flannel's additions, keys in the reference's order.

    Keys are compared as they are written, as by the reference: `mtu` is added although there is `MTU`.
    Raises JsonError, CniError.
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
    """Return `ipam` with the node's subnets as its ranges, and routes to the cluster's networks behind its own."""
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
            f"failed to assemble Delegate IPAM: failed to read IPAM routes: failed to parse ipam.routes: {error}"
        ) from error
    routes += [{"dst": network} for network in (*subnets.networks, *subnets.networks_v6)]
    ranges = [[{"subnet": subnet}] for subnet in (subnets.subnet, subnets.subnet_v6) if subnet]
    return _sorted({"type": _DEFAULT_IPAM, **given, "ranges": ranges, "routes": None}) | {"routes": routes}


def _sorted(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sort the keys of an object and of all objects in it."""
    ordered: dict[str, Any] = json.loads(json.dumps(fields, sort_keys=True))
    return ordered


# --- subnet.env: `KEY=value` lines as flannel `pkg/subnet` WriteSubnetFile writes them; no quotes, no comments -------

_MTU_MAX: Final = 2**32 - 1


class SubnetError(ValueError):
    """A file that can't be used; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Subnets:
    """The content of subnet.env. Networks and subnets are in CIDR notation without host bits."""

    networks: Sequence[str] = ()
    """The cluster's."""
    networks_v6: Sequence[str] = ()
    subnet: str = ""
    """The node's; empty: none."""
    subnet_v6: str = ""
    mtu: int = 0
    """Bytes."""
    masquerades: bool = False
    """flanneld does it."""


def read_subnets(text: str, path: str) -> Subnets:
    """Read the content of the file at `path`; unknown lines are ignored. Raises SubnetError."""
    values: dict[str, Any] = {}
    for line in text.split("\n"):
        key, equals, value = line.removesuffix("\r").partition("=")
        if key in _SUBNET_KEYS:
            if not equals:
                raise SubnetError(f"{path}: {key} has no value")
            field_name, read = _SUBNET_KEYS[key]
            values[field_name] = read(value)
    missing = []
    for names in (("networks", "networks_v6"), ("subnet", "subnet_v6"), ("mtu",), ("masquerades",)):
        if values.keys().isdisjoint(names):
            missing += [key for key, (name, _) in _SUBNET_KEYS.items() if name in names]
    if missing:
        raise SubnetError(f"{path} is missing {', '.join(missing)}")
    return Subnets(**values)


def _networks(value: str) -> list[str]:
    """Return networks that are separated by commas, in order, each once."""
    return list(dict.fromkeys(map(_network, value.split(","))))


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(configuration.ip_prefix(text), strict=False))
    except ValueError as error:
        raise SubnetError(f"invalid CIDR address: {text[:60]}") from error


def _mtu(value: str) -> int:
    # No signs, no white space, no underscores.
    if not (value.isascii() and value.isdigit()) or len(value) > len(str(_MTU_MAX)) or int(value) > _MTU_MAX:
        raise SubnetError(f'parsing "{value[:40]}": invalid MTU')
    return int(value)


_SUBNET_KEYS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "FLANNEL_NETWORK": ("networks", _networks),
    "FLANNEL_IPV6_NETWORK": ("networks_v6", _networks),
    "FLANNEL_SUBNET": ("subnet", _network),
    "FLANNEL_IPV6_SUBNET": ("subnet_v6", _network),
    "FLANNEL_MTU": ("mtu", _mtu),
    "FLANNEL_IPMASQ": ("masquerades", lambda value: value == "true"),
}
