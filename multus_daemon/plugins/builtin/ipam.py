"""Delegating to the IPAM plugin that a configuration names (CNI SPEC section 4, "Plugin Delegation").

It gets the same variables and the same configuration as the plugin that delegates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import DecodingFailureError, InternalError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Result

ADDRESSES_MAX: Final = 4096
"""Of one interface."""


def called_by(call: Call) -> Mapping[str, Invocation]:
    """The IPAM plugin that a configuration names, which is called as who names it. Raises DecodingFailureError."""
    named = _named(call)
    return {named: call.invocation} if named else {}


def is_named(call: Call) -> bool:
    """Whether the configuration names an IPAM plugin. Raises DecodingFailureError."""
    return bool(_named(call))


def plugin_type(call: Call) -> str:
    """`ipam.type`. Raises InvalidNetworkConfigError where there is none, in the words of the reference plugins."""
    name = _named(call)
    if not name:
        raise InvalidNetworkConfigError("no plugin name provided", f"network {call.name!r}: set ipam.type")
    return name


def _named(call: Call) -> str:
    try:
        return conf.once(call.fields, _named, lambda: _type_in(call))
    except gojson.JsonError as error:
        raise DecodingFailureError(f"ipam: {error}", f"network {call.name!r}") from error


def _type_in(call: Call) -> str:
    return gojson.get_str(gojson.get_object(call.fields, "ipam") or {}, "type") or ""


def add(call: Call) -> Result:
    """Have addresses assigned; at least one. Raises CniError, the IPAM plugin's own unchanged."""
    answer = _run(call, "ADD")
    if not answer.ips:
        raise InternalError("IPAM plugin returned missing IP config", f"ipam.type {plugin_type(call)!r}")
    if len(answer.ips) > ADDRESSES_MAX:
        raise InternalError(
            f"IPAM plugin returned {len(answer.ips)} addresses, and at most {ADDRESSES_MAX} are taken",
            f"ipam.type {plugin_type(call)!r}",
        )
    return answer


def delete(call: Call) -> None:
    """Have the addresses released. Raises CniError, the IPAM plugin's own unchanged."""
    _run(call, "DEL")


def check(call: Call) -> None:
    """Have the addresses checked. Raises CniError, the IPAM plugin's own unchanged."""
    _run(call, "CHECK")


def status(call: Call) -> None:
    """Ask whether addresses can be assigned. Raises CniError, the IPAM plugin's own unchanged."""
    _run(call, "STATUS")


def _run(call: Call, verb: str) -> Result:
    return call.ipam.run(plugin_type(call), replace(call.invocation, verb=verb), call.netns)
