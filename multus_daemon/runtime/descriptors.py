"""How many files the process may have open: RLIMIT_NOFILE."""

from __future__ import annotations

import contextlib
import resource


def raise_limit() -> int:
    """Raise the soft limit to the hard one; what it is then.

    The usual soft limit of 1024 is for programs that use select(2). A daemon that serves 256 requests at once, each
    with sockets, a namespace and the pipes of a plugin, may need more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Refused where the hard limit is above fs.nr_open, which was lowered since.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft


def are_scarce(descriptor: int) -> bool:
    """True where `descriptor`, just made, shows that only the last quarter is left: the kernel gives the lowest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and descriptor >= soft - soft // 4
