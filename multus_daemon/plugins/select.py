"""Choose the implementation of a plugin: its binary, or the built-in of the same name.

If the built-in does not support all of a configuration, the binary runs, if there is one. CHECK and DEL use the
implementation that ran ADD, even if settings or binaries have changed; if it is missing, they use the other one, except
with mode `off`. For an excepted type the binary runs ADD as with `off`, and the built-in runs CHECK and DEL only of its
own ADDs. For a binary of a newer release than the built-in follows, the mode is `fallback`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from multus_daemon import deadlines
from multus_daemon.plugins.binary import FOLLOWING, Binary, log_replaced
from multus_daemon.plugins.builtin.contract import LeftToBinary, Module
from multus_daemon.plugins.builtin.registry import PLUGINS, Builtin, newer
from multus_daemon.plugins.cache import name_problem
from multus_daemon.plugins.find import Program
from multus_daemon.plugins.plugin import REFERENCE, HostTools, Observe, Plugin, Programs
from multus_daemon.runtime import threads
from multus_daemon.spec.attachment import BUILT_IN, Attachment, Invocation, Sandbox
from multus_daemon.spec.cni import gojson, names, versions
from multus_daemon.spec.cni.errors import (
    CniError,
    IncompatibleVersionError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    Origin,
)
from multus_daemon.spec.cni.names import FILE_NAME_MAX_BYTES

if TYPE_CHECKING:
    from multus_daemon.plugins.leases import Leases
    from multus_daemon.spec.ports import AddressBook

log = logging.getLogger(__name__)

_NO_PROGRAM: Final = frozenset({"dhcp", "whereabouts"})
"""Built-ins that need the daemon: `multus-builtin` has no program of them that a binary could call."""
_TYPES_DEPTH: Final = 4
"""Nesting levels of a plugin's configuration that are searched for the types of other plugins."""
_IPAM_TYPES: Final = frozenset({"dhcp", "host-local", "static", "whereabouts"})
LOOK_SECONDS: Final = 10.0
"""Interval for checking whether newer binaries were installed."""
_LOOK_PATIENCE: Final = 0.1
BINARY: Final = "binary"
"""Value of `served_by` for a binary whose path is not known, as upstream's daemon ran it."""

Mode: TypeAlias = Literal["off", "fallback", "prefer"]


