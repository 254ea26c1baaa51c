"""One CNI plugin, chosen once: `Builtin` or `Binary`. And the programs of the host that both need."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.find import PluginNotFoundError
from multus_daemon.runtime import timeline
from multus_daemon.spec.attachment import Invocation, ToolExit
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import Result

if TYPE_CHECKING:
    from multus_daemon.metrics.declared import Outcome

NO_NETNS: Final = PodNetns("")
"""For calls that are about no container; it is never opened."""

REFERENCE: Final = frozenset(
    {
        *("bridge", "dummy", "flannel", "host-device", "ipvlan", "loopback", "macvlan", "ptp", "tap", "vlan"),
        *("bandwidth", "firewall", "passthru", "portmap", "sbr", "tuning", "vrf"),
    }
)
"""Plugins of containernetworking/plugins, except for IPAM. They call `ipam.type` with the same configuration."""
IN_NETNS: Final = frozenset(
    {
        *("bond", "dummy", "host-device", "ib-sriov", "ipvlan", "loopback", "macvlan", "passthru", "sbr", "sriov"),
        *("static", "tap", "vlan", "vrf"),
    }
)
"""Types that leave nothing without their interface: what they make or move there goes with it, or with the namespace.

Of an address an IPAM plugin knows.
"""
_NEEDING_NETNS: Final = frozenset({"sbr", "vrf"})
# A device comes back when its namespace goes.
_ONLY_IN_NETNS: Final = frozenset({"rdma"})
# They read their configuration, or ask their own daemon, before they change anything. So does their DEL.
_ASKING_FIRST: Final = frozenset({"bandwidth", "bridge", "firewall", "portmap", "ptp", "rdma"})
# Its agent keeps leases in memory, and gives back that of an ADD that failed. Its DEL fails only without an agent.
_IN_MEMORY: Final = "dhcp"
# Its files say whether it has given an address, whatever its configuration is now.
_ON_FILE: Final = "host-local"
_WITH_DELEGATE: Final = "flannel"
# Codes of the CNI SPEC that refuse the call itself: version, field, environment, decoding, configuration.
_REFUSALS: Final = frozenset({1, 2, 4, 6, 7})

BY_POD: Final = ": a program in the pod did this"
"""The end of `Difference.text` for a difference by the pod."""

Aspect: TypeAlias = Literal["addresses", "mtu"]
"""Of a pod's interface; `addresses` includes the routes."""

Observe: TypeAlias = Callable[[str, str, "Outcome", float], None]
"""Called after each run: plugin type, verb, outcome, seconds."""


class NothingLeftError(CniError):
    """A DEL failed, and nothing of the network is left that a later DEL could free (`Plugin.may_have_left`)."""


class ResultLeftError(CniError):
    """A DEL succeeded, and its cached result cannot be removed."""


class ToolNotFoundError(LookupError):
    """The host has no such program; the message names the program and the directories."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between an attachment and its record."""

    text: str
    """What differs, for people; the network is not named."""
    repair: Callable[[], object] | None = field(default=None, compare=False)
    """Brings it back, in the thread that compared; raises CniError. None if no built-in can."""
    on_host: bool = False
    """True for something outside of the pod's namespace."""
    is_certain: bool = True
    """False if it could not be compared, or only a plugin's CHECK says so: some fail right after their own ADD."""
    by_pod: bool = False
    """True if only a program in the pod can have changed it."""


@dataclass(slots=True)
class Progress:
    """Where the ADD of an attachment failed, for its undo."""

    failed_at: int | None = None
    """Position of the plugin whose ADD failed; the plugins behind it have never run."""
    failure: str = ""
    """The message of that plugin."""


