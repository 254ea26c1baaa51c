"""rtnetlink(7) messages on a blocking socket.

Not pyroute2: its synchronous sockets run an event loop for each request, its asynchronous ones take twice the time
(2.6 ms against 1.2 ms for the links, address and route of one pod), and its message classes 0.1 ms for each message.
Format: netlink(7), rtnetlink(7), linux/netlink.h.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon import deadlines

SOL_NETLINK: Final = 270
NETLINK_ADD_MEMBERSHIP: Final = 1
NETLINK_EXT_ACK: Final = 11
NETLINK_GET_STRICT_CHK: Final = 12
# asm-generic/socket.h; since Linux 5.14.
_SO_NETNS_COOKIE: Final = 71

NLM_F_REQUEST: Final = 0x1
NLM_F_ACK: Final = 0x4
NLM_F_ECHO: Final = 0x8
NLM_F_DUMP: Final = 0x300
NLM_F_EXCL: Final = 0x200
NLM_F_CREATE: Final = 0x400
NLM_F_REPLACE: Final = 0x100
# In answers.
NLM_F_DUMP_INTR: Final = 0x10
NLM_F_CAPPED: Final = 0x100
NLM_F_ACK_TLVS: Final = 0x200

_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_NLMSGERR_ATTR_MSG: Final = 1
# struct nlmsghdr: length, kind, flags, sequence number, port.
HEADER: Final = struct.Struct("=IHHII")
_ERROR: Final = struct.Struct("=i")
# struct nlattr: length, kind.
_ATTRIBUTE: Final = struct.Struct("=HH")
_UNSIGNED: Final = struct.Struct("=I")
_PADDING: Final = (b"", b"\0\0\0", b"\0\0", b"\0")
# Without NLA_F_NESTED and NLA_F_NET_BYTEORDER.
KIND_MASK: Final = 0x3FFF

RECEIVE_BYTES: Final = 64 * 1024
TIMEVAL: Final = struct.Struct("@ll")
_DUMP_ATTEMPTS: Final = 5
# The requests of one datagram, and as many refusals, must fit into the socket's buffers of 200 KiB.
_BATCH_REQUESTS: Final = 100


# --- attributes ------------------------------------------------------------------------------------------------------


def attribute(kind: int, value: bytes | int | str) -> bytes:
    """Encode one attribute: bytes as they are, an int in 32 bits (or struct.error), a str with a NUL at its end."""
    if not isinstance(value, bytes):
        value = _UNSIGNED.pack(value) if isinstance(value, int) else value.encode() + b"\0"
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + _PADDING[len(value) & 3]


def attributes(data: bytes, offset: int = 0, mask: int = KIND_MASK) -> dict[int, bytes]:
    """Decode the attributes from `offset` on, by kind, in order; the last one of a kind counts.

    `mask`: the bits of a kind that are kept. Raises OSError (EBADMSG).
    """
    # A link has forty attributes, and each ADD reads several links: the loop calls only the decoder.
    found = {}
    header, unpack = _ATTRIBUTE.size, _ATTRIBUTE.unpack_from
    end = len(data)
    while offset + header <= end:
        length, kind = unpack(data, offset)
        if not header <= length <= end - offset:
            raise OSError(errno.EBADMSG, "netlink: an attribute of the kernel is cut off")
        found[kind & mask] = data[offset + header : offset + length]
        offset += (length + 3) & ~3
    return found


def to_number(value: bytes | None) -> int:
    """Decode an attribute of 32 bits; 0 if there is none."""
    number: int = _UNSIGNED.unpack_from(value)[0] if value else 0
    return number


def to_text(value: bytes | None) -> str:
    """Decode a string, without its NUL; empty if there is none."""
    return value.rstrip(b"\0").decode("utf-8", "replace") if value else ""


# --- messages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the kernel."""

    kind: int
    """RTM_…"""
    body: bytes
    """The message after its netlink header."""
    flags: int = 0
    """NLM_F_…, besides those that the socket sets."""


