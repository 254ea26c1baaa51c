"""Run plugin binaries, and `nft` and `iptables` for built-ins: lookup, chroot, environment, busy files, errors.

Execution protocol: CNI SPEC section 2, containernetworking/cni `pkg/invoke`. The `chroot` program enters the host's
root and changes to `/`, so that a plugin never has a working directory outside its root. A plugin gets those variables
of the daemon's environment that the operator has named, in particular no KUBERNETES_*, and the request's trace context.

A directory may be on a disk that hangs, so every read of a program's file has a deadline (`_look`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, ParamSpec, TypeVar

from multus_daemon import deadlines
from multus_daemon.plugins import child, failure, find
from multus_daemon.plugins.find import Build, Program
from multus_daemon.plugins.limit import ProcessLimit
from multus_daemon.plugins.plugin import ToolNotFoundError
from multus_daemon.runtime import deadline, elf, fs, threads, timeline, trace
from multus_daemon.runtime.deadline import backoff
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.runtime.slots import Slot
from multus_daemon.spec.attachment import Invocation, ToolExit
from multus_daemon.spec.cni.errors import CniError, InternalError, IoFailureError, Origin, TryAgainLaterError

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

# LC_ALL: for English messages of the chroot program, see `_once`.
MINIMAL_ENVIRON: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
}
TOOLS: Final = tuple(MINIMAL_ENVIRON["PATH"].split(":"))
TOOLS_AT_ONCE: Final = 4
"""Maximum number of tools at once; the kernel's tables have one lock, and a listing of large ones takes memory.

Each takes 0.6 MiB at least: where memory allows fewer plugins at once, tools are limited to the same number.
"""
CHROOT_PROGRAMS: Final = ("/usr/sbin/chroot", "/usr/bin/chroot", "/sbin/chroot", "/bin/chroot")
# Exit statuses of coreutils and busybox: chroot failed, the command cannot be executed, the command does not exist.
_BY_CHROOT: Final = (125, 126, 127)
_CANNOT_EXECUTE: Final = 126
_BUSY_ATTEMPTS: Final = 6
_NOT_STARTED: Final = (
    "look at the file: its interpreter or loader is not on the node, or its mode or mount does not let it run"
)
_GOMAXPROCS: Final = 2
_LOOK_SECONDS: Final = 0.1
"""Interval for checking whether the work must stop."""


class _Runner:
    """Finds programs below the chroot directory, and runs them."""

    def __init__(self, directories: Sequence[str], chroot_dir: str, limits: child.Limits) -> None:
        for directory in (*directories, chroot_dir or "/"):
            if not directory.startswith("/"):
                raise ValueError(f"{directory!r} is not an absolute path")
        self._directories = tuple(directories)
        self._root = chroot_dir.rstrip("/")
        self._chroot = chroot_program() if self._root else ""
        if not self._root and sys.version_info < (3, 11, 4):
            # With vfork, these versions let no thread run until the kernel has read the program: a disk that hangs
            # would stop the daemon (gh-104372). Behind `chroot` it stops that program only.
            subprocess._USE_VFORK = False  # type: ignore[misc]
        self._limits = limits
        self._looks = threads.Reads(deadlines.PLUGIN_LOOKUP_SECONDS, shared=True)

    def _argv(self, path: str) -> list[str]:
        return [self._chroot, self._root, path] if self._root else [path]

    def _look(self, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work`, which reads files of the program, with a deadline. Raises IoFailureError if the disk hangs."""
        try:
            return self._looks.of((work.__name__, *args), work, *args, **kwargs)
        except TimeoutError as error:
            raise IoFailureError(
                f"directory {', '.join(self._directories)} does not answer: {what} could not be read "
                f"within {deadlines.PLUGIN_LOOKUP_SECONDS:g} s",
                remedy="check its disk or mount, such as an NFS server that is gone",
            ) from error
        except threads.NoThreadError as error:
            raise _not_ended(what, error, self._limits, "") from error


