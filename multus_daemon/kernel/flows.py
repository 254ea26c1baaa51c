"""Delete tracked UDP flows to ports of the host: the kernel would send their packets to a container that is gone.

Format: linux/netfilter/nfnetlink_conntrack.h; struct nfgenmsg, then attributes. Kernels from 5.8 on filter the dump.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterable
from typing import Final

from multus_daemon.kernel.transport import Request, Socket, attribute, attributes

_NETLINK_NETFILTER: Final = 12
_GET: Final = 0x101
_DELETE: Final = 0x102
# struct nfgenmsg: family, version, resource.
_HEADER: Final = struct.Struct("=BBH")
_PORT: Final = struct.Struct("!H")
_NESTED: Final = 0x8000
_CTA_TUPLE_ORIG: Final = 1
_CTA_ZONE: Final = 18
_CTA_FILTER: Final = 25
_CTA_FILTER_ORIG_FLAGS: Final = 1
_FILTER_NUMBER_AND_PORT: Final = 1 << 3 | 1 << 5
_CTA_TUPLE_PROTO: Final = 2
_CTA_PROTO_NUM: Final = 1
_CTA_PROTO_DST_PORT: Final = 3


def forget_udp(ports: Iterable[int]) -> None:
    """Delete the flows to UDP ports in the thread's namespace. Does nothing on a kernel without connection tracking.

    Raises OSError with the kernel's errno.
    """
    with contextlib.closing(Socket(_NETLINK_NETFILTER)) as kernel:
        for port in ports:
            wanted = {_CTA_PROTO_NUM: bytes([socket.IPPROTO_UDP]), _CTA_PROTO_DST_PORT: _PORT.pack(port)}
            proto = b"".join(attribute(kind, value) for kind, value in wanted.items())
            pattern = attribute(_CTA_TUPLE_ORIG | _NESTED, attribute(_CTA_TUPLE_PROTO | _NESTED, proto))
            flags = attribute(_CTA_FILTER_ORIG_FLAGS, _FILTER_NUMBER_AND_PORT)
            for family in (socket.AF_INET, socket.AF_INET6):
                asked = _HEADER.pack(family, 0, 0) + pattern + attribute(_CTA_FILTER | _NESTED, flags)
                try:
                    found = kernel.dump(Request(_GET, asked), lambda body, wanted=wanted: _is(body, wanted))  # type: ignore[misc]
                except OSError as error:
                    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT):
                        # Without the module. An operation that a kernel has not is EINVAL.
                        return
                    raise
                deletions = [Request(_DELETE, _HEADER.pack(family, 0, 0) + _identity(body)) for body in found]
                for problem in kernel.batch(deletions).values():
                    # It may have ended meanwhile.
                    if problem.errno != errno.ENOENT:
                        raise problem


def _is(body: bytes, wanted: dict[int, bytes]) -> bool:
    found = attributes(body, _HEADER.size)
    protocol = attributes(attributes(found.get(_CTA_TUPLE_ORIG, b"")).get(_CTA_TUPLE_PROTO, b""))
    return all(protocol.get(kind) == value for kind, value in wanted.items())


def _identity(body: bytes) -> bytes:
    """Return the attributes that identify a flow: the tuple of its original direction, and its zone."""
    found = attributes(body, _HEADER.size)
    zone = attribute(_CTA_ZONE, found[_CTA_ZONE]) if _CTA_ZONE in found else b""
    return attribute(_CTA_TUPLE_ORIG | _NESTED, found[_CTA_TUPLE_ORIG]) + zone