class Socket:
    """A netlink socket of the namespace in which the calling thread is now, for rtnetlink. Blocks; for one thread."""

    def __init__(self, family: int = socket.NETLINK_ROUTE) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, family)
        try:
            # The kernel answers within `send`; the limit is for a kernel that does not. Python's own timeout would
            # poll before each call.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(deadlines.NETLINK_SECONDS, 0))
            # Errors with the kernel's own words, dumps filtered by the kernel. Old kernels work without both.
            for option in (NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK):
                try:
                    self._socket.setsockopt(SOL_NETLINK, option, 1)
                except OSError as error:
                    if error.errno != errno.ENOPROTOOPT:
                        raise
        except BaseException:
            self._socket.close()
            raise
        self._sequence = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    @property
    def netns_cookie(self) -> str:
        """The cookie of the socket's namespace; empty before Linux 5.14."""
        try:
            cookie = self._socket.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError:
            return ""
        return f"{int.from_bytes(cookie, sys.byteorder):x}"

    def request(self, request: Request) -> list[bytes]:
        """Send one request and wait for its acknowledgement; return the bodies of the messages that came with it.

        Raises OSError with the kernel's errno and words, TimeoutError if no answer comes.
        """
        bodies, _ = self._receive(self._send((request,), NLM_F_ACK))
        return bodies

    def look_up(self, request: Request) -> bytes:
        """Return the body of the one message that answers, without an acknowledgement. Raises as `request` does."""
        sequence = self._send((request,), 0)
        _, kind, flags, message = next(self._answers(sequence, sequence))
        if kind == _NLMSG_ERROR and (error := _error_in(message, kind, flags)) is not None:
            raise error
        return message[HEADER.size :]

    def dump(self, request: Request, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Return the bodies of all objects that match. Try again up to 5 times if a change interrupts the dump.

        `keep`: returns False for bodies to drop; there may be 100,000. Raises OSError with the kernel's errno and text,
        EINTR if every attempt was interrupted.
        """
        for _ in range(_DUMP_ATTEMPTS):
            sequence = self._send((request,), NLM_F_DUMP)
            try:
                bodies, interrupted = self._receive(sequence, keep)
            except InterruptedError:
                continue
            if not interrupted:
                return bodies
        raise InterruptedError(errno.EINTR, f"dump interrupted {_DUMP_ATTEMPTS} times by changes meanwhile")

    def batch(self, requests: Sequence[Request]) -> dict[int, OSError]:
        """Send requests together; return the errors, with the kernel's errno and words, by position in `requests`.

        NB: the kernel executes them in order and continues after a failure. Raises TimeoutError if no answer comes.
        """
        errors: dict[int, OSError] = {}
        for start in range(0, len(requests), _BATCH_REQUESTS):
            together = requests[start : start + _BATCH_REQUESTS]
            # Only the last one is acknowledged on success; the others answer only if they fail.
            last = self._send(together, 0, NLM_F_ACK)
            first = last - len(together) + 1
            for number, kind, flags, message in self._answers(first, last):
                if kind != _NLMSG_ERROR:
                    continue
                # NB: not raised: its traceback would hold this frame, which holds it, and with it all of the request.
                if (error := _error_in(message, kind, flags)) is not None:
                    errors[start + number - first] = error
                if number == last:
                    break
        return errors

    def _send(self, requests: Sequence[Request], flags: int, of_last: int = 0) -> int:
        """Send requests in one datagram; return the sequence number of the last one. `of_last`: its further flags."""
        parts = []
        for request in requests:
            self._sequence += 1
            more = of_last if request is requests[-1] else 0
            all_flags = request.flags | flags | more | NLM_F_REQUEST
            # Every body consists of whole attributes, so the next header is aligned.
            parts.append(HEADER.pack(HEADER.size + len(request.body), request.kind, all_flags, self._sequence, 0))
            parts.append(request.body)
        self._socket.send(b"".join(parts))
        return self._sequence

    def _receive(self, sequence: int, keep: Callable[[bytes], bool] | None = None) -> tuple[list[bytes], bool]:
        """Return the answer's messages without headers, and True if the kernel flags them as inconsistent."""
        bodies: list[bytes] = []
        interrupted = False
        for _, kind, flags, message in self._answers(sequence, sequence):
            interrupted = interrupted or bool(flags & NLM_F_DUMP_INTR)
            if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                if (error := _error_in(message, kind, flags)) is not None:
                    raise error
                break
            body = message[HEADER.size :]
            if keep is None or keep(body):
                bodies.append(body)
        return bodies, interrupted

    def _answers(self, first: int, last: int) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield, without end, the messages with these sequence numbers, as `messages` does. Raises TimeoutError."""
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError as error:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"netlink: the kernel has not answered for {deadlines.NETLINK_SECONDS} s"
                ) from error
            for message in messages(data):
                # Others are the rest of an earlier answer that an error cut short.
                if first <= message[0] <= last:
                    yield message


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield sequence number, kind, flags and the whole of each message of a datagram. Raises OSError (EBADMSG)."""
    offset = 0
    while offset + HEADER.size <= len(data):
        length, kind, flags, sequence, _ = HEADER.unpack_from(data, offset)
        if not HEADER.size <= length <= len(data) - offset:
            raise OSError(errno.EBADMSG, "netlink: a message of the kernel is cut off")
        yield sequence, kind, flags, data[offset : offset + length]
        offset += (length + 3) & ~3


def _error_in(message: bytes, kind: int, flags: int) -> OSError | None:
    """Return the error that an NLMSG_ERROR or the end of a dump reports; None if it reports success."""
    code = -_ERROR.unpack_from(message, HEADER.size)[0] if len(message) >= HEADER.size + _ERROR.size else 0
    if code <= 0:
        return None
    # The request follows the code of an NLMSG_ERROR; only its header does if the answer is "capped".
    offset = HEADER.size + _ERROR.size
    if kind == _NLMSG_ERROR:
        request_length = HEADER.unpack_from(message, offset)[0]
        offset += HEADER.size if flags & NLM_F_CAPPED else (request_length + 3) & ~3
    words = ""
    if flags & NLM_F_ACK_TLVS:
        with contextlib.suppress(OSError):
            words = to_text(attributes(message, offset).get(_NLMSGERR_ATTR_MSG))
    return OSError(code, f"{os.strerror(code)} ({words})" if words else os.strerror(code))
