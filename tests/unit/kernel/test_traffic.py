"""Counters in the kernel's description of a link."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.kernel.traffic import Figures, counters_in
from multus_daemon.kernel.transport import attribute

_NAME, _ALIAS, _STATS64 = 3, 20, 23
_HEAD = bytes(16) + bytes(16)
COUNTS = range(2**60, 2**60 + 25)
START = struct.pack("=HH", 4 + 25 * 8, _STATS64)


def link(*, stats: bytes = struct.pack("=25Q", *COUNTS), alias: bytes = b"") -> bytes:
    texts = attribute(_NAME, "net1") + attribute(_ALIAS, alias)
    return _HEAD + texts + attribute(_STATS64, stats) + attribute(4, 1500)


def decoded(message: bytes, start: bytes = b"") -> Figures | None:
    offset = counters_in(message, start)
    return Figures(*struct.unpack_from("=8Q", message, offset)) if offset else None


def test_the_counters_are_in_the_order_of_the_kernel() -> None:
    assert decoded(link()) == decoded(link(), START) == Figures(*COUNTS[:8])
    assert Figures._fields == (
        "receive_packets",
        "transmit_packets",
        "receive_bytes",
        "transmit_bytes",
        "receive_errors",
        "transmit_errors",
        "receive_drops",
        "transmit_drops",
    )


def test_an_older_kernel_has_fewer_counters() -> None:
    assert decoded(link(stats=struct.pack("=23Q", *COUNTS[:23])), START) == Figures(*COUNTS[:8])


def test_an_alias_that_looks_like_counters_is_not_taken_for_them() -> None:
    forged = START + struct.pack("=8Q", *range(8))
    assert decoded(link(alias=forged), START) == Figures(*COUNTS[:8])


def test_a_link_without_counters_has_no_figures() -> None:
    message = _HEAD + attribute(_NAME, "net1")
    assert decoded(message) is None
    assert decoded(message, START) is None


def test_a_message_that_is_cut_off_has_no_figures() -> None:
    whole = link()
    before_counters = whole.index(START)
    for length in range(before_counters + 4 + 64):
        assert decoded(whole[:length]) is None
        assert decoded(whole[:length], START) is None


@given(st.binary(max_size=200))
def test_whatever_comes_is_decoded_to_an_end(data: bytes) -> None:
    for start in (b"", START):
        offset = counters_in(_HEAD + data, start)
        assert not offset or len(_HEAD) <= offset <= len(_HEAD) + len(data) - 64
