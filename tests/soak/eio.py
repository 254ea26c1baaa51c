"""`python eio.py SHARE DELS FLAG DIRECTORY... -- python -m MODULE ARGUMENT...`: a daemon on a sick disk.

Of what it does to the files below the directories, with the functions of `os` and `open`, this share fails with EIO
before anything is done. Of the DELs of plugins, the share DELS fails: at a netlink message (ENOBUFS), the removal of a
file (EIO) or a program of the host, drawn at random, or after all was done. Both as long as the file FLAG is there,
which is looked for twice a second. Its child processes have a disk that is well.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import runpy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

_OF_PATHS: Final = ("open", "stat", "lstat", "scandir", "listdir", "mkdir", "rename", "replace", "unlink", "link")
_OF_DESCRIPTORS: Final = ("read", "write", "fsync", "ftruncate")
_DIRECTORIES: Final = ("dir_fd", "src_dir_fd", "dst_dir_fd")
LOOKS: Final = 0.5
"""Seconds between two looks for the flag."""
STEPS_MAX: Final = 12
"""Messages, removals and programs of a DEL before the one that fails, at most."""
STUCK_SECONDS: Final = 4.0
"""How long a DEL that fails does so, at most."""


def wrapper(share: float, dels: float, flag: Path, directories: Sequence[Path]) -> tuple[str, ...]:
    """Return the program that a daemon's command line is given to."""
    return (sys.executable, __file__, str(share), str(dels), str(flag), *map(str, directories), "--")


class Chance:
    """Strikes with a chance from 0 to 1, while the flag is there."""

    def __init__(self, share: float, flag: str) -> None:
        self._share = share
        self._flag = flag
        self._access = os.access
        self._is_sick = True
        self._looked = 0.0

    def strikes(self) -> bool:
        return random.random() < self._share and self.is_sick()

    def is_sick(self) -> bool:
        """Return whether the flag is there, or was half a second ago."""
        now = time.monotonic()
        if now > self._looked + LOOKS:
            self._looked, self._is_sick = now, self._access(self._flag, os.F_OK)
        return self._is_sick


class FailingDels:
    """Makes a share of the plugins' DELs fail somewhere, each for a while."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._until: dict[tuple[str, str, str], float] = {}
        self._steps = threading.local()

    def install(self) -> None:
        """From now on they fail."""
        from multus_daemon.kernel.transport import Socket
        from multus_daemon.plugins.plugin import Plugin
        from multus_daemon.plugins.process import ToolRunner
        from multus_daemon.spec.cni.errors import InternalError, IoFailureError

        run = Plugin.run

        def failing(self_: Any, invocation: Any, netns: Any) -> Any:
            key = invocation.container_id, invocation.ifname, self_.type
            if invocation.verb != "DEL" or not self._fails(key):
                return run(self_, invocation, netns)
            self._steps.left = random.randrange(STEPS_MAX)
            try:
                run(self_, invocation, netns)
                raise InternalError("the soak fails this DEL, which was done")
            finally:
                self._steps.left = -1

        setattr(Plugin, "run", failing)  # noqa: B010
        for owner, name, error in (
            (Socket, "_send", OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))),
            (os, "unlink", OSError(errno.EIO, os.strerror(errno.EIO))),
            (ToolRunner, "run", IoFailureError("the soak fails this program")),
        ):
            setattr(owner, name, self._step(getattr(owner, name), error))

    def _fails(self, key: tuple[str, str, str]) -> bool:
        now = time.monotonic()
        if key in self._until:
            return now < self._until[key] and self._chance.is_sick()
        if self._chance.strikes():
            self._until[key] = now + random.uniform(0, STUCK_SECONDS)
        return key in self._until

    def _step(self, function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def step(*args: Any, **more: Any) -> Any:
            left = getattr(self._steps, "left", -1)
            self._steps.left = max(-1, left - 1)
            if left == 0:
                raise type(error)(*error.args)
            return function(*args, **more)

        return step


class SickDisk:
    """Makes a share of the operations on a disk fail."""

    def __init__(self, chance: Chance, directories: Sequence[str]) -> None:
        self._strikes = chance.strikes
        self._directories = tuple(f"{directory.rstrip('/')}/" for directory in directories)
        self._readlink = os.readlink

    def install(self) -> None:
        """From now on it is sick."""
        for name in _OF_PATHS:
            setattr(os, name, self._of_paths(getattr(os, name)))
        for name in _OF_DESCRIPTORS:
            setattr(os, name, self._of_descriptor(getattr(os, name)))
        builtins.open = io.open = self._of_paths(io.open)

    def _of_paths(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **more: Any) -> Any:
            if self._strikes():
                directory = next((more[key] for key in _DIRECTORIES if more.get(key) is not None), None)
                for path in args[:2]:
                    if isinstance(path, str | os.PathLike) and self._is_here(str(os.fspath(path)), directory):
                        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return function(*args, **more)

        return failing

    def _of_descriptor(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def failing(descriptor: Any, *args: Any) -> Any:
            if self._strikes() and isinstance(descriptor, int) and self._is_here("", descriptor):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(descriptor, *args)

        return failing

    def _is_here(self, path: str, directory: int | None) -> bool:
        if directory is not None and not path.startswith("/"):
            try:
                path = f"{self._readlink(f'/proc/self/fd/{directory}')}/{path}"
            except OSError:
                return False
        return f"{path}/".startswith(self._directories)


def main() -> None:
    """The program."""
    end = sys.argv.index("--")
    share, dels, flag, *directories = sys.argv[1:end]
    _, option, module, *arguments = sys.argv[end + 1 :]
    assert option == "-m", option
    sys.argv[:] = [module, *arguments]
    # Not this file's directory, as with `python -m`.
    sys.path[0] = os.getcwd()
    SickDisk(Chance(float(share), flag), directories).install()
    FailingDels(Chance(float(dels), flag)).install()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
