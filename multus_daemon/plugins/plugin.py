"""Interfaces: `Plugin`, implemented by `Builtin` and `Binary`, and `HostTools`, which runs programs of the host."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.child import DeadlineExceededError
from multus_daemon.plugins.find import Build, PluginNotFoundError, Program
from multus_daemon.runtime import deadline, timeline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.attachment import Difference, Invocation, ToolExit
from multus_daemon.spec.cni.errors import CniError, InternalError, Origin, TryAgainLaterError
from multus_daemon.spec.cni.result import Result

if TYPE_CHECKING:
    from multus_daemon.metrics.declared import Outcome

NO_NETNS: Final = PodNetns("")
"""The namespace for verbs without a container (STATUS, GC); it is never opened."""

REFERENCE: Final = frozenset(
    {
        *("bridge", "dummy", "flannel", "host-device", "ipvlan", "loopback", "macvlan", "ptp", "tap", "vlan"),
        *("bandwidth", "firewall", "passthru", "portmap", "sbr", "tuning", "vrf"),
    }
)
"""Types of containernetworking/plugins that are not IPAM plugins, and pass their own configuration to `ipam.type`."""
IN_NETNS: Final = frozenset(
    {
        *("bond", "dummy", "host-device", "ib-sriov", "ipvlan", "loopback", "macvlan", "passthru", "sbr", "sriov"),
        *("static", "tap", "vlan", "vrf"),
    }
)
"""Types that leave nothing but the pod's interface: all that they make ends with the interface or the namespace.

(An address is reserved by their IPAM plugin.)
"""
_NEEDING_NETNS: Final = frozenset({"sbr", "vrf"})
# A device comes back when its namespace goes.
_ONLY_IN_NETNS: Final = frozenset({"rdma"})
# They read their configuration, or ask their own daemon, before they change anything. So does their DEL.
_ASKING_FIRST: Final = frozenset({"bandwidth", "bridge", "firewall", "portmap", "ptp", "rdma"})
# Its agent, or the daemon, gives back the lease of an ADD that failed. The DEL of the agent fails only without it.
_IN_MEMORY: Final = "dhcp"
# Its files say whether it has given an address, whatever its configuration is now.
_ON_FILE: Final = "host-local"
_WITH_DELEGATE: Final = "flannel"
# Codes of the CNI SPEC that refuse the call itself: version, field, environment, decoding, configuration.
_REFUSALS: Final = frozenset({1, 2, 4, 6, 7})
_FAULTS_OF_INPUT: Final = _REFUSALS | {3, 8}
_CAUSES_MAX: Final = 16

Aspect: TypeAlias = Literal["addresses", "mtu"]
"""A property of a pod's interface that a later plugin of the list may change; `addresses` includes the routes."""

