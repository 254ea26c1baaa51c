"""Chooses how a plugin runs: its binary, or the built-in of the same name.

A built-in that does not know all that a configuration asks for leaves the call to the binary, if there is one. CHECK
and DEL are done by the one that did the ADD, whatever has been set or installed since; only `off` means never, and who
is not to be had any more is replaced by the other. A type can be excepted: its binary serves it as with `off`, and the
built-in only checks and removes what it has made itself. After a DEL of the reference `bridge` or `ptp` that did not
find the interface as it was made, the rules that it leaves are removed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

from multus_daemon.kernel.ops import PodNetns
from multus_daemon.plugins import formats, recursion
from multus_daemon.plugins.builtin.runner import BuiltinRunner
from multus_daemon.plugins.find import PluginNotFoundError
from multus_daemon.plugins.plugin import BinaryRunner, Program
from multus_daemon.spec.attachment import BUILT_IN, Invocation
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, UnsupportedFieldError
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.netconf.primary import OWN_TYPES

log = logging.getLogger(__name__)

# They ask the interface which addresses they masquerade, so a DEL that does not find them leaves the rules behind. Each
# DEL from the spool does, as the runtime has removed the namespace by then; one that is repeated because the first was
# killed, with the daemon, between interface and rules; and one for an interface whose address is a guest's by now.
_MASQUERADING: Final = frozenset({"bridge", "ptp"})
_DELEGATING: Final = "flannel"
# The built-ins refuse what the reference plugins of these names refuse (`tests/netns/test_malformed.py`).
_READ_ALIKE: Final = frozenset({"bridge", "host-local", "macvlan", "ptp", "static", "tuning"})

# They are about what an ADD has made.
_FOLLOWING: Final = frozenset({"CHECK", "DEL"})
_NO_PROGRAM: Final = Program()
_TYPES_DEPTH: Final = 4
"""Levels of a plugin's configuration in which another plugin can be named."""
BINARY: Final = "binary"
"""What `served_by` says for a binary of which no more is known: an upstream daemon ran it."""

Mode: TypeAlias = Literal["off", "fallback", "prefer"]

Observe: TypeAlias = Callable[[str, str, str, float], None]
"""Called after each run: plugin type, verb, outcome (`success`, a CNI error code, `cancelled` or `crash`), seconds."""


def observe_nothing(plugin_type: str, verb: str, outcome: str, seconds: float) -> None:
    """The default observer."""


