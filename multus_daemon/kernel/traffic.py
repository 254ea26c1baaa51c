"""Traffic of interfaces in other network namespaces, read from the host's: no thread enters a namespace.

A link of another namespace is asked for by the id that the host's namespace has for that one. The kernel frees an id
with its namespace and gives it to the next. So an id is used only while a descriptor of its namespace is open, and none
is open between two reads: it would keep the namespace alive.

Format: rtnetlink(7); linux/net_namespace.h; struct ifinfomsg, struct rtnl_link_stats64 of linux/if_link.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.links import EXT_MASK_SKIP_STATS, IFLA_EXT_MASK, RTM_GETLINK, RTM_NEWLINK
from multus_daemon.kernel.transport import (
    HEADER,
    NETLINK_GET_STRICT_CHK,
    RECEIVE_BYTES,
    SOL_NETLINK,
    Request,
    Socket,
    attribute,
    attributes,
)

_RTM_NEWNSID: Final = 88
_RTM_GETNSID: Final = 90
# struct rtgenmsg with its padding.
_RTGEN: Final = bytes(4)
_NETNSA_NSID: Final = 1
_NETNSA_FD: Final = 3
_NO_ID: Final = -1

# struct ifinfomsg that names no link.
_LINK: Final = bytes(16)
_IFLA_IFNAME: Final = 3
_IFLA_STATS64: Final = 23
_IFLA_TARGET_NETNSID: Final = 46

_SIGNED: Final = struct.Struct("=i")
_ATTRIBUTE: Final = struct.Struct("=HH")
# The first eight members of struct rtnl_link_stats64, as in `Figures`.
_STATS: Final = struct.Struct("=8Q")
# The answers to one datagram, for each of which the kernel counts 4 KiB, must fit into the socket's buffer: 200 KiB,
# unless an operator sets another size. With more requests in a datagram a reading takes as long.
_AT_ONCE: Final = 16
_REQUESTS_MAX: Final = 64
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Figures(NamedTuple):
    """What an interface has counted since it was made, from the point of view of its own namespace."""

    receive_packets: int = 0
    transmit_packets: int = 0
    receive_bytes: int = 0
    transmit_bytes: int = 0
    receive_errors: int = 0
    transmit_errors: int = 0
    receive_drops: int = 0
    transmit_drops: int = 0


class UnsupportedKernelError(OSError):
    """The kernel would answer for a link of this namespace if asked for another's: it is older than 4.20."""


@dataclass(slots=True, eq=False)
class Namespace:
    """The network namespace of a container on record."""

    path: str
    identity: str
    """As on record (`netns.identity`); empty if not known."""
    recorded: float
    """Unix time of the record, which is younger than the namespace; 0 if not known."""
    _seen: tuple[int, int, int] = field(default=(0, 0, 0), init=False)
    _is_it: bool = field(default=False, init=False)
    """True if the namespace that was seen is the one on record."""
    _id: int = field(default=_NO_ID, init=False)
    _requests: dict[str, Request] = field(default_factory=dict, init=False)
    """The requests for its interfaces by that id, by name."""

    def _open(self) -> int | None:
        """Return a descriptor of the namespace on record; None if the path does not lead to it any more."""
        try:
            descriptor = os.open(self.path, _OPEN)
        except (OSError, ValueError):
            return None
        try:
            is_it = self._verify(descriptor)
        except OSError:
            is_it = False
        if is_it:
            return descriptor
        os.close(descriptor)
        return None

    def _verify(self, descriptor: int) -> bool:
        """Return whether the descriptor is of the namespace on record. Raises OSError."""
        # The kernel gives the inode's number to the next namespace at once, but the inode of a mounted namespace, and
        # its time, live as long as the mount. In /proc an inode is new at each look, so the id is asked for again.
        status = os.fstat(descriptor)
        seen = (status.st_dev, status.st_ino, status.st_ctime_ns)
        if seen != self._seen:
            self._is_it = self._is_on_record(descriptor, status)
            self._seen, self._id = seen, _NO_ID
            self._requests.clear()
        return self._is_it

    def _look_up(self, name: str) -> Request:
        """Return the request for an interface. It is kept: building 250 takes 0.5 ms."""
        if (request := self._requests.get(name)) is None:
            if len(self._requests) >= _REQUESTS_MAX:
                self._requests.clear()
            wanted = attribute(_IFLA_IFNAME, name) + attribute(IFLA_EXT_MASK, EXT_MASK_SKIP_STATS)
            body = _LINK + attribute(_IFLA_TARGET_NETNSID, self._id) + wanted
            request = self._requests[name] = Request(RTM_GETLINK, body)
        return request

    def _is_on_record(self, descriptor: int, status: os.stat_result) -> bool:
        # A namespace that got the same number later is younger than the record.
        if not self.path.startswith("/proc/") and 0 < self.recorded < status.st_ctime:
            return False
        with namespaces.opened(self.path) as checked, namespaces.opened(namespaces.OWN) as own:
            if not namespaces.is_same(descriptor, checked) or namespaces.is_same(descriptor, own):
                return False
        return not self.identity or not namespaces.differ(self.identity, namespaces.identity(descriptor))