Observe: TypeAlias = Callable[[str, str, "Outcome", float], None]
"""Called after each run: plugin type, verb, outcome, seconds."""


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome that metrics show for `error` and its causes. Call it in the context that raised it."""
    if isinstance(error, Interrupted):
        return "cancelled" if deadline.current().stopped else "timeout"
    if not isinstance(error, Exception):
        return "cancelled"
    if isinstance(error, CniError) and error.code in _FAULTS_OF_INPUT:
        return "refused"
    if isinstance(error, CniError) and error.code == TryAgainLaterError.default_code:
        cause: BaseException | None = error
        for _ in range(_CAUSES_MAX):
            if isinstance(cause, TimeoutError | DeadlineExceededError):
                return "timeout"
            cause = cause.__cause__ if cause else None
    return "error"


class NothingLeftError(CniError):
    """A DEL failed, but nothing of the network is left that a later DEL could free (`Plugin.may_have_left`)."""


class ResultLeftError(CniError):
    """A DEL succeeded, but the cached result cannot be removed."""


class ToolNotFoundError(InternalError, origin=Origin.NODE):
    """The host has no such program; the message names the program and the directories."""


@dataclass(slots=True)
class Progress:
    """Where the ADD of an attachment failed; its undo needs this."""

    failed_at: int | None = None
    """Position of the plugin whose ADD failed; the plugins behind it have never run."""
    failure: str = ""
    """The message of that plugin."""


class Plugin(ABC):
    """A plugin of one type: the built-in or the binary, as chosen for it. Threads may share it.

    A `call` contains its verb. `netns` is the network namespace of the call, opened by the calling thread.
    """

    def __init__(self, plugin_type: str, place: str, observe: Observe | None = None) -> None:
        self.type = plugin_type
        self.place = place
        """BUILT_IN or the path of the binary, as `Attachment.served_by` has it; empty if there is no binary."""
        self.needs_netns = plugin_type in _NEEDING_NETNS
        """True if its DEL fails without the namespace. That of sbr leaves a file at the path, which fails others."""
        self.calls_ipam = plugin_type != _WITH_DELEGATE
        """True if `ipam.type` is a plugin that this one calls, and not its delegate."""
        self._observe = observe

    def run(self, call: Invocation, netns: PodNetns) -> Result:
        """Run the verb of the call, and pass its outcome to `observe`.

        Returns the result of an ADD, as the configuration's version can express it, and an empty result for other
        verbs. Raises CniError: the plugin's own, or one that says why it did not run. Each run has a deadline; when
        interrupted, it first ends the processes that it started.
        """
        how: Outcome = "error"
        shown = "crash"
        began = time.monotonic()
        try:
            result = self._run(call, netns)
            how = shown = "success"
            return result
        except BaseException as error:
            how = outcome_of(error)
            shown = str(error.code) if isinstance(error, CniError) else "crash" if isinstance(error, Exception) else how
            if isinstance(error, CniError) and error.origin is Origin.PLUGIN:
                error.where = error.where or f'plugin "{self.type}" ({self.place})'.removesuffix(" ()")
            raise
        finally:
            seconds = time.monotonic() - began
            if self._observe:
                self._observe(self.type, call.verb, how, seconds)
            timeline.note(f"plugin {self.type}: {call.verb} {shown}", seconds)

    @abstractmethod
    def _run(self, call: Invocation, netns: PodNetns) -> Result:
        """Run the verb as `run` describes, without reporting the outcome."""

    @abstractmethod
    def differences(
        self, call: Invocation, netns: PodNetns, not_compared: frozenset[Aspect] = frozenset()
    ) -> list[Difference] | None:
        """Compare the kernel with the recorded result, which is `call.prev_result`; the verb of `call` is DEL.

        `not_compared`: what later plugins of the list may have set. Returns None if only the plugin's CHECK can
        compare. A `Difference.repair` may raise CniError, and has its own deadline. Raises CniError.
        """

    @abstractmethod
    def refusal(self, call: Invocation) -> CniError | None:
        """Return the error with which an ADD of the call certainly fails; None if it may succeed. Runs nothing."""

    @abstractmethod
    def called_by(self, call: Invocation) -> Mapping[str, Invocation]:
        """Return the calls of other plugins that an ADD makes inside the daemon, by type. Raises CniError."""

    @abstractmethod
    def keeps(self, call: Invocation) -> bool:
        """Return True if the plugin may hold something for the container, such as a lease. Raises IoFailureError."""

    def sets(self, call: Invocation) -> frozenset[Aspect]:
        """Return the properties of the pod's interface that the plugin sets after earlier plugins of the list did."""
        return frozenset()

    def may_have_left(
        self, call: Invocation, error: CniError, position: int, progress: Progress, *, is_added: bool, has_netns: bool
    ) -> bool:
        """Return True if the plugin may have left something besides its interface that a later DEL could free.

        Each DEL gets the configuration of the ADD, and a namespace that is gone does not come back. So there is nothing
        to free

        - if the ADD did not get as far as this plugin;
        - of host-local, if it has no file for a reserved address;
        - if the plugin refuses the call, and no ADD has succeeded: it refused the ADD too, and refuses each later DEL;
        - of dhcp, if no ADD has succeeded;
        - of a type that makes or moves something only in the pod's namespace, once that or its interface is gone;
        - if ADD and DEL failed with the same error, and the plugin is known to change nothing before that step;
        - if flannel has saved no delegate, tuning no attributes, bridge, portmap and ptp were to make no rules, or
          bandwidth no ifb link (`keeps`).

        Rules of firewall, ifb devices of bandwidth, addresses of other IPAM plugins and whatever an unknown
        plugin makes on the host may be left. `error`: of the DEL `call`; `position` and `progress`: of the plugin in
        the attachment, and of its ADD; `is_added`: the attachment has a result. Raises IoFailureError.
        """
        failed_at = progress.failed_at
        if failed_at is not None and position > failed_at:
            return False
        if self.type == _ON_FILE:
            return self.keeps(call)
        has_passed = is_added or (failed_at is not None and position < failed_at)
        # A program that is missing was there when the ADD began.
        is_refused = error.code in _REFUSALS and not isinstance(error, PluginNotFoundError)
        if not has_passed and (is_refused or self.type == _IN_MEMORY):
            return False
        if self.type in IN_NETNS or (self.type in _ONLY_IN_NETNS and not has_netns):
            return False
        if self.type in _ASKING_FIRST and position == failed_at and error.msg == progress.failure:
            return False
        return self.keeps(call)


class Programs(Protocol):
    """Runs plugin binaries: `ProcessRunner`. `validate` has one that runs nothing."""

    def locate(self, plugin_type: str) -> Program:
        """Find the program of a plugin. Raises IoFailureError."""

    def builds(self, types: Collection[str]) -> Mapping[str, Build]:
        """Return the build information of the plugins that there are, by type. Raises IoFailureError."""

    def run(self, plugin_type: str, call: Invocation, path: str = "") -> bytes:
        """Return the stdout of the plugin; `path` is the path from `locate`, else `run` searches. Raises CniError."""


class HostTools(Protocol):
    """Runs programs of the host, such as `nft`, in the host's file system and network namespace."""

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Run `tool`, searched by its name in the host's directories of programs, to its end.

        Raises ToolNotFoundError, another CniError if it cannot be started, does not end in time or prints too much.
        When interrupted it first ends the program.
        """
