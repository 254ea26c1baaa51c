"""Interfaces for running one CNI plugin, built-in or binary, and the programs of the host that built-ins use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.spec.attachment import Invocation, ToolExit
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.result import Result

NO_NETNS: Final = PodNetns("")
"""For calls that are about no container; it is never opened."""


BY_POD: Final = ": a program in the pod did this"
"""The end of `Difference.text` for a difference by the pod."""


class NothingLeftError(CniError):
    """A DEL failed, and nothing of the network is left that a later DEL could free (`leftover`)."""


class ResultLeftError(CniError):
    """A DEL succeeded, and its cached result cannot be removed."""


class ToolNotFoundError(LookupError):
    """The host has no such program; the message names the program and the directories."""


class PluginRunner(Protocol):
    """Runs one CNI plugin for one verb: `select.Dispatcher`, or built-ins only."""

    def run(self, plugin_type: str, invocation: Invocation, netns: PodNetns) -> Result:
        """Call the plugin in the namespace of `invocation`, which is `netns`.

        Returns the result of an ADD, as the configuration's version can express it, and an empty result for other
        verbs. Raises CniError, the plugin's own or one about running it. Has its own deadline; when interrupted it
        first ends what it started.
        """


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing of an attachment that is not as its ADD left it."""

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


@dataclass(frozen=True, slots=True)
class Program:
    """The file of a plugin."""

    path: str = ""
    """Empty if there is none."""
    refusal: CniError | None = field(default=None, compare=False)
    """Set if the file must not run: it is Multus itself."""


class BinaryRunner(Protocol):
    """Runs plugin binaries. `validate` has one that runs nothing."""

    def locate(self, plugin_type: str) -> str:
        """Return the path of the plugin, as plugins see it; empty if not found. Raises IoFailureError."""

    def refuse_multus(self, plugin_type: str, path: str) -> None:
        """Raise CniError if the file that `locate` found is a program of Multus. `run` checks the files it finds."""

    def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> Result:
        """Run the plugin as `PluginRunner.run` does; `path` is the path from `locate`, else `run` searches."""


class HostTools(Protocol):
    """Runs programs of the host, such as `nft`, in the host's file system and network namespace."""

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Run `tool`, searched by its name in the host's directories of programs, to its end.

        Raises ToolNotFoundError, and CniError if it cannot be started, does not end in time or prints too much. When
        interrupted it first ends the program.
        """
