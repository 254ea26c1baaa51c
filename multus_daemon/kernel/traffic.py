"""Traffic of interfaces in other network namespaces, read from the host's.

Usually no thread enters a namespace: the host's namespace has an id for each other one, with which the kernel reads
links there. The kernel frees an id with its namespace and gives it to the next, so a descriptor keeps each namespace
alive while its id is looked up, and no longer. After that, it is used while the path leads to the same file.

Format: rtnetlink(7); linux/net_namespace.h; struct ifinfomsg, struct rtnl_link_stats64 of linux/if_link.h.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.links import EXT_MASK_SKIP_STATS, IFLA_EXT_MASK, RTM_GETLINK, RTM_NEWLINK
from multus_daemon.kernel.netns import NamespaceError
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
from multus_daemon.runtime import threads

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
# The first eight members of struct rtnl_link_stats64, as in `Figures`.
_STATS: Final = struct.Struct("=8Q")
# The answers to one datagram, for each of which the kernel counts 4 KiB, must fit into the socket's buffer: 200 KiB,
# unless an operator sets another size. With more requests in a datagram a reading takes as long.
_AT_ONCE: Final = 16
_COOKIE_SECONDS: Final = 1.0


class Figures(NamedTuple):
    """Counters of an interface since its creation; received and sent as seen in its own namespace."""

    receive_packets: int = 0
    transmit_packets: int = 0
    receive_bytes: int = 0
    transmit_bytes: int = 0
    receive_errors: int = 0
    transmit_errors: int = 0
    receive_drops: int = 0
    transmit_drops: int = 0


class UnsupportedKernelError(OSError):
    """The kernel is older than 4.20: asked about a link of another namespace, it answers about one of its own."""


@dataclass(slots=True, eq=False)
class Namespace:
    """The network namespace of a container on record."""

    path: str
    identity: str
    """The identity in the container's record (`netns.identity`); empty if not known."""
    recorded: float
    """Unix time of the record, which is younger than the namespace; 0 if not known."""
    known: tuple[object, int] = (None, _NO_ID)
    """The file at the path when the id was looked up (`file`), and the id."""

    def file(self) -> object:
        """Return a value that identifies the file at the path; None without one. Below /proc it differs each time."""
        try:
            status = os.stat(self.path)
        except (OSError, ValueError):
            return None
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def open(self, own: os.stat_result) -> int | None:
        """Return a descriptor of the recorded namespace; None if it is no longer at the path.

        `own`: status of the thread's namespace, which is no container's.
        """
        try:
            descriptor = namespaces.open_path(self.path)
        except NamespaceError:
            return None
        with contextlib.suppress(OSError):
            if self._is_on_record(descriptor, own):
                return descriptor
        os.close(descriptor)
        return None

    def _is_on_record(self, descriptor: int, own: os.stat_result) -> bool:
        """Return True if the descriptor is of the recorded namespace. Raises OSError."""
        found = os.fstat(descriptor)
        if os.path.samestat(found, own):
            return False
        cookie = ""
        # A namespace that got the same number later is younger than the record. In /proc an inode is new at each look.
        if not self.path.startswith("/proc/") and 0 < self.recorded < found.st_ctime:
            # Unless the clock was set back between the two.
            if not namespaces.cookie_of(self.identity):
                return False
            cookie = threads.start(partial(_cookie, descriptor), name="cookie").result(_COOKIE_SECONDS)
        return not self.identity or not namespaces.differ(self.identity, namespaces.identity(descriptor, cookie))


def _cookie(descriptor: int) -> str:
    """Return the cookie of a namespace, which a thread of its own enters. Raises OSError."""
    namespaces.enter(descriptor)
    with contextlib.closing(Socket()) as inside:
        return inside.netns_cookie


class NamespaceSocket(Socket):
    """Finds the ids of other namespaces, and reads the counters of their interfaces.

    Blocks; for one thread, in the host's namespace. After an error, make a new one.
    """

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

    @contextlib.contextmanager
    def ids_of(self, asked: Iterable[Namespace]) -> Iterator[dict[Namespace, int]]:
        """Yield an id for each namespace that still exists; the kernel makes missing ids. Raises OSError.

        During the block the ids stay valid. The kernel removes an id together with its namespace.
        """
        with contextlib.ExitStack() as stack:
            opened: dict[Namespace, int] = {}
            own = os.stat(namespaces.OWN)
            for namespace in asked:
                if (descriptor := namespace.open(own)) is not None:
                    stack.callback(os.close, descriptor)
                    opened[namespace] = descriptor
            found = self._look_up_ids(opened)
            if missing := {namespace: opened[namespace] for namespace in opened.keys() - found.keys()}:
                any_id = attribute(_NETNSA_NSID, _SIGNED.pack(_NO_ID))
                # What fails has no id after it: another program may have made one meanwhile.
                requests = [_RTGEN + attribute(_NETNSA_FD, descriptor) + any_id for descriptor in missing.values()]
                self.batch([Request(_RTM_NEWNSID, body) for body in requests])
                found |= self._look_up_ids(missing)
            yield found

    def read(self, asked: Sequence[tuple[Namespace, Sequence[str]]]) -> list[dict[str, Figures]]:
        """Return for each namespace the counters of the asked interfaces that exist, by name. Raises OSError.

        Opens as many descriptors as there are namespaces whose id is not known.
        """
        found: list[dict[str, Figures]] = [{} for _ in asked]
        files = {namespace: namespace.file() for namespace, _ in asked}
        with self.ids_of(namespace for namespace, file in files.items() if file and namespace.known[0] != file) as ids:
            for namespace, number in ids.items():
                namespace.known = files[namespace], number
            places = [
                (figures, namespace.known[1], name)
                for (namespace, names), figures in zip(asked, found, strict=True)
                if files[namespace] and namespace.known[0] == files[namespace]
                for name in names
            ]
            for position, kind, message in self._answers_to([_look_up(number, name) for _, number, name in places]):
                # No link of that name: an error.
                if kind == RTM_NEWLINK:
                    figures, _, name = places[position]
                    counters = attributes(message, HEADER.size + len(_LINK)).get(_IFLA_STATS64, b"")
                    if len(counters) >= _STATS.size:
                        figures[name] = Figures._make(_STATS.unpack_from(counters))
            for (namespace, _), figures in zip(asked, found, strict=True):
                if namespace not in ids and namespace.file() != files[namespace]:
                    # Another namespace may have had the id already.
                    figures.clear()
        return found

    def _look_up_ids(self, opened: Mapping[Namespace, int]) -> dict[Namespace, int]:
        requests = [Request(_RTM_GETNSID, _RTGEN + attribute(_NETNSA_FD, descriptor)) for descriptor in opened.values()]
        asked, found = list(opened), dict[Namespace, int]()
        for position, kind, message in self._answers_to(requests):
            value = attributes(message, HEADER.size + len(_RTGEN)).get(_NETNSA_NSID) if kind == _RTM_NEWNSID else None
            if value and (number := _SIGNED.unpack(value)[0]) != _NO_ID:
                found[asked[position]] = number
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


def _look_up(netns_id: int, name: str) -> Request:
    """Ask for the link of that name in another namespace."""
    wanted = attribute(_IFLA_IFNAME, name) + attribute(IFLA_EXT_MASK, EXT_MASK_SKIP_STATS)
    return Request(RTM_GETLINK, _LINK + attribute(_IFLA_TARGET_NETNSID, netns_id) + wanted)
