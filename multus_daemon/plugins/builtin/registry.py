"""The list of built-in plugins, and `Builtin`, which checks and runs a call inside the daemon."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from multus_daemon import deadlines
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.contract import COMMON_KEYS, Call, LeftToBinary, Module, called_by, unknown_key
from multus_daemon.plugins.find import Build
from multus_daemon.plugins.plugin import NO_NETNS, Aspect, HostTools, Observe, Plugin
from multus_daemon.runtime import deadline
from multus_daemon.runtime.threads import NoThreadError
from multus_daemon.spec.attachment import BUILT_IN, Difference, Invocation
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    InternalError,
    InvalidNetworkConfigError,
    IoFailureError,
    Origin,
    TryAgainLaterError,
    UnsupportedFieldError,
)
from multus_daemon.spec.cni.result import Result, from_object, in_version

if TYPE_CHECKING:
    from multus_daemon.plugins.leases import Leases
    from multus_daemon.spec.ports import AddressBook

log = logging.getLogger(__name__)

# Imported at first use: the command `host-local` must not load the netlink code.
PLUGINS: Final[Mapping[str, str]] = MappingProxyType(
    {
        name: f"multus_daemon.plugins.builtin.{name.replace('-', '_')}"
        for name in (
            *("bandwidth", "bridge", "dhcp", "dummy", "firewall", "flannel", "host-device", "host-local", "ipvlan"),
            *("loopback", "macvlan", "passthru", "portmap", "ptp", "sbr", "static", "tap", "tuning", "vlan", "vrf"),
            "whereabouts",
        )
    }
)
_REFERENCE: Final = ("github.com/containernetworking/plugins", "v1.10.0")
MODELS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        **{name: _REFERENCE for name in PLUGINS if name != "passthru"},
        "whereabouts": ("github.com/k8snetworkplumbingwg/whereabouts", "v0.9.4"),
        "flannel": ("github.com/flannel-io/cni-plugin", "v1.9.1-flannel1"),
    }
)
"""Go module and release of the plugin that each built-in follows; passthru follows none."""
_RELEASE: Final = re.compile(r"v(\d+)\.(\d+)\.(\d+)(?:-flannel(\d+))?")
# An ADD waits one or two seconds for duplicate address detection of IPv6 on a real segment. The networks of a pod wait
# at the same time if each has a thread. whereabouts waits for the API server.
_WAITING: Final = frozenset({"dhcp", "host-device", "ipvlan", "macvlan", "vlan", "whereabouts"})


def newer(plugin_type: str, build: Build) -> str:
    """Return a text that says that a binary is newer than the built-in; empty if it is not, or not known to be."""
    module, model = MODELS.get(plugin_type, ("", ""))
    found, known = _RELEASE.match(build.version), _RELEASE.match(model)
    if not found or not known or not f"{build.package}/".startswith(f"{module}/"):
        return ""
    is_later = [int(part or 0) for part in found.groups()] > [int(part or 0) for part in known.groups()]
    return f"{build.version} is newer than {model}, which the built-in follows" if is_later else ""


class Builtin(Plugin):
    """A plugin of PLUGINS. One object serves concurrent calls."""

    def __init__(
        self,
        plugin_type: str,
        host_root: Path,
        *,
        plugin_for: Callable[[str, Invocation], Plugin] | None = None,
        tools: HostTools | None = None,
        leases: Leases | None = None,
        addresses: AddressBook | None = None,
        timeout: float = deadlines.DELEGATE_SECONDS,
        module: Module | None = None,
        observe: Observe | None = None,
    ) -> None:
        """`host_root`: root of the host's files; `timeout` of one call in seconds.

        `plugin_for` returns a plugin that this one calls, such as its IPAM plugin; None: always the built-in. `tools`:
        needed for firewall rules; `leases`: for dhcp; `addresses`: for whereabouts. `module`: None for that in PLUGINS.
        """
        super().__init__(plugin_type, BUILT_IN, observe)
        self.waits = plugin_type in _WAITING
        """True if an ADD may wait for seconds."""
        self._host_root = host_root
        # Errors show paths as the host has them. No error has a NUL.
        self._prefix = f"{host_root}/" if host_root != host_root.parent else "\0"
        self._plugin_for = plugin_for or self._sibling
        self._tools = tools
        self._leases = leases
        self._addresses = addresses
        self._timeout = timeout
        self._given = module

    def _sibling(self, plugin_type: str, call: Invocation) -> Plugin:
        return Builtin(
            plugin_type,
            self._host_root,
            tools=self._tools,
            leases=self._leases,
            addresses=self._addresses,
            timeout=self._timeout,
        )

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

        Empty also for a malformed configuration, which the verbs refuse.
        """
        try:
            return self._read(call)[1]
        except CniError:
            return ""

    def refusal(self, call: Invocation) -> CniError | None:
        """Return the error with which ADD would refuse the configuration; None if it would not."""
        try:
            known, unsupported = self._read(call)
            self._refuse(known, unsupported)
            self._optional("read", known)
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
        """Implements `Plugin.keeps`. False for a configuration that can't be read: no ADD with it made anything."""
        try:
            return bool(self._optional("keeps", self._read(call)[0], default=True))
        except IoFailureError:
            raise
        except CniError:
            return False

    def foresee(self, call: Invocation) -> str:
        """Return what an ADD would choose now, empty if the plugin does not say. Raises CniError if it would fail."""
        return str(self._optional("foresee", self._read(call)[0], default=""))

    def sets(self, call: Invocation) -> frozenset[Aspect]:
        """Implements `Plugin.sets`."""
        found: frozenset[Aspect] = self._optional("sets", call.fields, default=frozenset())
        return found

    def _run(self, call: Invocation, netns: PodNetns) -> Result:
        """Check the configuration and run the verb.

        Raises CniError: those of `conf.checked`, InvalidNetworkConfigError for a type without a built-in,
        UnsupportedFieldError for a key that the plugin does not support, TryAgainLaterError after the timeout, and the
        plugin's own. Any other exception of the plugin is chained to an InternalError (999) with its text.
        """
        with self._guarded(call.verb):
            known, unsupported = self._read(call, netns)
            self._refuse(known, unsupported)
            match call.verb:
                case "ADD":
                    return in_version(self._module.add(known, netns), known.cni_version)
                case "DEL":
                    self._module.delete(known, netns)
                case "CHECK":
                    self._check(known, netns)
                case "STATUS":
                    self._optional("status", known)
                case _:
                    # GC: the reference plugins have no handler, which is success.
                    pass
            return Result()

    def _check(self, call: Call, netns: PodNetns) -> None:
        own, compare = (getattr(self._module, name, None) for name in ("check", "differences"))
        if own is None and compare is not None:
            from multus_daemon.plugins.builtin import restore  # the kernel: a program does without

            restore.check(call, netns, compare)
        elif own is not None:
            own(call, netns)

    def differences(
        self, call: Invocation, netns: PodNetns, not_compared: frozenset[Aspect] = frozenset()
    ) -> list[Difference] | None:
        """Implements `Plugin.differences`; returns None unless a built-in ran the ADD. Raises as the verbs do."""
        if call.served_by.get(self.type) != BUILT_IN:
            return None
        with self._guarded("comparison"):
            known, unsupported = self._read(call, netns)
            if unsupported and not isinstance(unsupported, LeftToBinary):
                raise self._not_supported(known, unsupported)
            known = replace(known, not_compared=not_compared)
            found: list[Difference] | None = self._optional("differences", known, netns, default=[])
        return found and [
            replace(item, repair=functools.partial(self._repair, item)) if item.repair else item for item in found
        ]

    def _repair(self, item: Difference) -> None:
        assert item.repair is not None
        with self._guarded("repair"):
            try:
                item.repair()
            except OSError as error:
                raise InternalError(f"the repair failed: {error.strerror or error}") from error

    def remove_rules(self, call: Invocation, netns: PodNetns) -> None:
        """Remove the rules that a DEL by the binary of `bridge` or `ptp` left behind. Raises CniError."""
        from multus_daemon.plugins.builtin import masquerade  # the kernel: a program does without

        with self._guarded("rules"):
            known, _ = self._read(call, netns)
            if known.tools is not None:
                for remove in masquerade.remove_link(known, netns):
                    remove()

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Limit the block's time, and turn every exception into a CniError with the host's paths."""
        try:
            with deadline.within(self._timeout):
                yield
        except CniError as error:
            if self._prefix not in str(error):
                raise
            texts = (error.msg, error.details, error.remedy)
            raise error.changed(*(text.replace(self._prefix, "/") for text in texts)) from error
        except NoThreadError as error:
            raise TryAgainLaterError(str(error), f'{BUILT_IN} "{self.type}", {what}', origin=Origin.NODE) from error
        except deadline.ExpiredError as error:
            raise TryAgainLaterError(
                f'plugin "{self.type}" did not end within {self._timeout:g} s and was ended',
                f"{BUILT_IN}, {what}",
                origin=Origin.NODE,
            ) from error
        except Exception as error:
            raise InternalError(str(error).replace(self._prefix, "/") or type(error).__name__) from error

    def _read(self, invocation: Invocation, netns: PodNetns | None = None) -> tuple[Call, str]:
        """Return the parsed call, and a part of its configuration that the plugin does not support; empty if none.

        `netns`: None if only the configuration is needed, not the previous result. Raises CniError.
        """

        def call(previous: Result | None, within: PodNetns, name: str, version: str) -> Call:
            host = (self._host_root, self._plugin_for, within, self._tools, self._leases, self._addresses)
            return Call(invocation, name, version, previous, *host)

        def checked() -> tuple[str, str, str]:
            name, version = conf.checked(invocation.verb, invocation.fields)
            unsupported = ""
            with contextlib.suppress(gojson.JsonError):
                unsupported = self._unsupported(call(None, NO_NETNS, name, version))
            return name, version, unsupported

        if self._addresses and self.type == "whereabouts" and invocation.verb == "ADD":
            self._addresses.ask()
        refusal = self._addresses.refusal if self._addresses else None
        key = (self._module, invocation.verb, self._tools is None, self._leases is None, refusal)
        name, version, unsupported = conf.once(invocation.fields, key, checked)
        previous = None if netns is None else _prev_result(invocation, name, version)
        return call(previous, netns or NO_NETNS, name, version), unsupported

    def _optional(self, name: str, *arguments: Any, default: Any = None) -> Any:
        """Call the function `name` of the module if it has one; else return `default`."""
        function = getattr(self._module, name, None)
        return function(*arguments) if function else default

    def _unsupported(self, call: Call) -> str:
        keys = getattr(self._module, "KEYS", None)
        unknown = "" if keys is None else unknown_key(call.fields, {*COMMON_KEYS, *keys})
        # It may be an UnknownKey, whose parts `multusctl validate` shows.
        found: str = unknown or self._optional("unsupported", call, default="")
        return found

    def _refuse(self, call: Call, found: str) -> None:
        """Raise UnsupportedFieldError for `found`; but only log it for a DEL and a GC, which do what they can."""
        if not found or isinstance(found, LeftToBinary):
            return
        if call.invocation.verb in ("DEL", "GC"):
            who = f"{call.invocation.verb} by the built-in {self.type}"
            log.warning("network %s: %s ignores %s, which it does not support", call.name, who, found)
            return
        raise self._not_supported(call, found)

    def _not_supported(self, call: Call, found: str) -> UnsupportedFieldError:
        return UnsupportedFieldError(
            f"{found} is not supported by the built-in {self.type}",
            f"network {call.name!r}",
            remedy=f"correct the network's configuration, or install the {self.type} binary in the CNI bin directory",
        )


def _prev_result(invocation: Invocation, name: str, version: str) -> Result | None:
    """Return the previous result; for a DEL the result of the ADD. Raises DecodingFailureError for an ADD and a CHECK.

    A DEL ignores a result that cannot be parsed, as the reference plugins do: if it failed, resources would leak.
    """
    if (known := invocation.prev_result or invocation.recorded) is not None:
        return known
    try:
        fields = gojson.get_object(invocation.fields, "prevResult")
        return None if fields is None else from_object(fields, version)
    except (gojson.JsonError, CniError) as error:
        if invocation.verb not in ("ADD", "CHECK"):
            log.warning("network %s: %s continues without prevResult: %s", name, invocation.verb, error)
            return None
        raise DecodingFailureError(f"could not parse prevResult: {error}", origin=Origin.PLUGIN) from error