class Dispatcher:
    """The ChoosingRunner that the chain uses.

    `off`: binaries only. `fallback`: the built-in where there is no binary. `prefer`: the built-in where there is one
    that knows all of the configuration. `excepted`: types of which only the binary is to be had for an ADD.
    """

    def __init__(
        self,
        process: BinaryRunner,
        builtin: BuiltinRunner,
        mode: Mode,
        *,
        excepted: Collection[str] = (),
        observe: Observe = observe_nothing,
    ) -> None:
        self._process = process
        self._builtin = builtin
        self._mode: Mode = mode
        self._excepted = frozenset(excepted)
        self._observe = observe

    def locate(self, plugin_type: str) -> str:
        """As PluginRunner, of the one that would be chosen, for a configuration that both know."""
        match self._mode_of(plugin_type):
            case "off":
                return self._process.locate(plugin_type)
            case "fallback":
                return self._process.locate(plugin_type) or self._builtin.locate(plugin_type)
            case "prefer":
                return self._builtin.locate(plugin_type) or self._process.locate(plugin_type)

    def chosen(self, plugin_type: str, programs: Mapping[str, Program]) -> str:
        """See `ports.ChoosingRunner`."""
        mode = self._mode_of(plugin_type)
        built_in = self._builtin.locate(plugin_type) if mode != "off" else ""
        binary = programs.get(plugin_type, _NO_PROGRAM).path
        return built_in or binary if mode == "prefer" else binary or built_in

    def waits(self, plugin_type: str) -> bool:
        """See `ports.ChoosingRunner`."""
        return self._builtin.waits(plugin_type)

    def programs(self, calls: Iterable[tuple[str, Invocation]]) -> Mapping[str, Program]:
        """See `ports.ChoosingRunner`."""
        return {name: self._program(name) for name in {name for call in calls for name in self._needed(*call)}}

    def _needed(self, plugin_type: str, invocation: Invocation) -> Iterator[str]:
        """Yield the types whose binary counts: a look at the disk is saved for what built-ins do without doubt."""
        is_built_in = self._mode_of(plugin_type) == "prefer" and self._builtin.locate(plugin_type)
        if not is_built_in or self._builtin.unsupported(plugin_type, invocation):
            yield plugin_type
            yield from _named(invocation.fields)
            return
        # For a configuration that cannot be read no binary counts.
        with contextlib.suppress(CniError):
            for name, called in self._builtin.called_by(plugin_type, invocation).items():
                if name != plugin_type:
                    yield from self._needed(name, called)

    def _program(self, plugin_type: str) -> Program:
        path = self._process.locate(plugin_type)
        try:
            if path:
                self._process.refuse_multus(plugin_type, path)
        except recursion.PluginIsMultusError as error:
            return Program(path, error)
        return Program(path)

    def choose(self, plugin_type: str, invocation: Invocation, programs: Mapping[str, Program]) -> Mapping[str, str]:
        """See `ports.ChoosingRunner`."""
        recursion.refuse_name(plugin_type)
        program = programs.get(plugin_type, _NO_PROGRAM)
        served_by = {plugin_type: self._server(plugin_type, invocation, lambda: program.path)}
        if served_by[plugin_type] == BUILT_IN:
            self._builtin.validate(plugin_type, invocation)
            for name, called in self._builtin.called_by(plugin_type, invocation).items():
                if name not in served_by:
                    served_by |= self.choose(name, called, programs)
        elif served_by[plugin_type]:
            if program.refusal:
                raise program.refusal
            _refuse_ipam(invocation, programs)
            self._validate(plugin_type, invocation)
        return served_by

    def _validate(self, plugin_type: str, invocation: Invocation) -> None:
        """Raise CniError for what a binary is certain to refuse, it or the IPAM plugin that it will call.

        A key that the built-in does not know may be of a newer binary, to which it may allow what else is refused; one
        that not every version knows, an older binary passes over.
        """
        fields = invocation.fields
        formats.validate(plugin_type, fields)
        if plugin_type not in _READ_ALIKE or not formats.is_of_every_version(plugin_type, fields):
            return
        if self._builtin.unsupported(plugin_type, invocation):
            return
        self._builtin.validate(plugin_type, invocation)
        for name, called in self._builtin.called_by(plugin_type, invocation).items():
            if name != plugin_type:
                self._validate(name, called)

    def refuses(self, plugin_type: str, invocation: Invocation) -> bool:
        """See `ports.ChoosingRunner`."""
        if self._is_multus(plugin_type):
            return True
        try:
            formats.validate(plugin_type, invocation.fields)
            if not self._builtin.locate(plugin_type):
                return False
            self._builtin.validate(plugin_type, invocation)
            called = self._builtin.called_by(plugin_type, invocation)
        except UnsupportedFieldError:
            return False
        except CniError:
            return True
        return any(self.refuses(name, one) for name, one in called.items() if name != plugin_type)

    def kept(self, plugin_type: str, invocation: Invocation) -> str:
        """See `ports.ChoosingRunner`."""
        return "" if self._is_multus(plugin_type) else self._builtin.kept(plugin_type, invocation)

    def _is_multus(self, plugin_type: str) -> bool:
        return plugin_type in OWN_TYPES or self._program(plugin_type).refusal is not None

    def _server(self, plugin_type: str, invocation: Invocation, locate: Callable[[], str]) -> str:
        """Return who serves what is attached anew; empty if there is neither. `locate`: the binary, empty for none."""
        mode = self._mode_of(plugin_type)
        built_in = self._builtin.locate(plugin_type) if mode != "off" else ""
        if built_in and mode == "prefer":
            unsupported = self._builtin.unsupported(plugin_type, invocation)
            if not unsupported:
                return built_in
            # Without a binary the built-in says what is missing.
            if binary := locate():
                # Without the value, which may be a password.
                key = unsupported.partition(":")[0]
                log.debug("%s of %s is left to %s: %s", invocation.verb, plugin_type, binary, key)
                return binary
            return built_in
        return locate() or built_in

    def run(self, plugin_type: str, invocation: Invocation, netns: PodNetns) -> Result:
        """As PluginRunner. Raises PluginNotFoundError where neither has it."""
        outcome = "crash"
        began = time.monotonic()
        try:
            if invocation.verb in _FOLLOWING:
                made = self._follow(plugin_type, invocation, netns)
            elif (where := self._where(plugin_type, invocation)) == BUILT_IN:
                made = self._builtin.run(plugin_type, invocation, netns)
            else:
                made = self._process.run(plugin_type, invocation, path=where)
            outcome = "success"
            return made
        except CniError as error:
            outcome = str(error.code)
            raise
        except BaseException as error:
            outcome = "crash" if isinstance(error, Exception) else "cancelled"
            raise
        finally:
            self._observe(plugin_type, invocation.verb, outcome, time.monotonic() - began)

    def _where(self, plugin_type: str, invocation: Invocation) -> str:
        """Return who was chosen for the ADD; for a verb about no container, who would be."""
        return invocation.served_by.get(plugin_type) or self._server(
            plugin_type, invocation, lambda: self._process.locate(plugin_type)
        )

    def shadowed(self, plugin_types: Iterable[str]) -> dict[str, str]:
        """Those of the types that a built-in serves though there is a binary, with its path. May touch the disk."""
        preferred = [name for name in plugin_types if self._mode_of(name) == "prefer" and self._builtin.locate(name)]
        found = {name: self._process.locate(name) for name in preferred}
        return {name: path for name, path in found.items() if path}

    def _mode_of(self, plugin_type: str) -> Mode:
        """The mode for what is attached anew."""
        return "off" if plugin_type in self._excepted else self._mode

    def _follow(self, plugin_type: str, invocation: Invocation, netns: PodNetns) -> Result:
        """By the one that did the ADD; where that is not to be had any more, by the other."""
        if self._follows_builtin(plugin_type, invocation):
            return self._builtin.run(plugin_type, invocation, netns)
        mode = self._mode_of(plugin_type)
        masquerading = _masquerading(plugin_type, invocation) if invocation.verb == "DEL" and mode != "off" else None
        had_addresses = masquerading is not None and _has_addresses(invocation, netns)
        try:
            made = self._process.run(plugin_type, invocation)
        except PluginNotFoundError:
            # Not looked up first: the search is the runner's, and the file could go in between.
            if mode == "off" or not self._builtin.locate(plugin_type):
                raise
            if invocation.served_by.get(plugin_type, "") not in ("", BUILT_IN):
                _log_replaced(plugin_type, invocation, BUILT_IN)
            return self._builtin.run(plugin_type, invocation, netns)
        if masquerading is not None and not (had_addresses and netns.exists):
            try:
                self._builtin.remove_rules(masquerading, netns)
            except CniError as error:
                raise error.with_context(f"rules that the binary of {plugin_type} has left") from error
        return made

    def _follows_builtin(self, plugin_type: str, invocation: Invocation) -> bool:
        added_by = invocation.served_by.get(plugin_type, "")
        if self._mode == "off" or not self._builtin.locate(plugin_type):
            if added_by == BUILT_IN:
                _log_replaced(plugin_type, invocation, BINARY)
            return False
        preferred = BUILT_IN if self._mode_of(plugin_type) == "prefer" else BINARY
        if (added_by or preferred) != BUILT_IN:
            return False
        unsupported = self._builtin.unsupported(plugin_type, invocation)
        # Without a binary the built-in says what is missing, or does the DEL.
        return not (unsupported and self._process.locate(plugin_type))


