"""Run plugin binaries: lookup, chroot, environment, retries of a busy file, errors.

Execution protocol: CNI SPEC section 2, containernetworking/cni `pkg/invoke`. The `chroot` program enters the host's
root and changes to `/`, so that a plugin never has a working directory outside its root. A plugin gets those variables
of the daemon's environment that the operator has named, in particular no KUBERNETES_*, and the request's trace context.

A directory of plugins may be on a disk that hangs: everything that reads a plugin's file has a deadline (`_look`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

from multus_daemon import deadlines
from multus_daemon.plugins import child, find
from multus_daemon.plugins.find import ProgramFiles
from multus_daemon.plugins.limit import ProcessLimit
from multus_daemon.runtime import elf, fs, portal, threads, timeline, trace
from multus_daemon.runtime.deadline import Deadline, backoff
from multus_daemon.runtime.portal import OwnLoop, Portal
from multus_daemon.spec.attachment import Invocation
from multus_daemon.spec.cni import errors, gojson
from multus_daemon.spec.cni.errors import CniError, InternalError, IoFailureError, TryAgainLaterError

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

# LC_ALL: for English messages of the chroot program, see `_once`.
MINIMAL_ENVIRON: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
}
CHROOT_PROGRAMS: Final = ("/usr/sbin/chroot", "/usr/bin/chroot", "/sbin/chroot", "/bin/chroot")
# Exit statuses of coreutils and busybox: chroot failed, the command cannot be executed, the command does not exist.
_CHROOT_FAILED, _CHROOT_CANNOT_EXECUTE, _CHROOT_NOT_FOUND = 125, 126, 127
_BUSY_ATTEMPTS: Final = 6
_STDOUT_SHOWN: Final = 200
_SHORT: Final = 2
_ONLY_JSON: Final = "correct or replace the program: all but the result belongs on its stderr"


class ProcessRunner:
    """Runs plugin binaries on an event loop, for threads that wait: the `Programs` of the daemon."""

    def __init__(
        self,
        bin_dirs: Sequence[str],
        *,
        chroot_dir: str = "",
        timeout: float = deadlines.DELEGATE_SECONDS,
        grace: float = deadlines.KILL_GRACE_SECONDS,
        gomaxprocs: int = 2,
        max_output: int = 16 * 1024 * 1024,
        environ: Mapping[str, str] = MINIMAL_ENVIRON,
        limit: ProcessLimit | None = None,
        portal: Portal | None = None,
    ) -> None:
        """`bin_dirs` as seen inside `chroot_dir` ("" and "/": no chroot); times in seconds, `max_output` in bytes.

        `timeout` is for one call, at most DELEGATE_DEL_SECONDS for a DEL, without the wait for `limit`; without `limit`
        any number runs at once. `portal`: the way to the loop; if None, each call has a loop of its own. Raises
        ValueError for a relative directory, FileNotFoundError if there is no chroot program.
        """
        for directory in (*bin_dirs, chroot_dir or "/"):
            if not directory.startswith("/"):
                raise ValueError(f"{directory!r} is not an absolute path")
        self._bin_dirs = tuple(bin_dirs)
        self._root = chroot_dir.rstrip("/")
        self._chroot = chroot_program() if self._root else ""
        if not self._root and sys.version_info < (3, 11, 4):
            # With vfork, these versions let no thread run until the kernel has read the program: a disk that hangs
            # would stop the daemon (gh-104372). Behind `chroot` it stops that program only.
            subprocess._USE_VFORK = False  # type: ignore[misc]
        self._limits = child.Limits(timeout, grace, max_output)
        procs = max(1, min(gomaxprocs, os.cpu_count() or 1))
        self._environ = {"GOMAXPROCS": str(procs), **environ}
        self._limit = limit
        self._portal: Portal = portal or OwnLoop()
        self._files = ProgramFiles()
        self._looks = threads.Reads(deadlines.PLUGIN_LOOKUP_SECONDS, shared=True)

    def locate(self, plugin_type: str) -> str:
        """Return the plugin's path inside the chroot; empty if not found. Raises IoFailureError if the disk hangs."""
        return self._look(plugin_type, self._locate, plugin_type)

    def _locate(self, plugin_type: str) -> str:
        try:
            return find.find(self._bin_dirs, plugin_type, root=self._root)
        except CniError:
            return ""

    def refuse_multus(self, plugin_type: str, path: str) -> None:
        """Raise CniError if the file at `path` is a program of Multus, IoFailureError if the disk hangs."""
        self._look(plugin_type, self._refuse_multus, plugin_type, path)

    def _refuse_multus(self, plugin_type: str, path: str) -> None:
        # Running a file that is gone reports it.
        with contextlib.suppress(OSError):
            self._files.refuse(plugin_type, fs.resolve(self._root, path))

    def _find(self, plugin_type: str) -> str:
        path = find.find(self._bin_dirs, plugin_type, root=self._root)
        self._refuse_multus(plugin_type, path)
        return path

    def _look(self, plugin_type: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work`, which reads files of the plugin, with a deadline. Raises IoFailureError if the disk hangs."""
        try:
            return self._looks.of((work.__name__, *args), work, *args, **kwargs)
        except TimeoutError as error:
            raise IoFailureError(
                f'directory {", ".join(self._bin_dirs)} does not answer: plugin "{plugin_type}" could not be read '
                f"within {deadlines.PLUGIN_LOOKUP_SECONDS:g} s",
                "check its disk or mount, such as an NFS server that is gone",
            ) from error
        except threads.NoThreadError as error:
            raise _no_thread(plugin_type) from error

    async def _looked(self, plugin_type: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `_look` in a thread of its own: a disk that hangs must not block threads of the default executor."""
        look = functools.partial(self._look, plugin_type, work, *args, **kwargs)
        try:
            return await portal.run(Deadline(), look, name="look")
        except threads.NoThreadError as error:
            raise _no_thread(plugin_type) from error

    def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> bytes:
        """Have the loop do `execute`, and wait for it."""
        return self._portal.call(self.execute, plugin_type, invocation, path)

    async def execute(self, plugin_type: str, invocation: Invocation, path: str = "") -> bytes:
        """Return the stdout of the plugin, whose exit status was 0; `path`: the path from `locate`.

        Raises the plugin's own CniError, PluginNotFoundError, PluginIsMultusError, IoFailureError if it cannot be
        started or its disk hangs, TryAgainLaterError if its file stays busy, its time is up or no slot became free,
        InternalError for a failure without a CNI error and for too much output.
        """
        # Before the wait for a slot, so that a missing plugin is reported at once.
        path = path or await self._looked(plugin_type, self._find, plugin_type)
        seconds = self._limits.timeout
        if invocation.verb == "DEL":
            seconds = min(seconds, deadlines.DELEGATE_DEL_SECONDS)
        async with self._limit.hold(plugin_type, invocation) if self._limit else contextlib.nullcontext():
            with timeline.doing(f'plugin "{plugin_type}" of network {invocation.network}', seconds):
                return await self._run(plugin_type, invocation, path, seconds)

    async def _run(self, plugin_type: str, invocation: Invocation, path: str, seconds: float) -> bytes:
        argv = [self._chroot, self._root, path] if self._root else [path]
        environ = {**self._environ, **_variables(invocation), **trace.environ()}
        started = time.monotonic()
        delays = backoff(0.05, 1.0)
        for attempt in range(1, _BUSY_ATTEMPTS + 1):
            # A new process each time, within the same deadline.
            left = max(seconds - (time.monotonic() - started), 0.0)
            try:
                end = await self._once(plugin_type, invocation, argv, environ, left)
            except child.DeadlineExceededError as error:
                hint = "what it waits for is in its stderr, where it says so, or in the logs of its own daemon"
                raise TryAgainLaterError(
                    f'plugin "{plugin_type}" did not end within {seconds:g} s and was ended',
                    _context(plugin_type, invocation.verb, error.stderr, f"{hint}; {path}"),
                ) from error
            if end is not None:
                return self._stdout_of(plugin_type, invocation, path, end)
            if attempt < _BUSY_ATTEMPTS:
                await asyncio.sleep(next(delays))
        raise TryAgainLaterError(
            f'plugin "{plugin_type}" is being written: text file busy, {_BUSY_ATTEMPTS} attempts',
            _context(plugin_type, invocation.verb, first=path),
        )

    async def _once(
        self, plugin_type: str, invocation: Invocation, argv: list[str], environ: Mapping[str, str], timeout: float
    ) -> child.Exit | None:
        """Run one process; return None if the binary was busy. Raises DeadlineExceededError."""
        limits = child.Limits(timeout, self._limits.grace, self._limits.max_output)
        verb, path = invocation.verb, argv[-1]
        try:
            end = await child.run(argv, environ, invocation.stdin, limits)
        except threads.NoThreadError as error:
            raise _no_thread(plugin_type) from error
        except OSError as error:
            if error.errno == errno.ETXTBSY:
                return None
            if error.errno == errno.ENOEXEC:
                foreign = await self._looked(plugin_type, self._foreign, path)
                problem = foreign or "it is no program, nor a script with #!"
                raise _not_executable(plugin_type, verb, path, problem) from error
            raise IoFailureError(
                f'plugin "{plugin_type}" could not be started: {error.strerror}',
                _context(plugin_type, verb, first=path),
            ) from error
        except child.OutputTooLargeError as error:
            raise InternalError(
                f'plugin "{plugin_type}" wrote more than {limits.max_output} bytes to stdout and was ended',
                _context(plugin_type, verb, first=path),
            ) from error
        if self._root and end.returncode > 0 and not end.stdout:
            # The exit status stands for several errnos, the message is in the C locale.
            is_busy = end.returncode == _CHROOT_CANNOT_EXECUTE and self._speaks(end.stderr)
            if is_busy and os.strerror(errno.ETXTBSY).encode() in end.stderr:
                return None
            # Below chroot, the C library runs a file that the kernel refuses with the shell, which fails in any way.
            if problem := await self._looked(plugin_type, self._foreign, path):
                raise _not_executable(plugin_type, verb, path, problem)
        return end

    def _foreign(self, path: str) -> str:
        """Name the other machine that the program is for; empty if it is for this one or not a program. Blocks."""
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
                try:
                    gojson.loads_nullable_object(end.stdout)
                except gojson.JsonError as problem:
                    context = _context(plugin_type, verb, end.stderr, f"{_ONLY_JSON} ({problem})")
                    msg = f'plugin "{plugin_type}" succeeded, but {_printed(end, invocation, path)}'
                    raise errors.DecodingFailureError(msg, context) from problem
            if end.stderr:
                # The SPEC sends a plugin's stderr to the runtime's log; ours is the daemon's.
                log.debug(
                    "plugin %s, %s, wrote to stderr: %s", plugin_type, verb, end.stderr.decode("utf-8", "replace")
                )
            return end.stdout
        error = error_of(plugin_type, invocation, path, end)
        by_chroot = (_CHROOT_FAILED, _CHROOT_CANNOT_EXECUTE, _CHROOT_NOT_FOUND)
        if self._root and not end.stdout and end.returncode in by_chroot and self._speaks(end.stderr):
            raise IoFailureError(f'plugin "{plugin_type}" could not be started: {path}', error.details)
        raise error

    def _speaks(self, stderr: bytes) -> bool:
        """Report whether the chroot program, not the plugin, has written `stderr`: it begins with its own name."""
        return stderr.startswith((self._chroot.encode() + b":", b"chroot:"))


def chroot_program() -> str:
    """Return the path of the chroot program. Raises FileNotFoundError if there is none."""
    for path in CHROOT_PROGRAMS:
        try:
            return find.find((os.path.dirname(path),), os.path.basename(path)) and path
        except CniError:
            continue
    raise FileNotFoundError(
        errno.ENOENT, f"no chroot program (looked for {', '.join(CHROOT_PROGRAMS)}), which a chroot directory needs"
    )


def _no_thread(plugin_type: str) -> TryAgainLaterError:
    return TryAgainLaterError(
        f'plugin "{plugin_type}" could not be started: no thread, the limit of processes or memory is reached',
        "raise the limits of the daemon's pod or service (pids.max, memory), or find out what else uses them up",
    )


def _not_executable(plugin_type: str, verb: str, path: str, problem: str) -> IoFailureError:
    # Without its stderr: chroot(1) gives what the kernel does not execute to a shell, which prints parts of the file.
    hint = "`multusctl doctor` names others that are not for this node"
    details = f"install the plugin for {os.uname().machine} as {path}; {hint}"
    context = _context(plugin_type, verb, first=details)
    return IoFailureError(f'plugin "{plugin_type}" could not be started: {problem}', context)


def _variables(invocation: Invocation) -> dict[str, str]:
    """Return the CNI_* variables. The empty ones hide those of the daemon; STATUS has none of a container."""
    variables = {"CNI_COMMAND": invocation.verb, "CNI_PATH": invocation.path}
    if invocation.verb != "STATUS":
        variables["CNI_CONTAINERID"] = invocation.container_id
        variables["CNI_NETNS"] = invocation.netns
        variables["CNI_IFNAME"] = invocation.ifname
        variables["CNI_ARGS"] = invocation.args
    if invocation.netns_override:
        variables["CNI_NETNS_OVERRIDE"] = "1"
    return variables


def error_of(plugin_type: str, invocation: Invocation, path: str, end: child.Exit) -> CniError:
    """Return the error of a plugin that ended with a failure, as containernetworking/cni `pkg/invoke` does.

    The plugin's own error object keeps its code, message and details. The details are extended by the plugin, the verb
    and the end of its stderr; libcni drops stderr whenever there is any stdout.
    """
    failed, verb = f'plugin "{plugin_type}" failed', invocation.verb
    if end.stdout.strip():
        try:
            reported = errors.from_object(gojson.loads_object(end.stdout))
        except gojson.JsonError as error:
            problem = f"{failed} ({_how(end)}), and {_printed(end, invocation, path)}"
            return InternalError(problem, _context(plugin_type, verb, end.stderr, f"{_ONLY_JSON} ({error})"))
        # Code 0 means success in the Go library; 999 is its code for an error without one.
        code = reported.code or InternalError.default_code
        msg = reported.msg or f"{failed} without a message ({_how(end)})"
        return errors.from_code(code, msg, _context(plugin_type, verb, end.stderr, reported.details))
    if text := end.stderr.decode("utf-8", "replace").strip():
        last = text.splitlines()[-1].strip()
        return InternalError(f"{failed} ({_how(end)}): {last[-400:]}", _context(plugin_type, verb, end.stderr))
    return InternalError(f"{failed} without a message ({_how(end)})", _context(plugin_type, verb))


def _printed(end: child.Exit, invocation: Invocation, path: str) -> str:
    """Describe a stdout that is not CNI's: its start, without values of the configuration, which may be passwords."""
    values: list[Any] = [invocation.fields]
    texts = set()
    for value in values:
        if isinstance(value, Mapping | list):
            values += value.values() if isinstance(value, Mapping) else value
        elif len(text := str(value)) > _SHORT:
            texts |= {text, gojson.dumps(text).decode()[1:-1]}
    shown = end.stdout[: 20 * _STDOUT_SHOWN].decode("utf-8", "replace")
    for text in sorted(texts - {invocation.fields.get("type"), invocation.cni_version}, key=len, reverse=True):
        shown = shown.replace(text, "***")
    return f"{path} printed {shown[:_STDOUT_SHOWN]!r} instead of CNI's JSON"


def _context(plugin_type: str, verb: str, stderr: bytes = b"", first: str = "") -> str:
    """Return the details of an error about a plugin: `first`, the plugin and verb, the end of its stderr."""
    parts = [first] if first else []
    parts.append(f'plugin "{plugin_type}", {verb}')
    if text := stderr[-child.STDERR_TAIL :].decode("utf-8", "replace").strip():
        parts.append(f"stderr: {text}")
    return "; ".join(parts)


def _how(end: child.Exit) -> str:
    if end.returncode >= 0:
        return f"exit status {end.returncode}"
    number = -end.returncode
    try:
        return f"ended by signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"ended by signal {number}"
