"""Limits of a link's traffic: token buckets, and the redirection of what a link receives to another one (tc(8)).

Not pyroute2: its class for a bucket has no rates above 34 Gbit/s, and a node whose pods have limits would load it.
Format: rtnetlink(7), struct tcmsg, then attributes; linux/pkt_sched.h, linux/pkt_cls.h, linux/tc_act/tc_mirred.h.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Final, Self

from multus_daemon.kernel.transport import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    Request,
    Socket,
    attribute,
    attributes,
    to_text,
)

_NLM_F_REPLACE: Final = 0x100

_RTM_NEWQDISC: Final = 36
_RTM_DELQDISC: Final = 37
_RTM_GETQDISC: Final = 38
_RTM_NEWTFILTER: Final = 44
_RTM_DELTFILTER: Final = 45
_RTM_GETTFILTER: Final = 46

# struct tcmsg: family, index of the link, handle, parent, info.
_TC: Final = struct.Struct("=BxxxiIII")
_ROOT: Final = 0xFFFFFFFF
_AT_INGRESS: Final = 0xFFFFFFF1
_INGRESS: Final = 0xFFFF0000
_FIRST: Final = 0x10000
# Priority 1, and ETH_P_ALL.
_PRIORITY_AND_PROTOCOL: Final = 1 << 16 | socket.htons(3)

_TCA_KIND: Final = 1
_TCA_OPTIONS: Final = 2
_TCA_TBF_PARMS: Final = 1
_TCA_TBF_RATE64: Final = 4
# struct tc_tbf_qopt: of the rate and of the peak rate only bytes per second; limit, buffer, MTU.
_TBF: Final = struct.Struct("=8xI8xIIII")
_TCA_U32_CLASSID: Final = 1
_TCA_U32_SEL: Final = 5
_TCA_U32_ACT: Final = 7
# struct tc_u32_sel with one key whose mask is empty; the flag says that this is the last filter.
_EVERYTHING: Final = struct.pack("=BBB29x", 1, 0, 1)
_TCA_ACT_KIND: Final = 1
_TCA_ACT_OPTIONS: Final = 2
_TCA_MIRRED_PARMS: Final = 2
# struct tc_mirred: index, capabilities, action, two counts, what is done, index of the other link.
_MIRRED: Final = struct.Struct("=IIiiiiI")
_STOLEN: Final = 4
_REDIRECT: Final = 1

_MAX_32: Final = 2**32 - 1
_LATENCY_SECONDS: Final = 0.025
_MICROSECONDS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Bucket:
    """A limit in the numbers of the kernel's token bucket (tc-tbf(8))."""

    rate: int
    """Bytes per second."""
    limit: int
    """Maximum number of bytes that wait for tokens."""
    buffer: int
    """The burst as the time that it takes at this rate, in 64 nanoseconds."""

    @classmethod
    def of(cls, rate: int, burst: int) -> Self:
        """Return the limit for a rate in bytes per second and a burst in bytes.

        Numbers are cut to 32 bits, as by the reference plugin, whose CHECK compares them.
        """
        microseconds = burst * _MICROSECONDS // rate & _MAX_32
        return cls(rate, int(rate * _LATENCY_SECONDS) + burst & _MAX_32, microseconds * 125 // 8 & _MAX_32)

    def __str__(self) -> str:
        """Return the limit in words, without units."""
        return f"rate {self.rate}, limit {self.limit}, buffer {self.buffer}"


@dataclass(frozen=True, slots=True)
class Shaping:
    """The queueing disciplines (qdisc) of a link, and where its received packets are redirected."""

    bucket: Bucket | None = None
    """The token bucket at the root of the link; None if there is none."""
    has_root: bool = False
    """True if a discipline of any kind was set at the root."""
    has_ingress: bool = False
    """True if it has the `ingress` discipline, which filters for received packets need."""
    redirected_to: int = 0
    """Index of the link that gets what this one receives; 0 if there is none."""


# --- requests --------------------------------------------------------------------------------------------------------


def add_bucket(index: int, bucket: Bucket) -> Request:
    """Limit the packets that a link sends; replaces another discipline at its root."""
    parameters = _TBF.pack(min(bucket.rate, _MAX_32), 0, bucket.limit, bucket.buffer, 0)
    options = attribute(_TCA_TBF_PARMS, parameters)
    if bucket.rate > _MAX_32:
        options += attribute(_TCA_TBF_RATE64, struct.pack("=Q", bucket.rate))
    return _discipline(index, _FIRST, _ROOT, "tbf", options, _NLM_F_REPLACE)


def add_ingress(index: int) -> Request:
    """Add the `ingress` discipline, for filters of received packets; EEXIST if there is one."""
    return _discipline(index, _INGRESS, _AT_INGRESS, "ingress", b"", NLM_F_EXCL)


def remove_root(index: int) -> Request:
    """Remove the discipline at the root of a link; ENOENT or EINVAL if there is none."""
    return Request(_RTM_DELQDISC, _TC.pack(0, index, 0, _ROOT, 0))


def remove_ingress(index: int) -> Request:
    """Remove the `ingress` discipline of a link, with its filters; ENOENT or EINVAL if there is none."""
    return Request(_RTM_DELQDISC, _TC.pack(0, index, _INGRESS, _AT_INGRESS, 0))


def add_redirect(index: int, to: int) -> Request:
    """Redirect all packets that a link receives to the link with index `to`, which sends them. Needs `add_ingress`."""
    mirred = attribute(_TCA_MIRRED_PARMS, _MIRRED.pack(0, 0, _STOLEN, 0, 0, _REDIRECT, to))
    action = attribute(_TCA_ACT_KIND, "mirred") + attribute(_TCA_ACT_OPTIONS, mirred)
    options = attribute(_TCA_U32_CLASSID, _FIRST | 1) + attribute(_TCA_U32_SEL, _EVERYTHING)
    options += attribute(_TCA_U32_ACT, attribute(1, action))
    attrs = attribute(_TCA_KIND, "u32") + attribute(_TCA_OPTIONS, options)
    header = _TC.pack(0, index, 0, _INGRESS, _PRIORITY_AND_PROTOCOL)
    return Request(_RTM_NEWTFILTER, header + attrs, NLM_F_CREATE | NLM_F_EXCL)


def remove_redirect(index: int) -> Request:
    """Remove the filters with the priority that `add_redirect` uses; ENOENT if there are none."""
    return Request(_RTM_DELTFILTER, _TC.pack(0, index, 0, _INGRESS, _PRIORITY_AND_PROTOCOL))


def _discipline(index: int, handle: int, parent: int, kind: str, options: bytes, flags: int) -> Request:
    attrs = attribute(_TCA_KIND, kind) + attribute(_TCA_OPTIONS, options)
    return Request(_RTM_NEWQDISC, _TC.pack(0, index, handle, parent, 0) + attrs, NLM_F_CREATE | flags)


# --- answers ---------------------------------------------------------------------------------------------------------


def read(kernel: Socket, index: int) -> Shaping:
    """Return the disciplines and the redirection that the link has now. Raises OSError."""
    asked = Request(_RTM_GETQDISC, _TC.pack(0, index, 0, 0, 0))
    bucket, has_root, has_ingress, redirected_to = None, False, False, 0
    # The kernel tells the disciplines of all links.
    for body in kernel.dump(asked, lambda item: _TC.unpack_from(item)[1] == index):
        _, _, handle, parent, _ = _TC.unpack_from(body)
        found = attributes(body, _TC.size)
        has_ingress = has_ingress or parent == _AT_INGRESS
        # Those that the kernel sets by itself have no handle.
        if parent == _ROOT and handle:
            has_root = True
            if to_text(found.get(_TCA_KIND)) == "tbf":
                bucket = _bucket(attributes(found.get(_TCA_OPTIONS, b"")))
    if has_ingress:
        filters = kernel.dump(Request(_RTM_GETTFILTER, _TC.pack(0, index, 0, _INGRESS, 0)))
        redirected_to = next(filter(None, map(_redirected, filters)), 0)
    return Shaping(bucket, has_root, has_ingress, redirected_to)


def _bucket(options: dict[int, bytes]) -> Bucket:
    rate, _, limit, buffer, _ = _TBF.unpack_from(options[_TCA_TBF_PARMS])
    wide = options.get(_TCA_TBF_RATE64)
    return Bucket(struct.unpack("=Q", wide)[0] if wide else rate, limit, buffer)


def _redirected(body: bytes) -> int:
    """Return the index of the link to which the first action of a filter redirects; 0 if it does something else."""
    options = attributes(attributes(body, _TC.size).get(_TCA_OPTIONS, b""))
    action = attributes(attributes(options.get(_TCA_U32_ACT, b"")).get(1, b""))
    parameters = attributes(action.get(_TCA_ACT_OPTIONS, b"")).get(_TCA_MIRRED_PARMS)
    if to_text(action.get(_TCA_ACT_KIND)) != "mirred" or not parameters:
        return 0
    *_, done, to = _MIRRED.unpack_from(parameters)
    return int(to) if done == _REDIRECT else 0
