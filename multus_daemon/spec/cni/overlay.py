"""A CNI configuration laid over another one, for the configurations in ResourceClaims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import DecodingFailureError, InvalidNetworkConfigError

_NETWORKS_OWN: Final = frozenset({"name", "cniversion", "cniversions", "prevresult", "runtimeconfig", "plugins"})
"""Keys that an overlay does not change, in small letters."""


def overlaid(config: NetworkConfig, overlay: bytes) -> NetworkConfig:
    """Return the network with the keys of `overlay`, a configuration, laid over those of its plugins.

    A plugin of the overlay changes the first of the network's with its type; objects are merged key by key. Name,
    version and plugins stay the network's. Raises DecodingFailureError (6), and InvalidNetworkConfigError (7) if the
    overlay has another plugin, or another IPAM plugin.
    """
    try:
        fields, wanted = gojson.loads_object(config.raw), gojson.loads_object(overlay)
        entries = list((gojson.get_list(fields, "plugins") or ()) if config.is_list else (fields,))
        single = gojson.get_str(wanted, "type")
        for change in (wanted,) if single else (gojson.get_list(wanted, "plugins") or ()):
            if not isinstance(change, dict):
                raise gojson.JsonError(f"plugins: an object is needed, not {gojson.kind_of(change)}")
            plugin_type = gojson.get_str(change, "type") or ""
            index = next((at for at, plugin in enumerate(config.plugins) if plugin.type == plugin_type), None)
            if index is None:
                raise InvalidNetworkConfigError(
                    f"the network has no plugin {plugin_type!r}", f"network {config.name!r}"
                )
            entries[index] = _overlaid(entries[index], change)
        fields = gojson.with_keys(fields, {"plugins": entries}) if config.is_list else entries[0]
    except gojson.JsonError as error:
        raise DecodingFailureError(f"CNI configuration: {error}", f"network {config.name!r}") from error
    made = conf.parse_written(gojson.dumps(fields, sort_keys=False))
    for before, now in zip(config.plugins, made.plugins, strict=True):
        if before.ipam_type != now.ipam_type:
            raise InvalidNetworkConfigError(
                f"ipam.type of plugin {now.type} cannot be changed", f"network {config.name!r}"
            )
    return replace(made, cni_version=config.cni_version)


def _overlaid(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    updates = {}
    for key, value in changes.items():
        present = gojson.get(fields, key)
        if key.lower() not in _NETWORKS_OWN:
            both = isinstance(value, dict) and isinstance(present, dict)
            updates[key] = _overlaid(present, value) if both else value
    return gojson.with_keys(fields, updates)
