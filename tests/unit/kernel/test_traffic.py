"""Counters in the kernel's description of a link."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.kernel.traffic import Figures, decode
from multus_daemon.kernel.transport import attribute

_NAME, _STATS64 = 3, 23
_HEAD = bytes(16) + bytes(16)
COUNTS = range(2**60, 2**60 + 25)


def link(*, stats: bytes = struct.pack("=25Q", *COUNTS)) -> bytes:
    return _HEAD + attribute(_NAME, "net1") + attribute(_STATS64, stats) + attribute(4, 1500)


def test_the_counters_are_in_the_order_of_the_kernel() -> None:
    assert decode(link()) == Figures(*COUNTS[:8])
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
    assert decode(link(stats=struct.pack("=23Q", *COUNTS[:23]))) == Figures(*COUNTS[:8])


def test_a_link_without_counters_has_no_figures() -> None:
    assert decode(_HEAD + attribute(_NAME, "net1")) is None


def test_a_message_that_is_cut_off_has_no_figures() -> None:
    whole = link()
    before_counters = len(_HEAD) + len(attribute(_NAME, "net1"))
    for length in range(before_counters + 4 + 64):
        assert decode(whole[:length]) is None


@given(st.binary(max_size=200))
def test_whatever_comes_is_decoded_to_an_end(data: bytes) -> None:
    found = decode(_HEAD + data)
    assert found is None or len(found) == 8