class Plugin(ABC):
    """A plugin of one type, by the implementation that was chosen for it. Threads may share it.

    A call names its verb, as CNI_COMMAND does. `netns` is the namespace of the call, opened by the calling thread.
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
        """Run the verb of the call, and report its outcome.

        Returns the result of an ADD, as the configuration's version can express it, and an empty result for other
        verbs. Raises CniError, the plugin's own or one about running it. Has its own deadline; when interrupted it
        first ends what it started.
        """
        how: Outcome = "error"
        shown = "crash"
        began = time.monotonic()
        try:
            result = self._run(call, netns)
            how = shown = "success"
            return result
        except BaseException as error:
            from multus_daemon.plugins import outcome  # asyncio and child processes: a program does without

            how = outcome.of(error)
            shown = str(error.code) if isinstance(error, CniError) else "crash" if isinstance(error, Exception) else how
            raise
        finally:
            seconds = time.monotonic() - began
            if self._observe:
                self._observe(self.type, call.verb, how, seconds)
            timeline.note(f"plugin {self.type}: {call.verb} {shown}", seconds)

    @abstractmethod
    def _run(self, call: Invocation, netns: PodNetns) -> Result:
        """Do the work of `run`."""

    @abstractmethod
    def differences(
        self, call: Invocation, netns: PodNetns, not_compared: frozenset[Aspect] = frozenset()
    ) -> list[Difference] | None:
        """Compare the kernel with the recorded result, the previous one of the call, whose verb is DEL.

        `not_compared`: what other plugins of the list may have set since. None if only a CHECK can tell. The repairs
        raise CniError, and have a deadline each. Raises CniError.
        """

    @abstractmethod
    def refusal(self, call: Invocation) -> CniError | None:
        """Return the error with which an ADD would certainly fail; the call's configuration decides. Runs nothing."""

    @abstractmethod
    def called_by(self, call: Invocation) -> Mapping[str, Invocation]:
        """Return the calls that an ADD makes of plugins in this process, by type. Raises CniError."""

    @abstractmethod
    def keeps(self, call: Invocation) -> bool:
        """Report whether the plugin may keep something on the node for the container. Raises IoFailureError."""

    def sets(self, call: Invocation) -> frozenset[Aspect]:
        """Return what the plugin sets in place of the one before it in the list."""
        return frozenset()

    def may_have_left(
        self, call: Invocation, error: CniError, position: int, progress: Progress, *, is_added: bool, has_netns: bool
    ) -> bool:
        """Return True if the plugin may have left something but an interface, and a later DEL could free it.

        What can be left decides. Each DEL gets the configuration of the ADD, and no namespace comes back. So there is
        nothing to free

        - if the ADD did not get as far as this plugin;
        - of host-local, if it has no file of an address;
        - if the plugin refuses the call, and no ADD has succeeded: it refused the ADD too, and refuses each later DEL;
        - of dhcp, if no ADD has succeeded;
        - of a type that makes or moves something only in the pod's namespace, once that or its interface is gone;
        - if ADD and DEL failed alike, and the plugin is known to change nothing before the step that failed;
        - if flannel has saved no delegate, tuning no attributes, or bridge and ptp were to make no rules (`keeps`).

        Rules of firewall and portmap, ifb devices of bandwidth, addresses of other IPAM plugins and whatever an unknown
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


@dataclass(frozen=True, slots=True)
class Program:
    """The file of a plugin."""

    path: str = ""
    """Empty if there is none."""
    refusal: CniError | None = field(default=None, compare=False)
    """Set if the file must not run: it is Multus itself."""


class Programs(Protocol):
    """Runs plugin binaries: `ProcessRunner`. `validate` has one that runs nothing."""

    def locate(self, plugin_type: str) -> str:
        """Return the path of the plugin, as plugins see it; empty if not found. Raises IoFailureError."""

    def refuse_multus(self, plugin_type: str, path: str) -> None:
        """Raise CniError if the file that `locate` found is a program of Multus. `run` checks the files it finds."""

    def run(self, plugin_type: str, call: Invocation, path: str = "") -> bytes:
        """Return the stdout of the plugin; `path` is the path from `locate`, else `run` searches. Raises CniError."""


class HostTools(Protocol):
    """Runs programs of the host, such as `nft`, in the host's file system and network namespace."""

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Run `tool`, searched by its name in the host's directories of programs, to its end.

        Raises ToolNotFoundError, and CniError if it cannot be started, does not end in time or prints too much. When
        interrupted it first ends the program.
        """
