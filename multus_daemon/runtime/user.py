"""Who runs this program, and where it may keep what it has at run time (XDG Base Directory Specification)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_UID_MAP = Path("/proc/self/uid_map")


def runtime_directory(environ: Mapping[str, str] = os.environ, uid_map: Path = _UID_MAP) -> Path | None:
    """The user's own directory for sockets and the like; None for root, and where the user has none.

    Root of a user namespace is the user who made it: nothing below /run is theirs (user_namespaces(7)).
    """
    directory = environ.get("XDG_RUNTIME_DIR", "")
    if _outer_uid(uid_map) == 0 or not directory.startswith("/"):
        return None
    return Path(directory)


def _outer_uid(uid_map: Path) -> int:
    """The effective user, as the user namespace above knows it."""
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
