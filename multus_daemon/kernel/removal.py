"""Remove links without waiting until the kernel has freed their memory.

RTM_DELLINK takes links off every list in a millisecond or two, and announces it (RTNLGRP_LINK). Then it waits until no
reader can use their memory any more (`netdev_run_todo`, an RCU barrier): 10 to 25 ms, in which the links are no longer
visible, their names are free, and no other request is held up. A thread of its own waits for that.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import threading
from collections.abc import Callable, Collection
from typing import Final

from multus_daemon.kernel import links
from multus_daemon.kernel.transport import HEADER, RECEIVE_BYTES, TIMEVAL, Socket, messages
from multus_daemon.runtime import deadline, threads

_LOOPBACK: Final = 1
"""Index of `lo`, the first link of each namespace."""
_FIRST_GROUP: Final = 1 << 30
"""The first number of the link groups that exist only during a removal. Administrators use small numbers."""
_RTMGRP_LINK: Final = 1
_LOOK_MICROSECONDS: Final = 10_000
"""Interval at which a waiting thread checks whether the kernel refused, which only the removing thread receives."""

_THREADS: Final = 64
_free = threading.BoundedSemaphore(_THREADS)


def remove(kernel: Socket, indexes: Collection[int]) -> dict[int, OSError]:
    """Remove links of the thread's namespace; return what the kernel refused, by index. Treat absent links as removed.

    `kernel`: a socket of the same namespace. On return the links, their addresses and routes, and the other ends of
    veths are off every list. Raises OSError, and Interrupted at the deadline of the context: the removal continues.
    """
    if not indexes:
        return {}
    carrier = Socket()
    if not _free.acquire(blocking=False):
        # The kernel cannot keep up with the removals: wait with it.
        return _ask(carrier, indexes)
    with contextlib.ExitStack() as mine:
        mine.callback(_free.release)
        mine.callback(carrier.close)
        notices = mine.enter_context(_notices())
        asked = threads.start(lambda: _ask(carrier, indexes, _free.release), name="links")
        mine.pop_all()
    with notices:
        if _report_all(notices, indexes, asked.done):
            # Once the removal has released the kernel's lock of links, addresses and routes are gone too.
            kernel.request(links.change(_LOOPBACK))
            return {}
    deadline.current().wait(asked)
    return asked.result()


def _ask(carrier: Socket, indexes: Collection[int], end: Callable[[], None] = lambda: None) -> dict[int, OSError]:
    """Remove the links and wait until the kernel has freed them; return the errors by index. Closes `carrier`."""
    try:
        return {} if _went_as_group(carrier, indexes) else _one_by_one(carrier, indexes)
    finally:
        carrier.close()
        end()


def _went_as_group(carrier: Socket, indexes: Collection[int]) -> bool:
    """Remove several links as one group; return True if the kernel accepted it.

    Measured: five veth pairs one by one 115 ms, as a group 26 ms. Pairs of several containers as one group, by their
    ends on the host, were no faster than in parallel.
    """
    if len(indexes) == 1:
        return False
    group = _FIRST_GROUP + secrets.randbelow(_FIRST_GROUP)
    chosen = [links.change(index, group=group) for index in indexes]
    return not carrier.batch([*chosen, links.delete_group(group)])


def _one_by_one(carrier: Socket, indexes: Collection[int]) -> dict[int, OSError]:
    # A link that is absent, or cannot be removed with a group, leaves the rest of the group in place.
    errors: dict[int, OSError] = {}
    for index in indexes:
        try:
            carrier.request(links.delete(index))
        except OSError as error:
            if error.errno != errno.ENODEV:
                errors[index] = error
    return errors


def _notices() -> socket.socket:
    """Return a socket for the kernel's notices about the links of the thread's namespace from now on."""
    notices = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    try:
        notices.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(0, _LOOK_MICROSECONDS))
        notices.bind((0, _RTMGRP_LINK))
    except BaseException:
        notices.close()
        raise
    return notices


def _report_all(notices: socket.socket, indexes: Collection[int], is_over: Callable[[], bool]) -> bool:
    """Wait for the notices that all these links are gone; False if `is_over` comes first. Raises Interrupted."""
    left = set(indexes)
    while left:
        # Each time: on a busy node the notices about other links never end.
        deadline.check()
        if is_over():
            return False
        try:
            data = notices.recv(RECEIVE_BYTES)
        except BlockingIOError:
            continue
        except OSError:
            # The kernel had no room for all notices (ENOBUFS): only its answer says what is gone.
            return False
        for _, kind, _, message in messages(data):
            if kind == links.RTM_DELLINK:
                left.discard(links.gone(message[HEADER.size :]))
    return True
