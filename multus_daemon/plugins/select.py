"""Choose the implementation of a plugin: its binary, or the built-in of the same name.

A built-in that does not support all of a configuration leaves the call to the binary, if there is one. CHECK and DEL
use the implementation that ran ADD, whatever was set or installed since; if it is missing, they use the other one,
except with mode `off`. A type can be excepted: its binary serves it as with `off`, and the built-in only checks and
removes what it made itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from multus_daemon import deadlines
from multus_daemon.plugins.binary import FOLLOWING, Binary, log_replaced
from multus_daemon.plugins.builtin.contract import Module
from multus_daemon.plugins.builtin.registry import PLUGINS, Builtin
from multus_daemon.plugins.cache import name_problem
from multus_daemon.plugins.find import PluginIsMultusError
from multus_daemon.plugins.plugin import REFERENCE, HostTools, Observe, Plugin, Program, Programs
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Invocation, Sandbox
from multus_daemon.spec.cni import gojson, names, versions
from multus_daemon.spec.cni.errors import (
    CniError,
    IncompatibleVersionError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
)
from multus_daemon.spec.cni.names import FILE_NAME_MAX_BYTES

log = logging.getLogger(__name__)

_TYPES_DEPTH: Final = 4
"""Levels of a plugin's configuration in which another plugin can be named."""
_IPAM_TYPES: Final = frozenset({"dhcp", "host-local", "static", "whereabouts"})
BINARY: Final = "binary"
"""Value of `served_by` for a binary without a known path: an upstream daemon ran it."""

Mode: TypeAlias = Literal["off", "fallback", "prefer"]


class Plugins:
    """Every plugin that the node has.

    `off`: binaries only. `fallback`: the built-in if there is no binary. `prefer`: the built-in if there is one that
    supports all of the configuration. `excepted`: types for which ADD uses only the binary.
    """

    def __init__(
        self,
        programs: Programs,
        mode: Mode,
        *,
        excepted: Collection[str] = (),
        host_root: Path = Path("/"),
        tools: HostTools | None = None,
        timeout: float = deadlines.DELEGATE_SECONDS,
        observe: Observe | None = None,
        modules: Mapping[str, Module] | None = None,
    ) -> None:
        """`host_root`, `tools`, `timeout`: see `Builtin`; `modules` adds to PLUGINS, and replaces some of them."""
        self._programs = programs
        self._mode: Mode = mode
        self._excepted = frozenset(excepted)
        self._observe = observe
        self._builtins = {
            name: Builtin(
                name,
                host_root,
                plugin_for=self.recorded,
                tools=tools,
                timeout=timeout,
                module=(modules or {}).get(name),
                observe=observe,
            )
            for name in {*PLUGINS, *(modules or {})}
        }

    def builtin(self, plugin_type: str) -> Builtin | None:
        """Return the built-in of the type, whatever the mode is; None if there is none."""
        return self._builtins.get(plugin_type)

    def programs(self, calls: Iterable[tuple[str, Invocation]]) -> Mapping[str, Program]:
        """Return the binaries that the choice for these calls depends on, by type. Raises IoFailureError."""
        return {name: self._program(name) for name in {name for call in calls for name in self._needed(*call)}}

    def _needed(self, plugin_type: str, call: Invocation) -> Iterator[str]:
        """Yield the types whose binary counts; a built-in that certainly serves a call saves the look at the disk."""
        builtin = self._builtins.get(plugin_type) if self._mode_of(plugin_type) == "prefer" else None
        if builtin is None or builtin.unsupported(call):
            yield plugin_type
            yield from _named(call.fields)
            return
        # For a configuration that cannot be read no binary counts.
        with contextlib.suppress(CniError):
            for name, called in builtin.called_by(call).items():
                if name != plugin_type:
                    yield from self._needed(name, called)

    def _program(self, plugin_type: str) -> Program:
        path = self._programs.locate(plugin_type)
        try:
            if path:
                self._programs.refuse_multus(plugin_type, path)
        except PluginIsMultusError as error:
            return Program(path, error)
        return Program(path)

    def of(self, plugin_type: str, call: Invocation, programs: Mapping[str, Program] | None = None) -> Plugin:
        """Return the plugin that is to serve an attachment.

        `programs`: those that the choice depends on; if None, they are looked for. Raises IoFailureError.
        """
        mode = self._mode_of(plugin_type)
        builtin = self._builtins.get(plugin_type) if mode != "off" else None
        unsupported = builtin.unsupported(call) if builtin and mode == "prefer" else ""
        if builtin and mode == "prefer" and not unsupported:
            return builtin
        if programs is None:
            program = Program(self._programs.locate(plugin_type))
        else:
            program = programs.get(plugin_type, Program())
        if builtin and not program.path:
            # If its configuration has an unsupported key, it says so.
            return builtin
        if unsupported:
            log.debug("%s of %s is left to %s: %s", call.verb, plugin_type, program.path, unsupported)
        return self._binary(plugin_type, program, None if programs is None else lambda name: self._any(name, programs))

    def _any(self, plugin_type: str, programs: Mapping[str, Program]) -> Program:
        """Return the program of a plugin that a binary calls; the built-in may be there as a program too."""
        program = programs.get(plugin_type, Program())
        is_built_in = plugin_type in self._builtins and self._mode_of(plugin_type) != "off"
        return Program(BUILT_IN) if is_built_in and not program.path else program

    def servers(self, plugin_type: str, call: Invocation, programs: Mapping[str, Program]) -> Mapping[str, str]:
        """Return, by type, what is to serve the plugin and those that a built-in calls: `Plugin.place`.

        Raises CniError for a configuration that an ADD would certainly refuse.
        """
        served_by: dict[str, str] = {}
        calls = [(plugin_type, call)]
        for name, called in calls:
            if name not in served_by:
                plugin = self.of(name, called, programs)
                if refusal := plugin.refusal(called):
                    raise refusal
                served_by[name] = plugin.place
                calls += plugin.called_by(called).items()
        return served_by

    def recorded(self, plugin_type: str, call: Invocation) -> Plugin:
        """Return the plugin that the record of the call's attachment names, or, without a record, that of `of`."""
        served_by = call.served_by.get(plugin_type, "")
        if call.verb in FOLLOWING:
            return self._following(plugin_type, call, served_by)
        if served_by and served_by != BUILT_IN:
            return self._binary(plugin_type, Program(served_by))
        builtin = self._builtins.get(plugin_type) if served_by else None
        return builtin or self.of(plugin_type, call)

    def _following(self, plugin_type: str, call: Invocation, served_by: str) -> Plugin:
        builtin = self._builtins.get(plugin_type)
        if self._mode == "off" or builtin is None:
            if served_by == BUILT_IN:
                log_replaced(plugin_type, call, BINARY)
            builtin = None
        preferred = BUILT_IN if self._mode_of(plugin_type) == "prefer" else BINARY
        # Without a binary the built-in says which key is unsupported, or does the DEL.
        if (
            builtin
            and (served_by or preferred) == BUILT_IN
            and not (builtin.unsupported(call) and self._programs.locate(plugin_type))
        ):
            return builtin
        # Its path may be another one by now.
        return self._binary(plugin_type, Program())

    def _binary(self, plugin_type: str, program: Program, called: Callable[[str], Program] | None = None) -> Binary:
        return Binary(
            plugin_type,
            program,
            self._programs,
            builtin=self._builtins.get(plugin_type),
            may_be_replaced=self._mode_of(plugin_type) != "off",
            called=called,
            observe=self._observe,
        )

    def _mode_of(self, plugin_type: str) -> Mode:
        return "off" if plugin_type in self._excepted else self._mode

    def log_binaries(self, bin_dir: str) -> None:
        """Log which built-ins replace a binary, and which excepted types have none. Raises IoFailureError."""
        preferred = [name for name in PLUGINS if self._mode_of(name) == "prefer"]
        if shadowed := sorted(filter(None, map(self._programs.locate, preferred))):
            log.info(
                "builtinPlugins: prefer: these binaries run only for what the built-in of the name does not know, "
                "and for what they have attached: %s",
                ", ".join(shadowed),
            )
        if missing := sorted(name for name in self._excepted if not self._programs.locate(name)):
            log.warning(
                "builtinPluginsExcept: no binary in %s, networks of these types can't be attached: %s",
                bin_dir,
                ", ".join(missing),
            )