def _named(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the types that a configuration names at any place where a plugin may look for one to call."""
    if isinstance(value, Mapping) and depth < _TYPES_DEPTH:
        plugin_type = gojson.get(value, "type")
        if isinstance(plugin_type, str) and plugin_type:
            yield plugin_type
        for item in value.values():
            yield from _named(item, depth + 1)


def _refuse_ipam(invocation: Invocation, programs: Mapping[str, Program]) -> None:
    """Raise PluginIsMultusError for the plugin that a binary will ask for addresses."""
    try:
        ipam_type = gojson.get_str(gojson.get_object(invocation.fields, "ipam") or {}, "type") or ""
    except gojson.JsonError:
        return
    recursion.refuse_name(ipam_type)
    if refusal := programs.get(ipam_type, _NO_PROGRAM).refusal:
        raise refusal


def _masquerading(plugin_type: str, invocation: Invocation) -> Invocation | None:
    """The invocation of the plugin that makes rules, itself or the one that it delegates to; None where none does."""
    try:
        fields = dict(invocation.fields)
        if plugin_type == _DELEGATING:
            # Unless it is said there, whether it masquerades was flanneld's choice at the time of the ADD.
            fields = {"ipMasq": True, **(gojson.get_object(fields, "delegate") or {})}
            fields |= {key: invocation.fields[key] for key in ("cniVersion", "name") if key in invocation.fields}
            plugin_type = fields.get("type", "bridge")
        makes_rules = gojson.get_bool(fields, "ipMasq") or gojson.get_bool(fields, "macspoofchk")
    except gojson.JsonError:
        return None
    return replace(invocation, fields=fields) if makes_rules and plugin_type in _MASQUERADING else None


def _has_addresses(invocation: Invocation, netns: PodNetns) -> bool:
    """Report whether the interface has the addresses that ADD gave it; True if its namespace cannot be entered."""
    if not netns.path:
        return False
    try:
        found = netns.addresses(invocation.ifname)
    except OSError:
        return True
    made = invocation.prev_result or invocation.recorded
    wanted = {ipaddress.ip_address(ip.ip) for ip in made.ips} if made else set()
    has = {item.ip for item in found or () if not item.ip.is_link_local}
    return wanted <= has if wanted else bool(has)


def _log_replaced(plugin_type: str, invocation: Invocation, other: str) -> None:
    log.warning(
        "container %s, interface %s: %s of %s by the %s, as what did the ADD (%s) is not to be had",
        invocation.container_id,
        invocation.ifname,
        invocation.verb,
        plugin_type,
        other,
        invocation.served_by[plugin_type],
    )
