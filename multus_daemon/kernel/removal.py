"""Removing links without waiting until the kernel has let go of their memory.

RTM_DELLINK takes links off every list in a millisecond or two, and tells so (RTNLGRP_LINK). Then it waits until nobody
can be reading their memory any more (`netdev_run_todo`, an RCU barrier): 10 to 25 ms, in which nothing of them can be
seen, their names are free, and nobody else is held up. That wait is left to a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Collection
from typing import Final

from multus_daemon.kernel import links
from multus_daemon.kernel.transport import HEADER_BYTES, Socket, messages
from multus_daemon.runtime import deadline, threads

_LOOPBACK: Final = 1
"""Index of `lo`, the first link of each namespace."""
_FIRST_GROUP: Final = 1 << 30
"""Administrators' groups have small numbers, and ours is there for a moment."""
_RTMGRP_LINK: Final = 1
_RECEIVE_BYTES: Final = 64 * 1024
_TIMEVAL: Final = struct.Struct("@ll")
_LOOK_MICROSECONDS: Final = 10_000
"""Between two looks whether the kernel has refused, which it tells the other thread only."""

_THREADS: Final = 64
_free = threading.BoundedSemaphore(_THREADS)


def remove(indexes: Collection[int]) -> dict[int, OSError]:
    """Remove the links of the namespace in which the thread is; what the kernel refused, by index. Absent is done.

    On return they are off every list, their addresses and routes gone, and with veth so are the other ends. Raises
    OSError, and Interrupted at the deadline of the context: what has been asked for is done nevertheless.
    """
    if not indexes:
        return {}
    carrier = Socket()
    if not _free.acquire(blocking=False):
        # So many are on their way that the kernel can't follow: this one waits with it.
        return _ask(carrier, indexes)
    with contextlib.ExitStack() as mine:
        mine.callback(_free.release)
        mine.callback(carrier.close)
        notices = mine.enter_context(contextlib.closing(_Notices()))
        asked = threads.start(lambda: _ask(carrier, indexes, _free.release), name="links")
        mine.pop_all()
    with contextlib.closing(notices):
        if notices.tell_of_all(indexes, asked.done):
            _wait_for_lock()
            return {}
    deadline.current().wait(asked)
    return asked.result()


def _ask(carrier: Socket, indexes: Collection[int], end: Callable[[], None] = lambda: None) -> dict[int, OSError]:
    """As `remove`, and wait as long as the kernel does. The socket is closed."""
    try:
        return {} if _went_as_group(carrier, indexes) else _one_by_one(carrier, indexes)
    finally:
        carrier.close()
        end()


def _went_as_group(carrier: Socket, indexes: Collection[int]) -> bool:
    """Remove several at once; whether that is done.

    Measured: five veth pairs one by one 115 ms, as a group 26 ms. Pairs of several containers as one group, by their
    ends on the host, were no faster than side by side.
    """
    if len(indexes) == 1:
        return False
    group = _FIRST_GROUP + secrets.randbelow(_FIRST_GROUP)
    chosen = [links.set_group(index, group) for index in indexes]
    return not carrier.batch([*chosen, links.delete_group(group)])


def _one_by_one(carrier: Socket, indexes: Collection[int]) -> dict[int, OSError]:
    """One that is absent, or can't go with a group, leaves the others of it where they were."""
    errors: dict[int, OSError] = {}
    for index in indexes:
        try:
            carrier.request(links.delete(index))
        except OSError as error:
            if error.errno != errno.ENODEV:
                errors[index] = error
    return errors


def _wait_for_lock() -> None:
    """Until who removes links has given back the kernel's lock of links: all that goes with them is done then."""
    kernel = Socket()
    try:
        kernel.request(links.set_flags(_LOOPBACK, 0, 0))
    finally:
        kernel.close()


class _Notices:
    """What the kernel tells of the links of a namespace from now on."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, _LOOK_MICROSECONDS))
            self._socket.bind((0, _RTMGRP_LINK))
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def tell_of_all(self, indexes: Collection[int], is_over: Callable[[], bool]) -> bool:
        """Whether all these links are told to be gone before it is over. Raises Interrupted."""
        left = set(indexes)
        while left:
            # Each time: on a busy node the notices about other links never end.
            deadline.check()
            if is_over():
                return False
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                # The kernel had no room for all notices (ENOBUFS): only its answer says what is gone.
                return False
            for _, kind, _, message in messages(data):
                if kind == links.RTM_DELLINK:
                    left.discard(links.gone(message[HEADER_BYTES:]))
        return True
