"""Network namespaces that outlive the process: made and kept as a mount on a file, as `ip netns` and runtimes do."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Final

from multus_daemon.kernel.links import Rtnl

_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 4096
_MNT_DETACH: Final = 2

# os.unshare is new in Python 3.12; mount has no function at all.
_libc = ctypes.CDLL(None, use_errno=True)


def create(path: Path) -> None:
    """A new network namespace at `path`, its loopback interface up. Raises OSError; nothing is left behind then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(exist_ok=False)
    failures: list[OSError] = []

    def body() -> None:
        try:
            _checked(_libc.unshare(_CLONE_NEWNET), "unshare", path)
            with contextlib.closing(Rtnl()) as kernel:
                kernel.set_up(kernel.link("lo").index)
            source = b"/proc/thread-self/ns/net"
            _checked(_libc.mount(source, os.fsencode(path), None, _MS_BIND, None), "mount", path)
        except OSError as error:
            failures.append(error)

    # A thread of its own, which ends: the namespace of the others must stay.
    thread = threading.Thread(target=body, name="new netns")
    thread.start()
    thread.join()
    if failures:
        path.unlink(missing_ok=True)
        raise failures[0]


def remove(path: Path) -> bool:
    """Remove it; False if it was not there. Raises OSError."""
    if not path.exists():
        return False
    try:
        _checked(_libc.umount2(os.fsencode(path), _MNT_DETACH), "umount", path)
    except OSError as error:
        # Not mounted: a file that is left of before a reboot.
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)
    return True


def _checked(outcome: int, call: str, path: Path) -> None:
    if outcome:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}", str(path))
