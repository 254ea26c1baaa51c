"""Find the daemons in this network namespace by their listening sockets."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_SOCKETS: Final = re.compile(r"multus\.sock|\.m[0-9a-f]{8}")
"""Names under which daemons bind their sockets: upstream's, and ours, which then renames it."""
_ACCEPTS: Final = 0x10000
"""Flag of a listening socket in /proc/net/unix (__SO_ACCEPTCON)."""


def listening() -> set[str]:
    """Return the sockets that daemons listen on, as /proc/<pid>/fd names them. Raises OSError."""
    found = set()
    for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines()[1:]:
        # Number, references, protocol, flags, type, state, inode, path: proc_pid_net(5).
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & _ACCEPTS and _SOCKETS.fullmatch(os.path.basename(fields[7])):
            found.add(f"socket:[{fields[6]}]")
    return found


def holders(sockets: Collection[str]) -> Iterator[str]:
    """Yield the processes that have one of the sockets open, as far as they are visible."""
    for directory in Path("/proc").glob("[0-9]*/fd"):
        # A process may end meanwhile, or may not be looked at.
        with contextlib.suppress(OSError):
            if any(os.readlink(directory / name) in sockets for name in os.listdir(directory)):
                yield directory.parent.name
