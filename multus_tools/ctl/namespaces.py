"""Network namespaces that outlive the process: bind mounts on files, as of `ip netns` and container runtimes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from multus_daemon.kernel.links import Rtnl

_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 4096
_MNT_DETACH: Final = 2

# os.unshare is new in Python 3.12; `os` has no mount.
_libc = ctypes.CDLL(None, use_errno=True)


def create(path: Path) -> None:
    """Make a network namespace at `path`, its loopback interface up. Raises OSError, and then leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(exist_ok=False)
    try:
        # In a thread that ends here: the namespace of the other threads must stay.
        with ThreadPoolExecutor(1) as executor:
            executor.submit(_make, path).result()
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _make(path: Path) -> None:
    _checked(_libc.unshare(_CLONE_NEWNET), "unshare", path)
    with contextlib.closing(Rtnl()) as kernel:
        kernel.set_up(kernel.link("lo").index)
    _checked(_libc.mount(b"/proc/thread-self/ns/net", os.fsencode(path), None, _MS_BIND, None), "mount", path)


def remove(path: Path) -> bool:
    """Remove the namespace; return False if it does not exist. Raises OSError."""
    if not path.exists():
        return False
    try:
        _checked(_libc.umount2(os.fsencode(path), _MNT_DETACH), "umount", path)
    except OSError as error:
        # EINVAL: not mounted, a file from before a reboot.
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)
    return True


def _checked(outcome: int, call: str, path: Path) -> None:
    if outcome:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}", str(path))
