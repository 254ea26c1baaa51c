"""Limit of open files: RLIMIT_NOFILE."""

from __future__ import annotations

import contextlib
import resource
import time


def raise_limit() -> int:
    """Raise the soft limit to the hard one, and return it.

    The usual soft limit of 1024 is too low for 256 requests with sockets, a namespace and a plugin's pipes each.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Refused if the hard limit exceeds fs.nr_open.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft


class OnceAMinute:
    """Limits a line of the log about a shortage that lasts."""

    def __init__(self) -> None:
        self._due = 0.0

    def is_due(self) -> bool:
        """Return True if the last True is a minute ago."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + 60
        return True


def are_scarce(descriptor: int) -> bool:
    """Return True if a new descriptor is in the last quarter; the kernel uses the lowest free one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and descriptor >= soft - soft // 4
