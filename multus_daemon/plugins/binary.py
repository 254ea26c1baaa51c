"""`Binary`: a plugin that runs as a program.

A binary may be removed from the node after its ADD: for CHECK and DEL the built-in of the same name takes its place. If
a DEL of the reference `bridge` or `ptp` does not find the interface as ADD made it, it leaves masquerading rules
behind, which `Binary` removes.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import masquerade
from multus_daemon.plugins.builtin.registry import Builtin
from multus_daemon.plugins.find import PluginIsMultusError, PluginNotFoundError, Program
from multus_daemon.plugins.plugin import REFERENCE, Aspect, Observe, Plugin, Programs
from multus_daemon.spec.attachment import BUILT_IN, Difference, Invocation
from multus_daemon.spec.cni import gojson, result
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.netconf import OWN_TYPES

log = logging.getLogger(__name__)

# These ask the interface which addresses they masquerade, so a DEL that does not find them leaves the rules behind: a
# DEL from the spool, since the runtime has removed the namespace; a DEL after one that was killed, with the daemon,
# between interface and rules; and a DEL of an interface whose address a guest has now.
_MASQUERADING: Final = frozenset({"bridge", "ptp"})
_DELEGATING: Final = "flannel"
FOLLOWING: Final = frozenset({"CHECK", "DEL"})
"""Verbs that refer to the result of an ADD."""


class Binary(Plugin):
    """A plugin that runs as a program."""

    def __init__(
        self,
        plugin_type: str,
        program: Program,
        programs: Programs,
        *,
        builtin: Builtin | None = None,
        may_be_replaced: bool = False,
        called: Callable[[str], Program] | None = None,
        observe: Observe | None = None,
    ) -> None:
        """`program`: if it has no path, each run searches for it. `builtin`: the built-in of the type, which finds the
        binary's files and, with `may_be_replaced`, takes its place. `called` returns the program of an IPAM plugin.
        """
        super().__init__(plugin_type, program.path, observe)
        self._program = program
        self._programs = programs
        self._builtin = builtin
        self._substitute = builtin if may_be_replaced else None
        self._called = called

    def _run(self, call: Invocation, netns: PodNetns) -> Result:
        substitute = self._substitute if call.verb in FOLLOWING else None
        with_rules = _with_rules(self.type, call) if substitute and call.verb == "DEL" else None
        had_addresses = with_rules is not None and _has_addresses(call, netns)
        try:
            stdout = self._programs.run(self.type, call, self.place)
        except PluginNotFoundError:
            if substitute is None:
                raise
            if call.served_by.get(self.type, "") not in ("", BUILT_IN):
                log_replaced(self.type, call, BUILT_IN)
            return substitute._run(call, netns)
        if substitute and with_rules is not None and not (had_addresses and netns.exists):
            try:
                substitute.remove_rules(with_rules, netns)
            except CniError as error:
                raise error.with_context(f"rules that the binary of {self.type} has left") from error
        return result.decode(stdout, call.cni_version) if call.verb == "ADD" else Result()

    def differences(
        self, call: Invocation, netns: PodNetns, not_compared: frozenset[Aspect] = frozenset()
    ) -> list[Difference] | None:
        """Return None: only the binary's CHECK can compare what it made."""
        return None

    def refusal(self, call: Invocation) -> CniError | None:
        """Return why no ADD may begin: the plugin is Multus or missing, or its IPAM plugin is. None if one may."""
        if self.type in OWN_TYPES:
            return PluginIsMultusError(self.type)
        if self._program.refusal:
            return self._program.refusal
        if not self.place:
            return self._missing(self.type, call)
        try:
            ipam_type = gojson.get_str(gojson.get_object(call.fields, "ipam") or {}, "type") or ""
        except gojson.JsonError:
            return None
        if ipam_type in OWN_TYPES:
            return PluginIsMultusError(ipam_type)
        if not ipam_type or self._called is None:
            return None
        ipam = self._called(ipam_type)
        # A plugin of a vendor may need none: azure-vnet has its azure-cns inside.
        if not ipam.refusal and not ipam.path and self.type in REFERENCE:
            return self._missing(ipam_type, call)
        return ipam.refusal

    def _missing(self, plugin_type: str, call: Invocation) -> CniError:
        caller = gojson.get(call.fields, "type")
        return PluginNotFoundError(
            plugin_type, call.path.split(":"), caller="" if caller in (None, plugin_type) else str(caller)
        )

    def called_by(self, call: Invocation) -> Mapping[str, Invocation]:
        """Return nothing: a binary calls its IPAM plugin itself."""
        return {}

    def keeps(self, call: Invocation) -> bool:
        """Return True if the plugin may keep something on the node for the container. Raises IoFailureError."""
        return self._builtin is None or self._builtin.keeps(call)


def log_replaced(plugin_type: str, call: Invocation, other: str) -> None:
    """Log that the implementation `other` runs a call instead of the one that ran ADD, which is missing."""
    what = f"container {call.container_id}, interface {call.ifname}: {call.verb} of plugin {plugin_type}"
    log.warning("%s runs with the %s, as what ran ADD (%s) is missing", what, other, call.served_by[plugin_type])


def _with_rules(plugin_type: str, call: Invocation) -> Invocation | None:
    """Return the call of the plugin that makes masquerading rules: this one or its delegate. None if neither does."""
    fields = dict(call.fields)
    try:
        if plugin_type == _DELEGATING:
            # Unless the delegate says so, flanneld decided at the time of the ADD whether it masquerades.
            fields = {"ipMasq": True, **(gojson.get_object(fields, "delegate") or {}), "ipam": {"type": "host-local"}}
            fields |= {key: call.fields[key] for key in ("cniVersion", "name") if key in call.fields}
            plugin_type = fields.get("type", "bridge")
    except gojson.JsonError:
        return None
    if plugin_type not in _MASQUERADING or not masquerade.makes_rules(fields):
        return None
    return replace(call, fields=fields)


def _has_addresses(call: Invocation, netns: PodNetns) -> bool:
    """Return True if the interface has the addresses that ADD gave it, or if its namespace cannot be entered."""
    if not netns.path:
        return False
    try:
        found = netns.addresses(call.ifname)
    except OSError:
        return True
    added = call.prev_result or call.recorded
    wanted = {ipaddress.ip_address(ip.ip) for ip in added.ips} if added else set()
    has = {item.ip for item in found or () if not item.ip.is_link_local}
    return wanted <= has if wanted else bool(has)
