"""Limit of open files: RLIMIT_NOFILE."""

from __future__ import annotations

import contextlib
import resource


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


def are_scarce(descriptor: int) -> bool:
    """Return True if a new descriptor is in the last quarter; the kernel uses the lowest free one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and descriptor >= soft - soft // 4
