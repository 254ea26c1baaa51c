"""The PluginRunner for built-in plugins: checks a call as every CNI plugin does, then runs it in this process."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

from multus_daemon import deadlines
from multus_daemon.kernel import ops
from multus_daemon.plugins.builtin import ipam
from multus_daemon.plugins.builtin.contract import Call, Plugin
from multus_daemon.runtime import deadline
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.spec.attachment import BUILT_IN, Invocation
from multus_daemon.spec.cni import conf, gojson, skel
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InternalError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
    UnsupportedFieldError,
)
from multus_daemon.spec.cni.result import Result, from_object, in_version
from multus_daemon.spec.ports import HostTools, PluginRunner

log = logging.getLogger(__name__)

# Imported when first used: as a command, `host-local` must not pay for the netlink library.
PLUGINS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bridge": "multus_daemon.plugins.builtin.bridge.plugin",
        "flannel": "multus_daemon.plugins.builtin.flannel",
        "host-local": "multus_daemon.plugins.builtin.host_local.plugin",
        "loopback": "multus_daemon.plugins.builtin.loopback",
        "macvlan": "multus_daemon.plugins.builtin.macvlan",
        "passthru": "multus_daemon.plugins.builtin.passthru",
        "ptp": "multus_daemon.plugins.builtin.ptp",
        "static": "multus_daemon.plugins.builtin.static",
        "tuning": "multus_daemon.plugins.builtin.tuning",
    }
)
# Until IPv6 addresses are known to be nobody else's on a real segment: a second or two. The waits of a pod's networks
# are for the same time where each has a thread.
WAITING: Final = frozenset({"macvlan"})
KEEPING_NOTHING: Final = frozenset(
    {"bridge", "ipvlan", "loopback", "macvlan", "passthru", "portmap", "ptp", "static", "tuning", "vlan"}
)
"""Types of which nothing is left outside the container where their ADD refused the configuration, or failed, and the
interface is not there: the built-ins undo what they do, and the reference plugins make the rest after the interface."""


class BuiltinRunner:
    """Runs the plugins of PLUGINS, for many calls at a time."""

    def __init__(
        self,
        host_root: Path,
        *,
        ipam: PluginRunner | None = None,
        tools: HostTools | None = None,
        timeout: float = deadlines.DELEGATE_SECONDS,
        plugins: Mapping[str, Plugin] | None = None,
    ) -> None:
        """`host_root`: where the host's files are; `timeout` of one call in seconds.

        `ipam` runs the IPAM plugins that configurations name; this runner itself where it is None. `tools`: what
        masquerading and the like need. `plugins` adds to, and replaces some of, PLUGINS.
        """
        self.ipam: PluginRunner = self if ipam is None else ipam
        """May be set later: the composition root makes what dispatches to this runner after it."""
        self._host_root = host_root
        self._tools = tools
        self._timeout = timeout
        self._plugins: dict[str, Plugin] = dict(plugins or {})

    def locate(self, plugin_type: str) -> str:
        """`built-in`, or empty for a type that is none."""
        return BUILT_IN if plugin_type in PLUGINS or plugin_type in self._plugins else ""

    def unsupported(self, plugin_type: str, invocation: Invocation) -> str:
        """See `ports.BuiltinPlugins`."""
        try:
            return _unsupported(self._plugin(plugin_type), self._call(invocation, _checked(invocation), None))
        except CniError:
            return ""

    def validate(self, plugin_type: str, invocation: Invocation) -> None:
        """See `ports.BuiltinPlugins`."""
        call = self._call(invocation, _checked(invocation), None)
        plugin = self._plugin(plugin_type)
        try:
            if found := _unsupported(plugin, call):
                _refuse(plugin_type, call, found)
            plugin.validate(call)
        except CniError as error:
            raise error.with_context(f'plugin "{plugin_type}"') from error

    def waits(self, plugin_type: str) -> bool:
        """See `ports.BuiltinPlugins`."""
        return plugin_type in WAITING

    def called_by(self, plugin_type: str, invocation: Invocation) -> Mapping[str, Invocation]:
        """See `ports.BuiltinPlugins`."""
        call = self._call(invocation, _checked(invocation), None)
        found: Mapping[str, Invocation] = getattr(self._plugin(plugin_type), "called_by", ipam.called_by)(call)
        return found

    def kept(self, plugin_type: str, invocation: Invocation) -> str:
        """See `ports.BuiltinPlugins`."""
        if plugin_type in KEEPING_NOTHING:
            return ""
        if (keeper := getattr(self._plugin(plugin_type) if self.locate(plugin_type) else None, "kept", None)) is None:
            return f"what {plugin_type} keeps can't be seen"
        found: str = keeper(self._call(invocation, _checked(invocation), None))
        return found

    def run(self, plugin_type: str, invocation: Invocation) -> Result:
        """Check the configuration, run the verb; its result as the configuration's version can say it.

        Raises CniError: those of `skel.checked`, InvalidNetworkConfigError for a type that is no built-in,
        UnsupportedFieldError for what the plugin does not know, TryAgainLaterError after the timeout, the plugin's
        own; any other exception of the plugin is chained to an InternalError (999) with its text.
        """
        config = _checked(invocation)
        call = self._call(invocation, config, _prev_result(invocation, config))
        try:
            plugin = self._plugin(plugin_type)
            if found := _unsupported(plugin, call):
                _refuse(plugin_type, call, found)
            with deadline.within(self._timeout), ops.session(invocation.netns) as session:
                match invocation.verb:
                    case "ADD":
                        return in_version(plugin.add(call, session), call.cni_version)
                    case "DEL":
                        plugin.delete(call, session)
                    case "CHECK":
                        plugin.check(call, session)
                    case "STATUS":
                        plugin.status(call)
                    case _:
                        # GC: the reference plugins have no handler, which is success.
                        pass
                return Result()
        except CniError:
            raise
        except NoThreadError as error:
            raise TryAgainLaterError(str(error), f'{BUILT_IN} "{plugin_type}", {invocation.verb}') from error
        except deadline.ExpiredError as error:
            raise TryAgainLaterError(
                f'plugin "{plugin_type}" did not end within {self._timeout:g} s and was ended',
                f"{BUILT_IN}, {invocation.verb}",
            ) from error
        except Exception as error:
            raise InternalError(str(error) or type(error).__name__) from error

    def remove_rules(self, invocation: Invocation) -> None:
        """See `ports.BuiltinPlugins`."""
        from multus_daemon.plugins.builtin import masquerade, spoofing, veth  # the kernel: a program does without

        config = skel.checked(invocation.verb, invocation.fields)
        call = self._call(invocation, config, _prev_result(invocation, config))
        if call.tools is None:
            return
        try:
            with deadline.within(self._timeout), ops.session(invocation.netns) as session:
                masquerade.forget(call, veth.remove(call, session, others=masquerade.goes_by_name(call)))
                if gojson.get_bool(call.fields, "macspoofchk"):
                    spoofing.remove(call)
        except gojson.JsonError:
            # No ADD has come past this.
            return
        except deadline.ExpiredError as error:
            raise TryAgainLaterError(f"the removal of rules did not end within {self._timeout:g} s") from error

    def _call(self, invocation: Invocation, config: skel.Configuration, prev_result: Result | None) -> Call:
        return Call(
            invocation=invocation,
            name=config.name,
            cni_version=config.cni_version,
            prev_result=prev_result,
            host_root=self._host_root,
            ipam=self.ipam,
            tools=self._tools,
        )

    def _plugin(self, plugin_type: str) -> Plugin:
        if plugin := self._plugins.get(plugin_type):
            return plugin
        if plugin_type not in PLUGINS:
            known = ", ".join(sorted({*PLUGINS, *self._plugins}))
            raise InvalidNetworkConfigError(
                f'failed to find plugin "{plugin_type}" among the built-in ones', f"those are {known}"
            )
        module = cast(Plugin, importlib.import_module(PLUGINS[plugin_type]))
        self._plugins[plugin_type] = module
        return module


def _checked(invocation: Invocation) -> skel.Configuration:
    """As `skel.checked`; not again where that was done for the same verb. Raises as it does."""
    verb, fields = invocation.verb, invocation.fields
    key = (_checked, verb)
    return conf.once(fields, key, lambda: invocation.once(key, lambda: skel.checked(verb, fields)))


def _unsupported(plugin: Plugin, call: Call) -> str:
    try:
        # By the plugin as it is with tools, or without.
        key = (plugin.unsupported, call.tools is None)
        return conf.once(call.fields, key, lambda: plugin.unsupported(call))
    except gojson.JsonError:
        return ""


def _refuse(plugin_type: str, call: Call, found: str) -> None:
    """Refuse to ignore a part of a configuration. Of a DEL and a GC what can be done is done: refused, they come back.

    Raises UnsupportedFieldError.
    """
    if call.invocation.verb in ("DEL", "GC"):
        log.warning(
            "network %s: %s by the built-in %s, to which %s means nothing",
            call.name,
            call.invocation.verb,
            plugin_type,
            # Without the value, which may be a password.
            found.partition(":")[0],
        )
        return
    raise UnsupportedFieldError(
        f"{found} is not supported by the built-in {plugin_type}",
        f"network {call.name!r}: correct the key, or install the binary of {plugin_type} in the CNI bin directory",
    )


def _prev_result(invocation: Invocation, config: skel.Configuration) -> Result | None:
    """The previous result; for a DEL what the ADD answered. One in the configuration that can't be read fails an ADD
    and a CHECK.

    A DEL goes on without: the reference plugins do not look at it then, and a DEL that fails leaks what it should
    have removed.
    """
    if (known := invocation.prev_result or invocation.recorded) is not None:
        return known
    try:
        fields = gojson.get_object(invocation.fields, "prevResult")
        return None if fields is None else from_object(fields, config.cni_version)
    except (gojson.JsonError, CniError) as error:
        if invocation.verb not in ("ADD", "CHECK"):
            log.warning("network %s: %s goes on without prevResult: %s", config.name, invocation.verb, error)
            return None
        raise DecodingFailureError(f"could not parse prevResult: {error}") from error
