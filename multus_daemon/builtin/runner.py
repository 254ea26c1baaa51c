"""The PluginRunner for built-in plugins: checks a call as every CNI plugin does, then runs it in this process."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

from multus_daemon import deadlines
from multus_daemon.builtin.contract import BuiltinPlugin, Call
from multus_daemon.cni import gojson, skel
from multus_daemon.cni import result as cni_result
from multus_daemon.cni.errors import (
    CniError,
    DecodingFailureError,
    InternalError,
    InvalidNetworkConfigError,
    TryAgainLaterError,
    UnsupportedFieldError,
)
from multus_daemon.ports import BUILT_IN, HostTools, Invocation, PluginRunner

log = logging.getLogger(__name__)

# Module and class. Imported when first used: as a command, `host-local` must not pay for the netlink library.
PLUGINS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "bridge": ("multus_daemon.builtin.bridge", "Bridge"),
        "flannel": ("multus_daemon.builtin.flannel", "Flannel"),
        "host-local": ("multus_daemon.builtin.host_local", "HostLocal"),
        "loopback": ("multus_daemon.builtin.loopback", "Loopback"),
        "macvlan": ("multus_daemon.builtin.macvlan", "Macvlan"),
        "passthru": ("multus_daemon.builtin.passthru", "Passthru"),
        "ptp": ("multus_daemon.builtin.ptp", "Ptp"),
        "static": ("multus_daemon.builtin.static", "Static"),
        "tuning": ("multus_daemon.builtin.tuning", "Tuning"),
    }
)


class BuiltinRunner:
    """Runs the plugins of PLUGINS, one instance of each, for many calls at a time."""

    def __init__(
        self,
        host_root: Path,
        *,
        ipam: PluginRunner | None = None,
        tools: HostTools | None = None,
        timeout: float = deadlines.DELEGATE_SECONDS,
        plugins: Mapping[str, BuiltinPlugin] | None = None,
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
        self._instances: dict[str, BuiltinPlugin] = dict(plugins or {})

    def locate(self, plugin_type: str) -> str:
        """`built-in`, or empty for a type that is none."""
        return BUILT_IN if plugin_type in PLUGINS or plugin_type in self._instances else ""

    async def unsupported(self, plugin_type: str, invocation: Invocation) -> str:
        """As BuiltinPlugins. A configuration that can't be used is left for `run` to refuse: empty."""
        if invocation.verb == "VERSION":
            return ""
        try:
            config = skel.configuration(invocation.verb, invocation.stdin)
            return _unsupported(await self._plugin(plugin_type), self._call(invocation, config, None))
        except CniError:
            return ""

    async def run(self, plugin_type: str, invocation: Invocation) -> bytes:
        """Check the configuration, run the verb, encode the result in the configuration's version.

        Raises CniError: those of `skel.configuration`, InvalidNetworkConfigError for a type that is no built-in,
        UnsupportedFieldError for what the plugin does not know, TryAgainLaterError after the timeout, the plugin's
        own; any other exception of the plugin is chained to an InternalError (999) with its text.
        """
        if invocation.verb == "VERSION":
            return skel.version_stdout()
        config = skel.configuration(invocation.verb, invocation.stdin)
        call = self._call(invocation, config, _prev_result(invocation.verb, config))
        limit = asyncio.timeout(self._timeout)
        try:
            plugin = await self._plugin(plugin_type)
            if found := _unsupported(plugin, call):
                _refuse(plugin_type, call, found)
            async with limit:
                return await _run_verb(plugin, call)
        except CniError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise TryAgainLaterError(
                    f'plugin "{plugin_type}" did not end within {self._timeout:g} s and was ended',
                    f"{BUILT_IN}, {invocation.verb}",
                ) from error
            raise InternalError(str(error) or type(error).__name__) from error

    def _call(self, invocation: Invocation, config: skel.Configuration, prev_result: cni_result.Result | None) -> Call:
        return Call(
            invocation=invocation,
            fields=config.fields,
            name=config.name,
            cni_version=config.cni_version,
            prev_result=prev_result,
            host_root=self._host_root,
            ipam=self.ipam,
            tools=self._tools,
        )

    async def _plugin(self, plugin_type: str) -> BuiltinPlugin:
        if plugin := self._instances.get(plugin_type):
            return plugin
        if plugin_type not in PLUGINS:
            known = ", ".join(sorted({*PLUGINS, *self._instances}))
            raise InvalidNetworkConfigError(
                f'failed to find plugin "{plugin_type}" among the built-in ones', f"those are {known}"
            )
        # Reads files, so not in the event loop. Two that meet here: the first one's instance stays.
        made = await asyncio.to_thread(_make, plugin_type)
        return self._instances.setdefault(plugin_type, made)


def _make(plugin_type: str) -> BuiltinPlugin:
    module, name = PLUGINS[plugin_type]
    return cast(BuiltinPlugin, getattr(importlib.import_module(module), name)())


def _unsupported(plugin: BuiltinPlugin, call: Call) -> str:
    try:
        return plugin.unsupported(call)
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
            found,
        )
        return
    raise UnsupportedFieldError(
        f"{found} is not supported by the built-in {plugin_type}",
        f"network {call.name!r}: correct the key, or install the binary of {plugin_type} in the CNI bin directory",
    )


async def _run_verb(plugin: BuiltinPlugin, call: Call) -> bytes:
    match call.invocation.verb:
        case "ADD":
            made = await plugin.add(call)
            if made == cni_result.Result():
                return cni_result.empty_stdout(call.cni_version)
            return cni_result.to_stdout(made, call.cni_version)
        case "DEL":
            await plugin.delete(call)
        case "CHECK":
            await plugin.check(call)
        case "STATUS":
            await plugin.status(call)
        case _:
            # GC: the reference plugins have no handler, which is success.
            pass
    return b""


def _prev_result(verb: str, config: skel.Configuration) -> cni_result.Result | None:
    """`prevResult` of a configuration. One that can't be read fails an ADD and a CHECK.

    A DEL goes on without: the reference plugins do not look at it then, and a DEL that fails leaks what it should
    have removed.
    """
    try:
        fields = gojson.get_object(config.fields, "prevResult")
        return None if fields is None else cni_result.from_object(fields, config.cni_version)
    except (gojson.JsonError, CniError) as error:
        if verb not in ("ADD", "CHECK"):
            log.warning("network %s: %s goes on without prevResult: %s", config.name, verb, error)
            return None
        raise DecodingFailureError(f"could not parse prevResult: {error}") from error