class TrafficSocket(Socket):
    """Reads counters of interfaces in other namespaces. Blocks; for one thread, in the host's namespace."""

    def __init__(self) -> None:
        """Raises UnsupportedKernelError, OSError."""
        super().__init__()
        try:
            # An older kernel ignores the namespace's id in a request.
            is_strict = self._socket.getsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK)
        except OSError:
            is_strict = 0
        if not is_strict:
            self.close()
            raise UnsupportedKernelError(errno.ENOPROTOOPT, "the kernel does not check requests strictly (before 4.20)")

    def read(self, asked: Sequence[tuple[Namespace, Sequence[str]]]) -> list[dict[str, Figures]]:
        """Return the figures of interfaces by name, for each namespace; of those only that exist. Raises OSError.

        An id that the kernel makes for a namespace goes with that namespace.
        """
        found: list[dict[str, Figures]] = [{} for _ in asked]
        opened: list[tuple[int, Namespace]] = []
        try:
            places: list[tuple[dict[str, Figures], Namespace, str]] = []
            for (namespace, names), figures in zip(asked, found, strict=True):
                if (descriptor := namespace._open()) is not None:
                    opened.append((descriptor, namespace))
                    places += [(figures, namespace, name) for name in names]
            self._find_ids([item for item in opened if item[1]._id == _NO_ID])
            places = [place for place in places if place[1]._id != _NO_ID]
            requests = [namespace._look_up(name) for _, namespace, name in places]
            start = b""
            for position, kind, message in self._answers_to(requests):
                # No link of that name: an error.
                if kind == RTM_NEWLINK and (offset := counters_in(message, start)):
                    start = message[offset - _ATTRIBUTE.size : offset]
                    figures, _, name = places[position]
                    figures[name] = Figures._make(_STATS.unpack_from(message, offset))
        finally:
            for descriptor, _ in opened:
                os.close(descriptor)
        return found

    def id_of(self, namespace: Namespace) -> int | None:
        """Return the id of a namespace, made if it has none; None if it is gone. Raises OSError."""
        self.read([(namespace, ())])
        return None if namespace._id == _NO_ID else namespace._id

    def _find_ids(self, opened: Sequence[tuple[int, Namespace]]) -> None:
        """Look up the ids of the namespaces, and make those that are missing. Raises OSError."""
        self._look_up_ids(opened)
        if missing := [item for item in opened if item[1]._id == _NO_ID]:
            any_id = attribute(_NETNSA_NSID, _SIGNED.pack(_NO_ID))
            # What fails has no id after it: another program may have made one meanwhile.
            self.batch([Request(_RTM_NEWNSID, _RTGEN + attribute(_NETNSA_FD, fd) + any_id) for fd, _ in missing])
            self._look_up_ids(missing)

    def _look_up_ids(self, opened: Sequence[tuple[int, Namespace]]) -> None:
        requests = [Request(_RTM_GETNSID, _RTGEN + attribute(_NETNSA_FD, fd)) for fd, _ in opened]
        for position, kind, message in self._answers_to(requests):
            answer = attributes(message, HEADER.size + len(_RTGEN)) if kind == _RTM_NEWNSID else {}
            if _NETNSA_NSID in answer:
                opened[position][1]._id = _SIGNED.unpack(answer[_NETNSA_NSID])[0]

    def _answers_to(self, requests: Sequence[Request]) -> Iterator[tuple[int, int, bytes]]:
        """Yield position, kind and the whole of the one message that answers each request. Raises OSError."""
        receive, unpack = self._socket.recv, HEADER.unpack_from
        for start in range(0, len(requests), _AT_ONCE):
            together = requests[start : start + _AT_ONCE]
            first = self._send(together, 0) - len(together) + 1
            for _ in together:
                # The kernel has answered within `send`; what is not there now never comes.
                message = receive(RECEIVE_BYTES, socket.MSG_DONTWAIT)
                _, kind, _, sequence, _ = unpack(message)
                yield start + sequence - first, kind, message


def counters_in(message: bytes, start: bytes = b"") -> int:
    """Return the offset of the counters in an RTM_NEWLINK, header included; 0 if it has none.

    `start`: the four bytes before them in another link's message, if known. To find these takes a tenth of the time.
    """
    if start:
        found = message.find(start)
        # In two places they are also in a text that somebody chose, such as the link's alias.
        if 0 < found <= len(message) - _ATTRIBUTE.size - _STATS.size and message.find(start, found + 1) < 0:
            return found + _ATTRIBUTE.size
    # Not by `attributes`: thirty others come before, and 250 pods are read at once.
    unpack, kind = _ATTRIBUTE.unpack_from, 0
    offset, length = HEADER.size + len(_LINK), 0
    try:
        while kind != _IFLA_STATS64:
            offset += (length + 3) & ~3
            length, kind = unpack(message, offset)
            if not length:
                return 0
    except struct.error:
        return 0
    offset += _ATTRIBUTE.size
    return offset if offset + _STATS.size <= len(message) else 0
