"""The built-in plugins, and `Builtin`, which checks a call as every CNI plugin does and runs it in this process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.contract import Call, Module, called_by
from multus_daemon.plugins.plugin import NO_NETNS, Aspect, Difference, HostTools, Observe, Plugin
from multus_daemon.runtime import deadline
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.spec.attachment import BUILT_IN, Invocation
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InternalError,
    InvalidNetworkConfigError,
    IoFailureError,
    TryAgainLaterError,
    UnsupportedFieldError,
    from_code,
)
from multus_daemon.spec.cni.result import Result, from_object, in_version

log = logging.getLogger(__name__)

# Imported at first use: the command `host-local` must not load the netlink code.
PLUGINS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bridge": "multus_daemon.plugins.builtin.bridge",
        "flannel": "multus_daemon.plugins.builtin.flannel",
        "host-local": "multus_daemon.plugins.builtin.host_local",
        "loopback": "multus_daemon.plugins.builtin.loopback",
        "macvlan": "multus_daemon.plugins.builtin.macvlan",
        "passthru": "multus_daemon.plugins.builtin.passthru",
        "ptp": "multus_daemon.plugins.builtin.ptp",
        "static": "multus_daemon.plugins.builtin.static",
        "tuning": "multus_daemon.plugins.builtin.tuning",
    }
)
# An ADD waits one or two seconds for duplicate address detection of IPv6 on a real segment. The networks of a pod wait
# at the same time if each has a thread.
_WAITING: Final = frozenset({"macvlan"})


class Builtin(Plugin):
    """A plugin of PLUGINS, for many calls at a time."""

    def __init__(
        self,
        plugin_type: str,
        host_root: Path,
        *,
        plugin_for: Callable[[str, Invocation], Plugin] | None = None,
        tools: HostTools | None = None,
        timeout: float = deadlines.DELEGATE_SECONDS,
        module: Module | None = None,
        observe: Observe | None = None,
    ) -> None:
        """`host_root`: root of the host's files; `timeout` of one call in seconds.

        `plugin_for` returns the plugin that a call of this one calls, such as the IPAM plugin; None: the built-in.
        `tools` are needed for masquerading. `module`: that of PLUGINS if None.
        """
        super().__init__(plugin_type, BUILT_IN, observe)
        self.waits = plugin_type in _WAITING
        """True if an ADD may wait for seconds."""
        self._host_root = host_root
        # Errors show paths as the host has them. No error has a NUL.
        self._prefix = f"{host_root}/" if host_root != host_root.parent else "\0"
        self._plugin_for = plugin_for or self._sibling
        self._tools = tools
        self._timeout = timeout
        self._given = module

    def _sibling(self, plugin_type: str, call: Invocation) -> Plugin:
        return Builtin(plugin_type, self._host_root, tools=self._tools, timeout=self._timeout)

    @functools.cached_property
    def _module(self) -> Module:
        if self._given is not None:
            return self._given
        if self.type not in PLUGINS:
            raise InvalidNetworkConfigError(
                f'failed to find plugin "{self.type}" among the built-in ones',
                f"those are {', '.join(sorted(PLUGINS))}",
            )
        return cast(Module, importlib.import_module(PLUGINS[self.type]))

    # --- what the configuration says ---------------------------------------------------------------------------------

    def unsupported(self, call: Invocation) -> str:
        """Return a part of the configuration that the built-in does not support (`Module.unsupported`); empty if none.

        Empty also for a configuration that cannot be read, which the verbs refuse.
        """
        try:
            return self._read(call)[1]
        except CniError:
            return ""

    def refusal(self, call: Invocation) -> CniError | None:
        """Return the error with which ADD would refuse the configuration."""
        try:
            known, unsupported = self._read(call)
            if unsupported:
                self._refuse(known, unsupported)
            if validate := getattr(self._module, "validate", None):
                validate(known)
        except CniError as error:
            refusal = error.with_context(f'plugin "{self.type}"')
            refusal.__cause__ = error
            return refusal
        return None

    def called_by(self, call: Invocation) -> Mapping[str, Invocation]:
        """Return the calls of other plugins that an ADD makes, by type. Raises CniError."""
        called: Mapping[str, Invocation] = getattr(self._module, "called_by", called_by)(self._read(call)[0])
        return called

    def keeps(self, call: Invocation) -> bool:
        """Do the work of `Plugin.keeps`; one that cannot read its configuration has not come past it in any ADD."""
        try:
            known, _ = self._read(call)
            keeps = getattr(self._module, "keeps", None)
            return keeps is None or bool(keeps(known))
        except IoFailureError:
            raise
        except CniError:
            return False

    def sets(self, call: Invocation) -> frozenset[Aspect]:
        """Do the work of `Plugin.sets`."""
        sets = getattr(self._module, "sets", None)
        found: frozenset[Aspect] = sets(call.fields) if sets else frozenset()
        return found

    def _run(self, call: Invocation, netns: PodNetns) -> Result:
        """Check the configuration and run the verb.

        Raises CniError: those of `conf.checked`, InvalidNetworkConfigError for a type without a built-in,
        UnsupportedFieldError for a key that the plugin does not support, TryAgainLaterError after the timeout, and the
        plugin's own. Any other exception of the plugin is chained to an InternalError (999) with its text.
        """
        with self._guarded(call.verb):
            known, unsupported = self._read(call, netns)
            if unsupported:
                self._refuse(known, unsupported)
            match call.verb:
                case "ADD":
                    return in_version(self._module.add(known, netns), known.cni_version)
                case "DEL":
                    self._module.delete(known, netns)
                case "CHECK" if check := getattr(self._module, "check", None):
                    check(known, netns)
                case "STATUS" if status := getattr(self._module, "status", None):
                    status(known)
                case _:
                    # GC: the reference plugins have no handler, which is success.
                    pass
            return Result()

    def differences(
        self, call: Invocation, netns: PodNetns, not_compared: frozenset[Aspect] = frozenset()
    ) -> list[Difference] | None:
        """Do the work of `Plugin.differences`: None unless a built-in did the ADD. Raises as the verbs do."""
        if call.served_by.get(self.type) != BUILT_IN:
            return None
        compare = getattr(self._module, "differences", None)
        with self._guarded("comparison"):
            known, unsupported = self._read(call, netns)
            if unsupported:
                raise self._not_supported(known, unsupported)
            known = replace(known, not_compared=not_compared)
            found: list[Difference] | None = compare(known, netns) if compare else []
        return found and [
            replace(item, repair=functools.partial(self._repair, item.repair)) if item.repair else item
            for item in found
        ]

    def _repair(self, repair: Callable[[], object]) -> None:
        with self._guarded("repair"):
            repair()

    def remove_rules(self, call: Invocation, netns: PodNetns) -> None:
        """Remove the rules that a DEL by the binary of `bridge` or `ptp` left behind. Raises CniError."""
        from multus_daemon.plugins.builtin import masquerade  # the kernel: a program does without

        with self._guarded("rules"):
            known, _ = self._read(call, netns)
            if known.tools is not None:
                masquerade.remove_left(known, netns)

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Limit the block's time, and turn every error into a CniError, with paths as the host has them."""
        try:
            with deadline.within(self._timeout):
                yield
        except CniError as error:
            if self._prefix not in str(error):
                raise
            msg, details = (text.replace(self._prefix, "/") for text in (error.msg, error.details))
            raise from_code(error.code, msg, details) from error
        except NoThreadError as error:
            raise TryAgainLaterError(str(error), f'{BUILT_IN} "{self.type}", {what}') from error
        except deadline.ExpiredError as error:
            raise TryAgainLaterError(
                f'plugin "{self.type}" did not end within {self._timeout:g} s and was ended', f"{BUILT_IN}, {what}"
            ) from error
        except Exception as error:
            raise InternalError(str(error).replace(self._prefix, "/") or type(error).__name__) from error

    def _read(self, invocation: Invocation, netns: PodNetns | None = None) -> tuple[Call, str]:
        """Read a configuration once; return the call, and a part that the plugin does not support (`key: value`).

        `netns`: None to read only the configuration, without the previous result. Raises CniError.
        """
        module, verb, fields = self._module, invocation.verb, invocation.fields
        memory = fields.read if isinstance(fields, conf.PluginFields) else None
        key = (module.unsupported, verb, self._tools is None)
        if memory is not None and key in memory:
            name, version, unsupported = memory[key]
        else:
            config, unsupported = conf.checked(verb, fields), None
            name, version = config.name, config.cni_version
        previous = None if netns is None else _prev_result(invocation, name, version)
        netns = netns or NO_NETNS
        call = Call(invocation, name, version, previous, self._host_root, self._plugin_for, netns, self._tools)
        if unsupported is None:
            try:
                unsupported = module.unsupported(call)
            except gojson.JsonError:
                unsupported = ""
            if memory is not None:
                memory[key] = name, version, unsupported
        return call, unsupported

    def _refuse(self, call: Call, found: str) -> None:
        """Raise UnsupportedFieldError; but let a DEL and a GC do what they can: they are repeated."""
        if call.invocation.verb in ("DEL", "GC"):
            log.warning(
                "network %s: %s by the built-in %s, to which %s means nothing",
                call.name,
                call.invocation.verb,
                self.type,
                found,
            )
            return
        raise self._not_supported(call, found)

    def _not_supported(self, call: Call, found: str) -> UnsupportedFieldError:
        return UnsupportedFieldError(
            f"{found} is not supported by the built-in {self.type}",
            f"network {call.name!r}: correct the key, or install the binary of {self.type} in the CNI bin directory",
        )


def _prev_result(invocation: Invocation, name: str, version: str) -> Result | None:
    """Return the previous result; for a DEL the result of the ADD. Raises DecodingFailureError for an ADD and a CHECK.

    A DEL continues without a result that cannot be parsed: the reference plugins ignore it then, and a DEL that fails
    leaks what it should remove.
    """
    if (known := invocation.prev_result or invocation.recorded) is not None:
        return known
    try:
        fields = gojson.get_object(invocation.fields, "prevResult")
        return None if fields is None else from_object(fields, version)
    except (gojson.JsonError, CniError) as error:
        if invocation.verb not in ("ADD", "CHECK"):
            log.warning("network %s: %s goes on without prevResult: %s", name, invocation.verb, error)
            return None
        raise DecodingFailureError(f"could not parse prevResult: {error}") from error
