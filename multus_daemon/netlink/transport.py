"""rtnetlink(7) requests and answers on a blocking socket, encoded and decoded by pyroute2's message classes.

pyroute2's own sockets are not used: its synchronous ones run an event loop for each request, and its asynchronous ones
were measured at twice the time (2.6 ms against 1.2 ms for the links, address and route of one pod).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

SOL_NETLINK: Final = 270
NETLINK_EXT_ACK: Final = 11
NETLINK_GET_STRICT_CHK: Final = 12

NLM_F_REQUEST: Final = 0x1
NLM_F_MULTI: Final = 0x2
NLM_F_ACK: Final = 0x4
NLM_F_DUMP: Final = 0x300
NLM_F_EXCL: Final = 0x200
NLM_F_CREATE: Final = 0x400
# In answers.
NLM_F_DUMP_INTR: Final = 0x10
NLM_F_CAPPED: Final = 0x100
NLM_F_ACK_TLVS: Final = 0x200

_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_NLMSGERR_ATTR_MSG: Final = 1
_HEADER: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_ERROR: Final = struct.Struct("=i")

_RECEIVE_BYTES: Final = 64 * 1024
_ANSWER_SECONDS: Final = 10.0
_DUMP_ATTEMPTS: Final = 5


class Socket:
    """One rtnetlink socket of the namespace in which the calling thread is now. Blocks; not for several threads."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        # The kernel answers within `send`; the limit is for a kernel that does not keep to that.
        self._socket.settimeout(_ANSWER_SECONDS)
        # Errors with the kernel's own words, dumps filtered by the kernel; old kernels have neither and need neither.
        for option in (NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK):
            try:
                self._socket.setsockopt(SOL_NETLINK, option, 1)
            except OSError as error:
                if error.errno != errno.ENOPROTOOPT:
                    self._socket.close()
                    raise
        self._sequence = 0

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def request(self, kind: int, message: Any, flags: int = 0, *, answer: type[Any] | None = None) -> list[Any]:
        """Send one request and wait for its acknowledgement; the objects, of class `answer`, that came with it.

        Raises OSError with the kernel's errno and words.
        """
        sequence = self._send(kind, message, flags | NLM_F_REQUEST | NLM_F_ACK)
        objects, _ = self._receive(sequence, answer)
        return objects

    def dump(self, kind: int, message: Any, *, answer: type[Any]) -> list[Any]:
        """All objects that fit the request. A dump that a change has interrupted is begun again, 5 times at most.

        Raises OSError with the kernel's errno and words, EINTR where every attempt was interrupted.
        """
        for _ in range(_DUMP_ATTEMPTS):
            sequence = self._send(kind, message, NLM_F_REQUEST | NLM_F_DUMP)
            try:
                objects, interrupted = self._receive(sequence, answer)
            except InterruptedError:
                continue
            if not interrupted:
                return objects
        raise InterruptedError(errno.EINTR, f"dump interrupted {_DUMP_ATTEMPTS} times by changes meanwhile")

    def request_bytes(self, kind: int, body: bytes, flags: int = 0) -> None:
        """As `request`, with all that comes behind the header as bytes; nothing is told but success. Raises OSError."""
        self._sequence += 1
        size = _HEADER.size + len(body)
        self._socket.send(_HEADER.pack(size, kind, flags | NLM_F_REQUEST | NLM_F_ACK, self._sequence, 0) + body)
        self._receive(self._sequence, None)

    def _send(self, kind: int, message: Any, flags: int) -> int:
        self._sequence += 1
        message["header"].update(type=kind, flags=flags, sequence_number=self._sequence, pid=0)
        message.reset()
        message.encode()
        self._socket.send(message.data)
        return self._sequence

    def _receive(self, sequence: int, answer: type[Any] | None) -> tuple[list[Any], bool]:
        """The objects up to the end of the answer, and whether the kernel calls them inconsistent."""
        objects: list[Any] = []
        interrupted = False
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            for offset, length, kind, flags, number in _messages(data):
                if number != sequence:
                    # What is left of an earlier answer that was cut short by an error.
                    continue
                interrupted = interrupted or bool(flags & NLM_F_DUMP_INTR)
                if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                    _raise_for(data[offset : offset + length], kind, flags)
                    return objects, interrupted
                if answer is not None:
                    message = answer(data, offset=offset)
                    message.decode()
                    objects.append(message)


def _messages(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Offset, length, type, flags and sequence number of each message of a datagram."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, sequence, _ = _HEADER.unpack_from(data, offset)
        if not _HEADER.size <= length <= len(data) - offset:
            raise OSError(errno.EBADMSG, "netlink: a message of the kernel is cut off")
        yield offset, length, kind, flags, sequence
        offset += (length + 3) & ~3


def _raise_for(message: bytes, kind: int, flags: int) -> None:
    """Raise what an NLMSG_ERROR, or the end of a dump, reports; nothing if that is success."""
    code = -_ERROR.unpack_from(message, _HEADER.size)[0] if len(message) >= _HEADER.size + _ERROR.size else 0
    if code <= 0:
        return
    # Behind the code of an NLMSG_ERROR comes the request, of which only the header where the answer is "capped".
    offset = _HEADER.size + _ERROR.size
    if kind == _NLMSG_ERROR:
        request_length = _HEADER.unpack_from(message, offset)[0]
        offset += _HEADER.size if flags & NLM_F_CAPPED else (request_length + 3) & ~3
    words = _extended_ack(message, offset) if flags & NLM_F_ACK_TLVS else ""
    raise OSError(code, f"{os.strerror(code)} ({words})" if words else os.strerror(code))


def _extended_ack(message: bytes, offset: int) -> str:
    """The kernel's words in the attributes from `offset` on; empty if there are none."""
    while offset + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, offset)
        if length < _ATTRIBUTE.size:
            break
        if kind == _NLMSGERR_ATTR_MSG:
            return message[offset + _ATTRIBUTE.size : offset + length].rstrip(b"\0").decode("utf-8", "replace")
        offset += (length + 3) & ~3
    return ""