def _named(value: Mapping[str, Any], depth: int = 1) -> Iterator[str]:
    """Yield the types that a configuration names wherever a plugin may look for another one to call."""
    plugin_type = gojson.get(value, "type")
    if isinstance(plugin_type, str) and plugin_type:
        yield plugin_type
    for item in value.values():
        if isinstance(item, dict) and depth < _TYPES_DEPTH:
            yield from _named(item, depth + 1)


def require_valid(sandbox: Sandbox, attachment: Attachment) -> None:
    """Refuse an attachment that no plugin could serve, by its names, its version and its list of plugins. Pure.

    Raises InvalidNetworkConfigError, InvalidEnvironmentError (interface name) or IncompatibleVersionError.
    """
    config = attachment.config
    if problem := names.network_name_problem(config.name):
        raise InvalidNetworkConfigError(problem, config.name)
    if problem := names.ifname_problem(attachment.ifname):
        raise InvalidEnvironmentError(problem, attachment.ifname)
    # The reference fails after every plugin has run.
    if problem := name_problem(config.name, sandbox.container_id, attachment.ifname):
        raise InvalidNetworkConfigError(
            problem,
            f"its result's file is named <network>-<container>-<interface>, {FILE_NAME_MAX_BYTES} bytes at most; "
            "shorten 'name' in the network's configuration",
        )
    if not versions.is_supported(config.cni_version):
        raise IncompatibleVersionError(
            f'unsupported CNI version "{config.cni_version}"', f"known are {', '.join(versions.SUPPORTED)}"
        )
    for plugin in config.plugins:
        # One of the reference plugins would call itself. For an IPAM plugin alone, `ipam` is its own configuration.
        calls_itself = plugin.ipam_type == plugin.type and plugin.type not in _IPAM_TYPES
        if calls_itself or plugin.ipam_type in REFERENCE:
            raise InvalidNetworkConfigError(
                f'ipam.type "{plugin.ipam_type}" is no IPAM plugin',
                "it would call itself for an address; name one such as host-local",
            )
    if not config.plugins:
        raise InvalidNetworkConfigError("no plugins in list", "name one in the configuration's 'plugins'")
