"""The blocking engine's way to the event loop: plugin binaries, programs of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from multus_daemon.runtime.portal import Portal
from multus_daemon.spec.attachment import Invocation, ToolExit
from multus_daemon.spec.cni import result
from multus_daemon.spec.cni.result import Result

if TYPE_CHECKING:
    from multus_daemon.plugins.process import ProcessRunner
    from multus_daemon.plugins.tools import ToolRunner


class Binaries:
    """The BinaryRunner over a ProcessRunner: the event loop runs the process, the calling thread waits."""

    def __init__(self, runner: ProcessRunner, portal: Portal) -> None:
        self._portal = portal
        self._run = runner.run
        self.locate = runner.locate
        self.refuse_multus = runner.refuse_multus

    def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> Result:
        """Run the binary and decode the result of an ADD. Raises CniError (`ProcessRunner.run`)."""
        stdout = self._portal.call(self._run, plugin_type, invocation, path)
        return result.decode(stdout, invocation.cni_version) if invocation.verb == "ADD" else Result()


class Tools:
    """The HostTools over a ToolRunner: the event loop runs the program, the calling thread waits."""

    def __init__(self, tools: ToolRunner, portal: Portal) -> None:
        self._tools = tools
        self._portal = portal

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Run the program to its end. Raises ToolNotFoundError, CniError (`ToolRunner.run`)."""
        return self._portal.call(self._tools.run, tool, arguments, stdin)
