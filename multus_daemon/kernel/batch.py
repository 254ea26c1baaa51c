"""The beginnings of many netlink messages with one system call.

A socket call for each message costs Python three times what it costs the kernel.

Format: recvmmsg(2); struct mmsghdr, struct cmsghdr of linux/socket.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Sequence
from typing import Final

from multus_daemon.kernel.transport import SOL_NETLINK

_ID_BYTES: Final = 4


class _Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("parts", ctypes.c_void_p),
        ("part_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("length", ctypes.c_uint))


_libc = ctypes.CDLL(None, use_errno=True)


class Batch:
    """Room for the first bytes of each of so many messages, and for the namespace's id that comes with them."""

    def __init__(self, count: int, size: int) -> None:
        """`size`: bytes of each message that are read; the rest is dropped. A multiple of 8."""
        self.count = count
        self.data = bytearray(count * size)
        """Message n begins at n * size."""
        space = socket.CMSG_SPACE(_ID_BYTES)
        self._control = bytearray(count * space)
        data = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        control = ctypes.addressof(ctypes.c_char.from_buffer(self._control))
        self._parts = (_Part * count)(*[_Part(data + number * size, size) for number in range(count)])
        parts = ctypes.addressof(self._parts)
        self._headers = (_Message * count)()
        for number, message in enumerate(self._headers):
            message.header = _Header(
                None, 0, parts + number * ctypes.sizeof(_Part), 1, control + number * space, space, 0
            )
        # The kernel overwrites lengths, and leaves the control part of a message that has none as it was.
        self._fresh = bytes(self._headers)
        self._no_control = bytes(len(self._control))
        words = memoryview(self._control).cast("i")
        step = space // words.itemsize
        self._levels = words[ctypes.sizeof(ctypes.c_size_t) // words.itemsize :: step]
        self._ids = words[socket.CMSG_LEN(0) // words.itemsize :: step]

    def receive(self, descriptor: int) -> int:
        """Read what is there, and return the number of messages; 0 if there is none. Never blocks; raises OSError."""
        ctypes.memmove(self._headers, self._fresh, len(self._fresh))
        self._control[:] = self._no_control
        received: int = _libc.recvmmsg(descriptor, self._headers, self.count, socket.MSG_DONTWAIT, None)
        if received >= 0:
            return received
        code = ctypes.get_errno()
        if code in (errno.EAGAIN, errno.EINTR):
            return 0
        raise OSError(code, os.strerror(code))

    def ids(self, received: int) -> tuple[set[int], Sequence[int]]:
        """Return the ids of other namespaces, and the numbers of the messages that come from the socket's own."""
        levels, ids = self._levels[:received].tolist(), self._ids[:received].tolist()
        if 0 not in levels:
            return set(ids), ()
        own = [number for number, level in enumerate(levels) if level != SOL_NETLINK]
        return {found for found, level in zip(ids, levels, strict=True) if level == SOL_NETLINK}, own
