"""`python eio.py SHARE FLAG DIRECTORY... -- python -m MODULE ARGUMENT...`: a program on a sick disk.

Of what it does to the files below the directories, with the functions of `os` and `open`, this share fails with EIO
before anything is done; as long as the file FLAG is there, which is looked for twice a second. Its child processes have
a disk that is well.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

_OF_PATHS: Final = ("open", "stat", "lstat", "scandir", "listdir", "mkdir", "rename", "replace", "unlink", "link")
_OF_DESCRIPTORS: Final = ("read", "write", "fsync", "ftruncate")
_DIRECTORIES: Final = ("dir_fd", "src_dir_fd", "dst_dir_fd")
LOOKS: Final = 0.5
"""Seconds between two looks for the flag."""


class SickDisk:
    """Makes a share of the operations on a disk fail."""

    def __init__(self, share: float, flag: str, directories: Sequence[str]) -> None:
        """`share`: from 0 to 1."""
        self._share = share
        self._flag = flag
        self._directories = tuple(f"{directory.rstrip('/')}/" for directory in directories)
        self._access = os.access
        self._readlink = os.readlink
        self._is_sick = True
        self._looked = 0.0

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

    def _strikes(self) -> bool:
        return random.random() < self._share and self._is_sick_now()

    def _is_sick_now(self) -> bool:
        now = time.monotonic()
        if now > self._looked + LOOKS:
            self._looked, self._is_sick = now, self._access(self._flag, os.F_OK)
        return self._is_sick

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
    share, flag, *directories = sys.argv[1:end]
    _, option, module, *arguments = sys.argv[end + 1 :]
    assert option == "-m", option
    sys.argv[:] = [module, *arguments]
    # Not this file's directory, as with `python -m`.
    sys.path[0] = os.getcwd()
    SickDisk(float(share), flag, directories).install()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
