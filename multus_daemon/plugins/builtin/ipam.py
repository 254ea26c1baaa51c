"""Call the IPAM plugin that a configuration names (CNI SPEC section 4, "Plugin Delegation")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Result

ADDRESSES_MAX: Final = 4096
"""Maximum number of addresses of one interface."""


def called_by(call: Call) -> Mapping[str, Invocation]:
    """Return the call of the IPAM plugin by its type; empty if there is none. Raises DecodingFailureError."""
    plugin_type = named(call)
    return {plugin_type: call.invocation} if plugin_type else {}


def named(call: Call) -> str:
    """Return `ipam.type`, empty if there is none. Raises DecodingFailureError."""
    with configuration.reading(call.name, "ipam"):
        return conf.once(
            call.fields,
            named,
            lambda: gojson.get_str(gojson.get_object(call.fields, "ipam") or {}, "type") or "",
        )


def required(call: Call) -> str:
    """Return `ipam.type`. Raises DecodingFailureError; InvalidNetworkConfigError if there is none."""
    plugin_type = named(call)
    if not plugin_type:
        raise InvalidNetworkConfigError("no plugin name provided", f"network {call.name!r}: set ipam.type")
    return plugin_type


def run(call: Call, verb: str) -> Result:
    """Run a verb of the IPAM plugin; an ADD must return between 1 and ADDRESSES_MAX addresses.

    Raises CniError, the IPAM plugin's own unchanged.
    """
    plugin_type = required(call)
    answer = call.ipam.run(plugin_type, replace(call.invocation, verb=verb), call.netns)
    if verb == "ADD" and not 0 < len(answer.ips) <= ADDRESSES_MAX:
        too_many = f"{len(answer.ips)} addresses, and at most {ADDRESSES_MAX} are taken"
        problem = too_many if answer.ips else "missing IP config"
        raise InternalError(f"IPAM plugin returned {problem}", f"ipam.type {plugin_type!r}")
    return answer
