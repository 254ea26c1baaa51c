"""The user of this program, and its runtime directory (XDG Base Directory Specification)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_UID_MAP = Path("/proc/self/uid_map")


def runtime_directory(environ: Mapping[str, str] = os.environ, uid_map: Path = _UID_MAP) -> Path | None:
    """Return the user's directory for sockets and the like; None for root, and for users without one.

    Root of a user namespace is an ordinary user without access to /run (user_namespaces(7)).
    """
    directory = environ.get("XDG_RUNTIME_DIR", "")
    if _outer_uid(uid_map) == 0 or not directory.startswith("/"):
        return None
    return Path(directory)


def _outer_uid(uid_map: Path) -> int:
    uid = os.geteuid()
    try:
        lines = uid_map.read_text().splitlines()
    except OSError:
        return uid
    for line in lines:
        inside, outside, count = map(int, line.split())
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid
