"""The configuration that flannel composes for the plugin that does the work; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.flannel.subnet import Subnets
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import read_route, write_route

DEFAULT_TYPE: Final = "bridge"
_DEFAULT_IPAM: Final = "host-local"


def compose(call: Call, subnets: Subnets) -> dict[str, Any]:
    """`delegate`, with what flannel adds where it says nothing, keys in the order in which the reference writes them.

    Keys are looked for as they are written, as by the reference: `MTU` does not keep `mtu` from being added.
    Raises JsonError, CniError.
    """
    given = gojson.get_object(call.fields, "delegate") or {}
    _check(given, call)
    runtime = gojson.get_object(call.fields, "runtimeConfig")
    plugin_type = given.get("type", DEFAULT_TYPE)
    version = gojson.get_str(call.fields, "cniVersion")
    ipam = _ipam(gojson.get_object(call.fields, "ipam") or {}, subnets)
    composed = {
        # What flanneld does not do is left to the delegate.
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
    # A route's keys are in the order of the library's struct, those of all other objects by name.
    return _sorted_object(composed) | {"ipam": ipam}


def encode(configuration: Mapping[str, Any]) -> bytes:
    """As the reference writes it."""
    return gojson.dumps(configuration, sort_keys=False)


def type_of(configuration: bytes) -> str:
    """The type of the plugin that a saved configuration is for. Raises JsonError for one that is none."""
    plugin_type = gojson.get_str(gojson.loads_object(configuration), "type")
    if not plugin_type:
        raise gojson.JsonError("type: a string is needed")
    return plugin_type


def _check(given: Mapping[str, Any], call: Call) -> None:
    if not isinstance(given.get("type", DEFAULT_TYPE), str):
        raise InvalidNetworkConfigError(
            "'delegate' dictionary, if present, must have (string) 'type' field", f"network {call.name!r}"
        )
    for key in ("name", "ipam"):
        if key in given:
            raise InvalidNetworkConfigError(
                f"'delegate' dictionary must not have '{key}' field, it'll be set by flannel", f"network {call.name!r}"
            )


def _ipam(given: Mapping[str, Any], subnets: Subnets) -> dict[str, Any]:
    """`ipam`, with the node's subnets in place of its ranges, and routes to the cluster's networks behind its own."""
    routes = []
    for item in _routes(given):
        try:
            routes.append(write_route(read_route(item)))
        except gojson.JsonError as error:
            raise InternalError(
                f"failed to assemble Delegate IPAM: failed to read IPAM routes: failed to parse ipam.routes: {error}"
            ) from error
    routes += [{"dst": network} for network in (*subnets.networks, *subnets.networks_v6)]
    ranges = [[{"subnet": subnet}] for subnet in (subnets.subnet, subnets.subnet_v6) if subnet]
    return _sorted_object({"type": _DEFAULT_IPAM, **given, "ranges": ranges, "routes": None}) | {"routes": routes}


def _routes(given: Mapping[str, Any]) -> list[Any]:
    routes = given.get("routes") or []
    if not isinstance(routes, list):
        raise gojson.JsonError(f"routes: an array is needed, not {gojson.kind_of(routes)}")
    for item in routes:
        if not isinstance(item, dict):
            raise gojson.JsonError(f"routes: an object is needed, not {gojson.kind_of(item)}")
    return routes


def _sorted_object(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _sorted(fields[key]) for key in sorted(fields)}


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return _sorted_object(value)
    return [_sorted(item) for item in value] if isinstance(value, list) else value