class Plugins:
    """The plugins of the node, built in and binaries.

    `off`: binaries only. `fallback`: the built-in if there is no binary. `prefer`: the built-in if there is one that
    supports all of the configuration, and no newer binary. `excepted`: types for which ADD uses only the binary.
    """

    def __init__(
        self,
        programs: Programs,
        mode: Mode,
        *,
        excepted: Collection[str] = (),
        host_root: Path = Path("/"),
        tools: HostTools | None = None,
        leases: Leases | None = None,
        addresses: AddressBook | None = None,
        timeout: float = deadlines.DELEGATE_SECONDS,
        observe: Observe | None = None,
        modules: Mapping[str, Module] | None = None,
    ) -> None:
        """`host_root`, `tools`, `leases`, `addresses`, `timeout`: as `Builtin`.

        `modules`: built-ins besides PLUGINS, or instead.
        """
        self._programs = programs
        self._mode: Mode = mode
        self._excepted = frozenset(excepted)
        self._observe = observe
        self._newer: Mapping[str, str] = {}
        """Why a built-in steps aside for a binary, by type."""
        self._looked = -LOOK_SECONDS
        self._builtins = {
            name: Builtin(
                name,
                host_root,
                plugin_for=self.recorded,
                tools=tools,
                leases=leases,
                addresses=addresses,
                timeout=timeout,
                module=(modules or {}).get(name),
                observe=observe,
            )
            for name in {*PLUGINS, *(modules or {})}
        }

    def builtin(self, plugin_type: str) -> Builtin | None:
        """Return the built-in of the type in any mode; None if there is none."""
        return self._builtins.get(plugin_type)

    def programs(self, calls: Iterable[tuple[str, Invocation]]) -> Mapping[str, Program]:
        """Return, by type, the binaries that decide which implementation runs these calls. Raises IoFailureError."""
        if self._mode == "prefer" and time.monotonic() - self._looked > LOOK_SECONDS:
            # Not in this thread: a disk that hangs holds up no network of built-ins.
            self._looked = time.monotonic()
            with contextlib.suppress(CniError, OSError):
                threads.start(self._look, name="plugins").result(_LOOK_PATIENCE)
        return {name: self._programs.locate(name) for name in {name for call in calls for name in self._needed(*call)}}

    def _needed(self, plugin_type: str, call: Invocation) -> Iterator[str]:
        """Yield the types whose binary matters. If the built-in certainly runs a call, the disk need not be read."""
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

    def of(self, plugin_type: str, call: Invocation, programs: Mapping[str, Program] | None = None) -> Plugin:
        """Choose the implementation for the ADD of a new attachment.

        `programs`: the result of `programs()`; None: find them now. Raises IoFailureError.
        """
        mode = self._mode_of(plugin_type)
        builtin = self._builtins.get(plugin_type) if mode != "off" else None
        if builtin and mode == "prefer" and not builtin.unsupported(call):
            return builtin
        program = self._programs.locate(plugin_type) if programs is None else programs.get(plugin_type, Program())
        if builtin and not program.path:
            # If its configuration has an unsupported key, it says so.
            return builtin
        return self._binary(plugin_type, program, None if programs is None else lambda name: self._any(name, programs))

    def unknown(self, call: Invocation) -> str:
        """Return the part of a plugin's configuration that the built-in does not support; empty if it supports all."""
        plugin_type = gojson.get_str(call.fields, "type") or ""
        builtin = self._builtins.get(plugin_type) if self._mode_of(plugin_type) == "prefer" else None
        found = builtin.unsupported(call) if builtin else ""
        return "" if isinstance(found, LeftToBinary) else found

    def _any(self, plugin_type: str, programs: Mapping[str, Program]) -> Program:
        """Return the program of a plugin that a binary calls: its own binary."""
        program = programs.get(plugin_type, Program())
        is_built_in = plugin_type in self._builtins.keys() - _NO_PROGRAM and self._mode_of(plugin_type) != "off"
        return Program(BUILT_IN) if is_built_in and not program.path else program

    def servers(self, plugin_type: str, call: Invocation, programs: Mapping[str, Program]) -> Mapping[str, str]:
        """Return the implementation (`Plugin.place`) of the plugin, and of those that a built-in calls, by type.

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
        """Return the implementation that `call.served_by` names; if it names none, choose as `of` does."""
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
        if builtin and (served_by or preferred) == BUILT_IN:
            found = builtin.unsupported(call)
            is_supported = not found or (bool(served_by) and isinstance(found, LeftToBinary))
            if is_supported or not self._programs.locate(plugin_type).path:
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
        if plugin_type in self._excepted:
            return "off"
        return "fallback" if self._mode == "prefer" and plugin_type in self._newer else self._mode

    def _look(self) -> None:
        """Look for binaries that are newer than the built-ins. Raises IoFailureError."""
        builds = self._programs.builds(self._builtins.keys() - self._excepted)
        found = {name: text for name, build in builds.items() if (text := newer(name, build))}
        for name, text in found.items():
            if self._newer.get(name) != text:
                log.warning("builtinPlugins is prefer, but the binary of %s runs for new networks: %s", name, text)
        self._newer = found

    def log_binaries(self, bin_dir: str) -> None:
        """Log which built-ins run instead of a binary, and which excepted types lack one. Raises IoFailureError."""
        if self._mode == "prefer":
            self._looked = time.monotonic()
            self._look()
        preferred = [name for name in PLUGINS if self._mode_of(name) == "prefer"]
        if shadowed := sorted(filter(None, (self._programs.locate(name).path for name in preferred))):
            why = "these binaries run only for what the built-in does not support, and networks that they have attached"
            log.info("builtinPlugins is prefer: %s: %s", why, ", ".join(shadowed))
        if missing := sorted(name for name in self._excepted if not self._programs.locate(name).path):
            problem = f"no binary in {bin_dir}, networks of these types can't be attached: {', '.join(missing)}"
            log.warning("builtinPluginsExcept: %s", problem)


def _named(value: Mapping[str, Any], depth: int = 1) -> Iterator[str]:
    """Yield the types of other plugins that a configuration names, in any place where a plugin may read them."""
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
        raise InvalidNetworkConfigError(problem, config.name, remedy=names.NETWORK_NAME_ADVICE)
    if problem := names.ifname_problem(attachment.ifname):
        raise InvalidEnvironmentError(problem, attachment.ifname, origin=Origin.ANNOTATION)
    # The reference fails after every plugin has run.
    if problem := name_problem(config.name, sandbox.container_id, attachment.ifname):
        raise InvalidNetworkConfigError(
            problem,
            f"the result's file is named <network>-<container>-<interface>, {FILE_NAME_MAX_BYTES} bytes at most",
            remedy="shorten 'name' in the network's configuration",
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
                f'ipam.type "{plugin.ipam_type}" is not an IPAM plugin, and would call itself for an address',
                remedy="name an IPAM plugin in the network's configuration, such as host-local",
            )
    if not config.plugins:
        raise InvalidNetworkConfigError("no plugins in list", remedy="name one in the configuration's 'plugins'")
