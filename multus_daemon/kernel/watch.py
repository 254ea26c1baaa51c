"""Changes of links and addresses on the host and in the namespaces of its pods, from one socket.

A netlink socket of the host that listens to all namespaces gets the messages of each namespace to which the host has
given an id; the id comes as a control message. No thread enters a namespace, and no descriptor of one stays open. The
kernel frees an id with its namespace and gives it to the next: a change may be reported for a namespace that is not the
one that was followed.

Format: rtnetlink(7); netlink(7), NETLINK_LISTEN_ALL_NSID; linux/filter.h.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from dataclasses import dataclass, field
from typing import Final

from multus_daemon.kernel.links import IFF_UP, RTM_DELLINK, RTM_NEWLINK
from multus_daemon.kernel.traffic import Namespace, NamespaceSocket
from multus_daemon.kernel.transport import NETLINK_ADD_MEMBERSHIP, SOL_NETLINK
from multus_daemon.runtime import bpf

_RTM_DELADDR: Final = 21
_RTNLGRP_LINK: Final = 1
_RTNLGRP_IPV4_IFADDR: Final = 5
_RTNLGRP_IPV6_IFADDR: Final = 9
_NETLINK_LISTEN_ALL_NSID: Final = 8
_SO_RCVBUFFORCE: Final = 33
_AF_BRIDGE: Final = 7
_IFLA_IFNAME: Final = 3

_BUFFER_BYTES: Final = 2 * 1024 * 1024
"""Size of the socket's receive buffer; a message takes about 2 KiB. The kernel doubles the size."""
_READ_BYTES: Final = 64
"""Bytes to read of each message: its header, the link's index and flags, and the first attribute, which is the name."""
_CONTROL_BYTES: Final = socket.CMSG_SPACE(4)
"""Size of the control message with the id of a namespace."""
_MESSAGES_MAX: Final = 2048
"""Maximum number of messages that one call of `changes` reads, in 6 ms."""
# The kind of struct nlmsghdr; the index of the link of struct ifaddrmsg.
_ADDRESS: Final = struct.Struct("=4xH14xI")
# After the header: index and flags of struct ifinfomsg; kind and value of the first attribute.
_LINK: Final = struct.Struct("=20xiI6xH16s")
_ID: Final = struct.Struct("=i")
# Offsets in a message.
_TYPE_OFFSET: Final = 4
_FAMILY_OFFSET: Final = 16


@dataclass(slots=True)
class Changes:
    """Changes that one call of `Watch.changes` has read."""

    namespaces: set[int] = field(default_factory=set)
    """The ids of the other namespaces in which something has changed."""
    links: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """Links of the host by name: their index, 0 if it was removed, and whether it is up."""
    addresses: set[str] = field(default_factory=set)
    """The names of links of the host that lost an address."""
    lost: bool = False
    """True if there were more messages than the kernel keeps: anything may have changed."""
    more: bool = False
    """True if there may be more to read."""


class Watch:
    """A netlink socket with the kernel's reports of changes. Never blocks; for one thread, in the host's namespace."""

    def __init__(self) -> None:
        """Raises OSError: PermissionError without a capability, UnsupportedKernelError."""
        with contextlib.ExitStack() as opened:
            self._ids = opened.enter_context(contextlib.closing(NamespaceSocket()))
            flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self._socket = opened.enter_context(socket.socket(socket.AF_NETLINK, flags, socket.NETLINK_ROUTE))
            _set_buffer(self._socket)
            _attach_filter(self._socket)
            try:
                self._socket.setsockopt(SOL_NETLINK, _NETLINK_LISTEN_ALL_NSID, 1)
            except PermissionError as error:
                text = "the capability NET_BROADCAST is missing; add it to the daemon's container, as in the manifest"
                raise PermissionError(error.errno, text) from error
            # A socket without an address of its own gets no notices.
            self._socket.bind((0, 0))
            for group in (_RTNLGRP_LINK, _RTNLGRP_IPV4_IFADDR, _RTNLGRP_IPV6_IFADDR):
                self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
            self._opened = opened.pop_all()

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there are changes; -1 if it is closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the sockets."""
        self._opened.close()

    def follow(self, path: str, identity: str, recorded: float = 0.0) -> int | None:
        """Return the id of the namespace at the path, which the kernel makes if needed; None if another one is there.

        `identity`, `recorded`: see `traffic.Namespace`. From now on its changes are reported. Raises OSError.
        """
        namespace = Namespace(path, identity, recorded)
        with self._ids.ids_of((namespace,)) as ids:
            return ids.get(namespace)

    def changes(self) -> Changes:
        """Return the links and addresses that the kernel has reported since the last call. Raises OSError."""
        found = Changes()
        receive, namespaces = self._socket.recvmsg, found.namespaces
        lessened: set[int] = set()
        gone: set[int] = set()
        for _ in range(_MESSAGES_MAX):
            try:
                message, control, _, _ = receive(_READ_BYTES, _CONTROL_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                found.lost = True
                continue
            if control:
                namespaces.add(_ID.unpack(control[0][2])[0])
            else:
                _take(message, found, lessened, gone)
        else:
            found.more = True
        for index in lessened - gone:
            # A link that is gone reports itself.
            with contextlib.suppress(OSError):
                found.addresses.add(socket.if_indextoname(index))
        return found


def _take(message: bytes, found: Changes, lessened: set[int], gone: set[int]) -> None:
    """Add a host's change to `found`, indexes of links that lost an address to `lessened`, removed ones to `gone`."""
    kind, index = _ADDRESS.unpack_from(message)
    if kind == _RTM_DELADDR:
        lessened.add(index)
        return
    index, flags, attribute, value = _LINK.unpack_from(message)
    if attribute == _IFLA_IFNAME:
        name = value.partition(b"\0")[0].decode(errors="replace")
        if kind == RTM_DELLINK:
            gone.add(index)
            found.links[name] = (0, False)
        else:
            found.links[name] = (index, bool(flags & IFF_UP))


def _set_buffer(watched: socket.socket) -> None:
    try:
        watched.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    except OSError:
        # Without CAP_NET_ADMIN in the first user namespace: up to net.core.rmem_max.
        watched.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def _attach_filter(watched: socket.socket) -> None:
    """Have the kernel drop all but links and removed addresses, and what a bridge says about its ports."""
    # The filter reads numbers in network order, and a netlink header has the host's.
    kinds = [socket.htons(kind) for kind in (RTM_NEWLINK, RTM_DELLINK)]
    program = [
        (bpf.LOAD_HALF, 0, 0, _TYPE_OFFSET),
        (bpf.IF_EQUAL, 4, 0, socket.htons(_RTM_DELADDR)),
        (bpf.IF_EQUAL, 1, 0, kinds[0]),
        (bpf.IF_EQUAL, 0, 3, kinds[1]),
        (bpf.LOAD_BYTE, 0, 0, _FAMILY_OFFSET),
        (bpf.IF_EQUAL, 1, 0, _AF_BRIDGE),
        bpf.PASS,
        bpf.DROP,
    ]
    bpf.attach(watched, program)