class ToolRunner(_Runner):
    """Runs programs of the host: implements `HostTools`."""

    def __init__(
        self,
        *,
        chroot_dir: str = "",
        at_once: int = TOOLS_AT_ONCE,
        timeout: float = deadlines.TOOL_SECONDS,
        max_output: int = 64 * 1024 * 1024,
    ) -> None:
        """`at_once`: maximum number of programs at once, TOOLS_AT_ONCE at most. Otherwise as for `ProcessRunner`.

        `max_output` in bytes: the rules of a node with ten thousand services take some MiB.
        """
        super().__init__(TOOLS, chroot_dir, child.Limits(timeout, deadlines.KILL_GRACE_SECONDS, max_output))
        self._places = threading.Semaphore(min(TOOLS_AT_ONCE, at_once))

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Implements `HostTools.run`."""
        try:
            path = self._look(tool, find.find, self._directories, tool, root=self._root)
        except find.PluginNotFoundError as error:
            problem = f"{tool} is not in {', '.join(self._directories)} of the host"
            remedy = "install it on the host, or choose another backend in the network's configuration"
            raise ToolNotFoundError(problem, remedy=remedy) from error
        while not self._places.acquire(timeout=_LOOK_SECONDS):
            deadline.check()
        try:
            end = child.run([*self._argv(path), *arguments], MINIMAL_ENVIRON, stdin, self._limits)
        except child.FAILURES as error:
            raise _not_ended(tool, error, self._limits, " ".join((path, *arguments))) from error
        finally:
            self._places.release()
        return ToolExit(end.returncode, end.stdout, end.stderr.decode("utf-8", "replace").strip())


class ProcessRunner(_Runner):
    """Runs plugin binaries: implements `Programs`."""

    def __init__(
        self,
        bin_dirs: Sequence[str],
        *,
        chroot_dir: str = "",
        timeout: float = deadlines.DELEGATE_SECONDS,
        grace: float = deadlines.KILL_GRACE_SECONDS,
        max_output: int = 16 * 1024 * 1024,
        environ: Mapping[str, str] = MINIMAL_ENVIRON,
        limit: ProcessLimit | None = None,
        portal: LoopPortal | None = None,
    ) -> None:
        """`bin_dirs` as seen inside `chroot_dir` ("" and "/": no chroot); times in seconds, `max_output` in bytes.

        `timeout` is for one call, at most DELEGATE_DEL_SECONDS for a DEL, without the wait for a slot of `limit`;
        without `limit` any number runs at once. `portal`: to the event loop of `limit`. Raises ValueError for a
        relative directory, FileNotFoundError if there is no chroot program.
        """
        super().__init__(bin_dirs, chroot_dir, child.Limits(timeout, grace, max_output))
        self._environ = {"GOMAXPROCS": str(min(_GOMAXPROCS, os.cpu_count() or 1)), **environ}
        self._limit = limit
        self._portal = portal

    def locate(self, plugin_type: str) -> Program:
        """Implements `Programs.locate`. Raises IoFailureError if the disk hangs."""
        return self._look(_named(plugin_type), find.program, self._directories, plugin_type, root=self._root)

    def builds(self, types: Collection[str]) -> Mapping[str, Build]:
        """Do the work of `Programs.builds`. Raises IoFailureError if the disk hangs."""
        return self._look("the plugins", find.builds, self._directories, tuple(types), root=self._root)

    def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> bytes:
        """Return the stdout of the plugin, whose exit status was 0; `path`: the path from `locate`.

        Raises the plugin's own CniError, PluginNotFoundError, PluginIsMultusError, IoFailureError if it cannot be
        started or its disk hangs, TryAgainLaterError if its file stays busy, its time is up or no slot became free,
        InternalError for a failure without a CNI error and for too much output.
        """
        # Before the wait for a slot, so that a missing plugin is reported at once.
        what = _named(plugin_type)
        path = path or self._look(what, find.find_plugin, self._directories, plugin_type, root=self._root)
        seconds = self._limits.timeout
        if invocation.verb == "DEL":
            seconds = min(seconds, deadlines.DELEGATE_DEL_SECONDS)
        doing = timeline.doing(f"{what} of network {invocation.network}", seconds)
        with self._slot(plugin_type, invocation), doing:
            return self._run(plugin_type, invocation, path, seconds)

    @contextlib.contextmanager
    def _slot(self, plugin_type: str, invocation: Invocation) -> Iterator[None]:
        limit, portal = self._limit, self._portal
        if limit is None or portal is None:
            yield
            return
        held: list[Slot] = []

        async def take() -> None:
            # Here, since an interrupted call returns nothing.
            held.append(await limit.take(plugin_type, invocation))

        try:
            portal.call(take)
            yield
        finally:
            for slot in held:
                portal.tell(limit.give_back, slot, invocation)

    def _run(self, plugin_type: str, invocation: Invocation, path: str, seconds: float) -> bytes:
        environ = {**self._environ, **_variables(invocation), **trace.environ()}
        delays = backoff(0.05, 1.0)
        whole, ends = dataclasses.replace(self._limits, timeout=seconds), time.monotonic() + seconds
        for attempt in range(1, _BUSY_ATTEMPTS + 1):
            # A new process each time, within the same deadline.
            limits = dataclasses.replace(whole, timeout=max(ends - time.monotonic(), 0.0))
            try:
                end = self._once(plugin_type, invocation, path, environ, limits)
            except child.DeadlineExceededError as error:
                hint = "what it waits for is in its stderr, where it says so, or in the logs of its own daemon"
                context = failure.context(plugin_type, invocation.verb, error.stderr, f"{hint}; {path}")
                raise _not_ended(_named(plugin_type), error, whole, context) from error
            if end is not None:
                return self._stdout_of(plugin_type, invocation, path, end)
            if attempt < _BUSY_ATTEMPTS:
                deadline.pause(next(delays))
        raise TryAgainLaterError(
            f'plugin "{plugin_type}" is being written by another program: text file busy, {_BUSY_ATTEMPTS} attempts',
            failure.context(plugin_type, invocation.verb, first=path),
        )

    def _once(
        self, plugin_type: str, invocation: Invocation, path: str, environ: Mapping[str, str], limits: child.Limits
    ) -> child.Exit | None:
        """Run one process; return None if the binary was busy. Raises DeadlineExceededError."""
        verb = invocation.verb
        try:
            end = child.run(self._argv(path), environ, invocation.stdin, limits)
        except (OSError, child.OutputTooLargeError) as error:
            number = error.errno if isinstance(error, OSError) else 0
            if number == errno.ETXTBSY:
                return None
            if number == errno.ENOEXEC:
                foreign = self._look(_named(plugin_type), self._foreign, path)
                problem = foreign or "it is no program, nor a script with #!"
                raise _not_executable(plugin_type, verb, path, problem) from error
            raise _not_ended(
                _named(plugin_type), error, limits, failure.context(plugin_type, verb, first=path)
            ) from error
        if self._root and end.returncode > 0 and not end.stdout:
            # The exit status stands for several errnos, the message is in the C locale.
            is_busy = end.returncode == _CANNOT_EXECUTE and self._speaks(end.stderr)
            if is_busy and os.strerror(errno.ETXTBSY).encode() in end.stderr:
                return None
            # Below chroot, the C library runs a file that the kernel refuses with the shell, which fails in any way.
            if problem := self._look(_named(plugin_type), self._foreign, path):
                raise _not_executable(plugin_type, verb, path, problem)
        return end

    def _foreign(self, path: str) -> str:
        """Return the machine type of a program for another machine; empty for this one, or no program. Blocks."""
        try:
            with open(fs.resolve(self._root, path), "rb") as file:
                foreign = elf.foreign_machine(file.read(elf.HEAD_BYTES))
        except (OSError, elf.NoProgramError):
            return ""
        return f"it is a program for {foreign}, and this node is {os.uname().machine}" if foreign else ""

    def _stdout_of(self, plugin_type: str, invocation: Invocation, path: str, end: child.Exit) -> bytes:
        verb = invocation.verb
        if end.returncode == 0:
            if verb == "ADD":
                failure.require_object(plugin_type, invocation, path, end)
            if end.stderr:
                # The SPEC sends a plugin's stderr to the runtime's log; ours is the daemon's.
                log.debug(
                    "plugin %s, %s, wrote to stderr: %s", plugin_type, verb, end.stderr.decode("utf-8", "replace")
                )
            return end.stdout
        error = failure.of_exit(plugin_type, invocation, path, end)
        if self._root and not end.stdout and end.returncode in _BY_CHROOT and self._speaks(end.stderr):
            reason = end.stderr.decode("utf-8", "replace").strip().rpartition(": ")[2]
            problem = f'plugin "{plugin_type}" could not be started: {path}: {reason}'
            raise IoFailureError(problem, error.details, remedy=_NOT_STARTED)
        raise error

    def _speaks(self, stderr: bytes) -> bool:
        """Return True if the chroot program, not the plugin, wrote `stderr`, which then begins with `chroot`."""
        return stderr.startswith((self._chroot.encode() + b":", b"chroot:"))


def chroot_program() -> str:
    """Return the path of the chroot program. Raises FileNotFoundError if there is none."""
    for path in CHROOT_PROGRAMS:
        with contextlib.suppress(CniError):
            return find.find((os.path.dirname(path),), os.path.basename(path))
    raise FileNotFoundError(
        errno.ENOENT, f"no chroot program (looked for {', '.join(CHROOT_PROGRAMS)}), which a chroot directory needs"
    )


def _named(plugin_type: str) -> str:
    return f'plugin "{plugin_type}"'


def _not_ended(what: str, error: Exception, limits: child.Limits, details: str) -> CniError:
    if isinstance(error, threads.NoThreadError):
        advice = (
            "raise the limits of the daemon's pod or service (pids.max, memory), or find out what else uses them up"
        )
        problem = "no thread, the limit of processes or memory is reached"
        return TryAgainLaterError(f"{what} could not be started: {problem}", remedy=advice, origin=Origin.NODE)
    if isinstance(error, OSError):
        problem = f"{what} could not be started: {error.strerror}"
        return IoFailureError(problem, details, remedy=_NOT_STARTED, origin=Origin.PLUGIN)
    if isinstance(error, child.OutputTooLargeError):
        return InternalError(
            f"{what} wrote more than {limits.max_output} bytes to stdout and was ended", details, origin=Origin.PLUGIN
        )
    return TryAgainLaterError(
        f"{what} did not end within {limits.timeout:g} s and was ended", details, origin=Origin.PLUGIN
    )


def _not_executable(plugin_type: str, verb: str, path: str, problem: str) -> IoFailureError:
    # Without its stderr: chroot(1) gives what the kernel does not execute to a shell, which prints parts of the file.
    advice = f"install the plugin for {os.uname().machine} as {path}; `multusctl doctor` names others not for this node"
    context = failure.context(plugin_type, verb)
    return IoFailureError(f'plugin "{plugin_type}" could not be started: {problem}', context, remedy=advice)


def _variables(invocation: Invocation) -> dict[str, str]:
    """Return the CNI_* variables of a call. Empty ones are set, too; STATUS has no variable about a container."""
    variables = {"CNI_COMMAND": invocation.verb, "CNI_PATH": invocation.path}
    if invocation.verb != "STATUS":
        variables["CNI_CONTAINERID"] = invocation.container_id
        variables["CNI_NETNS"] = invocation.netns
        variables["CNI_IFNAME"] = invocation.ifname
        variables["CNI_ARGS"] = invocation.args
    if invocation.netns_override:
        variables["CNI_NETNS_OVERRIDE"] = "1"
    return variables
