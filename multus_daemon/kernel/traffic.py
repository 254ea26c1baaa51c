"""Traffic of interfaces in other network namespaces, read from the host's: no thread enters a namespace
whose age is certain.

A link of another namespace is asked for by the id that the host's namespace has for that one. No descriptor of a
namespace stays open: it would keep the namespace alive. The kernel frees an id with its namespace and gives it to the
next, but it reports the end of each, so that ids are looked up once.

Format: rtnetlink(7); linux/net_namespace.h; struct ifinfomsg, struct rtnl_link_stats64 of linux/if_link.h.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.links import EXT_MASK_SKIP_STATS, IFLA_EXT_MASK, RTM_GETLINK, RTM_NEWLINK
from multus_daemon.kernel.transport import (
    HEADER,
    NETLINK_ADD_MEMBERSHIP,
    NETLINK_GET_STRICT_CHK,
    RECEIVE_BYTES,
    SOL_NETLINK,
    Request,
    Socket,
    attribute,
    attributes,
)
from multus_daemon.runtime import threads

_RTM_NEWNSID: Final = 88
_RTM_DELNSID: Final = 89
_RTM_GETNSID: Final = 90
_RTNLGRP_NSID: Final = 28
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
# The first eight members of struct rtnl_link_stats64, as in `Figures`.
_STATS: Final = struct.Struct("=8Q")
# The answers to one datagram, for each of which the kernel counts 4 KiB, must fit into the socket's buffer: 200 KiB,
# unless an operator sets another size. With more requests in a datagram a reading takes as long.
_AT_ONCE: Final = 16
_NOT_BLOCKING: Final = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
# For 500 reports; the limit of an operator may be less.
_ENDS_BYTES: Final = 1024 * 1024
_ENDS_MAX: Final = 10_000
_COOKIE_SECONDS: Final = 1.0
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


@dataclass(slots=True)
class _Known:
    """The id of a namespace."""

    id: int
    ended: int
    """How many namespaces with this id had ended before."""
    epoch: object


@dataclass(slots=True, eq=False)
class Namespace:
    """The network namespace of a container on record."""

    path: str
    identity: str
    """As on record (`netns.identity`); empty if not known."""
    recorded: float
    """Unix time of the record, which is younger than the namespace; 0 if not known."""
    _known: _Known | None = field(default=None, init=False)

    def open(self) -> int | None:
        """Return a descriptor of the namespace on record; None if the path does not lead to it any more."""
        try:
            descriptor = os.open(self.path, _OPEN)
        except (OSError, ValueError):
            return None
        try:
            is_it = self._is_on_record(descriptor)
        except OSError:
            is_it = False
        if is_it:
            return descriptor
        os.close(descriptor)
        return None

    def _is_on_record(self, descriptor: int) -> bool:
        """Report whether the descriptor is of the namespace on record. Raises OSError."""
        with namespaces.opened(self.path) as checked, namespaces.opened(namespaces.OWN) as own:
            if not namespaces.is_same(descriptor, checked) or namespaces.is_same(descriptor, own):
                return False
        cookie = ""
        # A namespace that got the same number later is younger than the record. In /proc an inode is new at each look.
        if not self.path.startswith("/proc/") and 0 < self.recorded < os.fstat(descriptor).st_ctime:
            # Unless the clock was set back between the two.
            if not namespaces.cookie_of(self.identity):
                return False
            cookie = threads.start(partial(_cookie, descriptor), name="cookie").result(_COOKIE_SECONDS)
        return not self.identity or not namespaces.differ(self.identity, namespaces.identity(descriptor, cookie))


def _cookie(descriptor: int) -> str:
    """Return the cookie of a namespace. In a thread that ends then. Raises OSError."""
    namespaces.enter(descriptor)
    with contextlib.closing(Socket()) as inside:
        return inside.netns_cookie


class NamespaceSocket(Socket):
    """Finds the ids of other namespaces. Blocks; for one thread, in the host's namespace."""

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

    def ids_of(self, asked: Iterable[Namespace]) -> dict[Namespace, int]:
        """Return the ids of namespaces, made if they have none, without those that are gone. Raises OSError.

        An id that the kernel makes for a namespace goes with that namespace.
        """
        found: dict[Namespace, int] = {}
        opened: dict[Namespace, int] = {}
        try:
            for namespace in asked:
                if (descriptor := namespace.open()) is not None:
                    opened[namespace] = descriptor
            found |= self._look_up_ids(opened)
            if missing := {namespace: opened[namespace] for namespace in opened.keys() - found.keys()}:
                any_id = attribute(_NETNSA_NSID, _SIGNED.pack(_NO_ID))
                # What fails has no id after it: another program may have made one meanwhile.
                requests = [_RTGEN + attribute(_NETNSA_FD, descriptor) + any_id for descriptor in missing.values()]
                self.batch([Request(_RTM_NEWNSID, body) for body in requests])
                found |= self._look_up_ids(missing)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return found

    def _look_up_ids(self, opened: Mapping[Namespace, int]) -> dict[Namespace, int]:
        requests = [Request(_RTM_GETNSID, _RTGEN + attribute(_NETNSA_FD, descriptor)) for descriptor in opened.values()]
        found: dict[Namespace, int] = {}
        everyone = list(opened)
        for position, kind, message in self._answers_to(requests):
            if kind == _RTM_NEWNSID and (number := _id_in(message)) != _NO_ID:
                found[everyone[position]] = number
        return found

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


