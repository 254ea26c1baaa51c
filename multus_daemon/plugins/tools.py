"""Run programs of the host (`nft`, `iptables`) for the built-in plugins, in the same way as plugin binaries."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Final

from multus_daemon import deadlines
from multus_daemon.plugins import child, find
from multus_daemon.plugins.plugin import ToolNotFoundError
from multus_daemon.plugins.process import MINIMAL_ENVIRON, chroot_program
from multus_daemon.runtime import portal, threads
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.portal import OwnLoop, Portal
from multus_daemon.spec.attachment import ToolExit
from multus_daemon.spec.cni.errors import InternalError, IoFailureError, TryAgainLaterError

AT_ONCE: Final = 4
"""Maximum number of programs at once; the kernel's tables have one lock, and a listing of large ones takes memory.

Each takes 0.6 MiB at least: where memory allows fewer plugins at once, fewer of these run too.
"""
_DIRECTORIES: Final = tuple(MINIMAL_ENVIRON["PATH"].split(":"))


class ToolRunner:
    """The `HostTools` of the daemon: runs programs on an event loop, for threads that wait."""

    def __init__(
        self,
        *,
        chroot_dir: str = "",
        at_once: int = AT_ONCE,
        timeout: float = deadlines.TOOL_SECONDS,
        grace: float = deadlines.KILL_GRACE_SECONDS,
        max_output: int = 64 * 1024 * 1024,
        portal: Portal | None = None,
    ) -> None:
        """`at_once`: maximum number of programs at once, AT_ONCE at most. Times in seconds, `max_output` in bytes.

        A node with ten thousand services has rules of some MiB. The programs are found in the usual directories below
        `chroot_dir` ("" and "/": no chroot). `portal`: the way to the loop; if None, each call has a loop of its own.

        Raises ValueError for a relative directory, FileNotFoundError if there is no chroot program.
        """
        if not (chroot_dir or "/").startswith("/"):
            raise ValueError(f"{chroot_dir!r} is not an absolute path")
        self._root = chroot_dir.rstrip("/")
        self._chroot = chroot_program() if self._root else ""
        self._limits = child.Limits(timeout, grace, max_output)
        self._looks = threads.Reads(deadlines.PLUGIN_LOOKUP_SECONDS, shared=True)
        self._portal: Portal = portal or OwnLoop()
        self._places = asyncio.Semaphore(min(AT_ONCE, at_once))

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Do the work of `HostTools.run`."""
        return self._portal.call(self.execute, tool, arguments, stdin)

    async def execute(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Do the work of `run` on the loop."""
        try:
            find_tool = functools.partial(self._looks.of, tool, find.find, _DIRECTORIES, tool, root=self._root)
            path = await portal.run(Deadline(), find_tool, name="look")
        except find.PluginNotFoundError as error:
            raise ToolNotFoundError(f"{tool} is not in {', '.join(_DIRECTORIES)} of the host") from error
        except TimeoutError as error:
            raise IoFailureError(
                f"{', '.join(_DIRECTORIES)} do not answer: {tool} was not found", str(error)
            ) from error
        command = [path, *arguments]
        argv = [*([self._chroot, self._root] if self._root else []), *command]
        try:
            async with self._places:
                end = await child.run(argv, MINIMAL_ENVIRON, stdin, self._limits)
        except OSError as error:
            raise IoFailureError(f"{tool} could not be started: {error.strerror}", " ".join(command)) from error
        except child.DeadlineExceededError as error:
            raise TryAgainLaterError(
                f"{tool} did not end within {self._limits.timeout:g} s and was ended", " ".join(command)
            ) from error
        except child.OutputTooLargeError as error:
            raise InternalError(
                f"{tool} wrote more than {self._limits.max_output} bytes to stdout and was ended", " ".join(command)
            ) from error
        return ToolExit(end.returncode, end.stdout, end.stderr.decode("utf-8", "replace").strip())
