"""Refuse configurations that a plugin without a built-in certainly refuses, before anything is recorded. Pure.

Only values that every version refuses: a wrong JSON type, a number outside of the kernel's range, a path that no file
can have. The plugin checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from multus_daemon.plugins.builtin import configuration
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, DecodingFailureError, InvalidNetworkConfigError

_MARK_BITS: Final = 32
# Keys, in lower case, that the oldest reference plugins in use (v1.1.1, Debian 12) ignore, whatever their value.
_NEWER: Final[Mapping[str, frozenset[str]]] = {
    "bridge": frozenset(
        {"vlantrunk", "disablecontainerinterface", "preservedefaultvlan", "portisolation", "ipmasqbackend"}
    ),
    "macvlan": frozenset({"linkincontainer", "bcqueuelen"}),
    "ptp": frozenset({"ipmasqbackend", "dad"}),
    "tuning": frozenset({"txqlen"}),
}
_OLD_ROUTE: Final = frozenset({"dst", "gw"})
_PATHS: Final[Mapping[str, tuple[str, ...]]] = {
    "dhcp": ("daemonSocketPath",),
    "flannel": ("dataDir", "subnetFile"),
    "host-local": ("dataDir", "resolvConf"),
    "tuning": ("dataDir",),
}


def is_of_every_version(plugin_type: str, fields: Mapping[str, Any]) -> bool:
    """Report whether the configuration has no key that an older binary would ignore."""
    newer = _NEWER.get(plugin_type, frozenset())
    if any(key.lower() in newer for key in fields):
        return False
    try:
        routes = gojson.get_list(gojson.get_object(fields, "ipam") or {}, "routes") or ()
    except gojson.JsonError:
        return True
    return all(key.lower() in _OLD_ROUTE for route in routes if isinstance(route, dict) for key in route)


def validate(plugin_type: str, fields: Mapping[str, Any]) -> None:
    """Raise DecodingFailureError (6) for a wrong type, InvalidNetworkConfigError (7) for an impossible value."""
    where = f'plugin "{plugin_type}"'
    try:
        # Whatever else a plugin changes in this section before it calls the IPAM plugin.
        ipam = gojson.get_object(fields, "ipam") or {}
        ipam_type = gojson.get_str(ipam, "type") or ("host-local" if plugin_type == "flannel" else "")
        for name, section in {plugin_type: fields, ipam_type: ipam}.items():
            for key in _PATHS.get(name, ()):
                configuration.path(section, key)
        if plugin_type == "portmap":
            _portmap(fields)
    except gojson.JsonError as error:
        raise DecodingFailureError(f"{error} ({where})") from error
    except CniError as error:
        raise error.with_context(where) from error


def _portmap(fields: Mapping[str, Any]) -> None:
    """Check a configuration of portmap (containernetworking/plugins `plugins/meta/portmap`, README)."""
    gojson.get_bool(fields, "snat")
    for key in ("conditionsV4", "conditionsV6"):
        gojson.get_strings(fields, key)
    chain = gojson.get_str(fields, "externalSetMarkChain")
    bit = gojson.get_int(fields, "markMasqBit")
    if bit is not None and chain is not None:
        raise InvalidNetworkConfigError("markMasqBit and externalSetMarkChain exclude each other", "remove one of them")
    if bit is not None and not 0 <= bit < _MARK_BITS:
        raise InvalidNetworkConfigError(f"markMasqBit: {bit} is no bit of a mark", f"0 to {_MARK_BITS - 1}")
    runtime = gojson.get_object(fields, "runtimeConfig") or {}
    for index, mapping in enumerate(gojson.get_objects(runtime, "portMappings") or ()):
        for key in ("hostPort", "containerPort"):
            port = gojson.get_int(mapping, key)
            if port is None or port <= 0:
                raise InvalidNetworkConfigError(f"portMappings[{index}].{key}: a port is needed, not {port}")
        for key in ("protocol", "hostIP"):
            gojson.get_str(mapping, key)