class TrafficSocket(NamespaceSocket):
    """Reads counters of interfaces in other namespaces. After an error it is of no use. See `NamespaceSocket`."""

    def __init__(self) -> None:
        """Raises UnsupportedKernelError, OSError."""
        super().__init__()
        self._ended: Counter[int] = Counter()
        """How many namespaces have ended, by id."""
        self._epoch = object()
        """Another one after ends that were not reported."""
        try:
            self._ends = socket.socket(socket.AF_NETLINK, _NOT_BLOCKING, socket.NETLINK_ROUTE)
        except BaseException:
            super().close()
            raise
        try:
            self._ends.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ENDS_BYTES)
            self._ends.bind((0, 0))
            self._ends.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, _RTNLGRP_NSID)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the sockets."""
        self._ends.close()
        super().close()

    def read(self, asked: Sequence[tuple[Namespace, Sequence[str]]]) -> list[dict[str, Figures]]:
        """Return the figures of interfaces by name, for each namespace; of those only that exist. Raises OSError."""
        self._note_ends()
        unknown = [namespace for namespace, _ in asked if self._known(namespace) is None]
        for namespace, number in self.ids_of(unknown).items():
            namespace._known = _Known(number, self._ended[number], self._epoch)
        found: list[dict[str, Figures]] = [{} for _ in asked]
        places = [
            (figures, known, name)
            for (namespace, names), figures in zip(asked, found, strict=True)
            if (known := self._known(namespace))
            for name in names
        ]
        for position, kind, message in self._answers_to([_look_up(known.id, name) for _, known, name in places]):
            # No link of that name: an error.
            if kind == RTM_NEWLINK:
                figures, _, name = places[position]
                counters = attributes(message, HEADER.size + len(_LINK)).get(_IFLA_STATS64, b"")
                if len(counters) >= _STATS.size:
                    figures[name] = Figures._make(_STATS.unpack_from(counters))
        if self._note_ends():
            # Another namespace may have had the id already.
            for (namespace, _), figures in zip(asked, found, strict=True):
                if self._known(namespace) is None:
                    figures.clear()
        return found

    def _known(self, namespace: Namespace) -> _Known | None:
        """Return what is known of the namespace, unless it has ended since."""
        known = namespace._known
        if known and known.epoch is self._epoch and known.ended == self._ended.get(known.id, 0):
            return known
        return None

    def _note_ends(self) -> bool:
        """Take note of the namespaces that have ended since the last call; report whether any has. Raises OSError."""
        any_has = False
        for _ in range(_ENDS_MAX):
            try:
                message = self._ends.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                # More have ended than the kernel keeps.
                self._epoch, any_has = object(), True
                continue
            if HEADER.unpack_from(message)[1] == _RTM_DELNSID:
                self._ended[_id_in(message)] += 1
                any_has = True
        return any_has


def _look_up(netns_id: int, name: str) -> Request:
    """Ask for the link of that name in another namespace."""
    wanted = attribute(_IFLA_IFNAME, name) + attribute(IFLA_EXT_MASK, EXT_MASK_SKIP_STATS)
    return Request(RTM_GETLINK, _LINK + attribute(_IFLA_TARGET_NETNSID, netns_id) + wanted)


def _id_in(message: bytes) -> int:
    """Return the id in an RTM_NEWNSID or RTM_DELNSID, header included; -1 if there is none. Raises OSError."""
    value = attributes(message, HEADER.size + len(_RTGEN)).get(_NETNSA_NSID)
    return _SIGNED.unpack(value)[0] if value else _NO_ID
