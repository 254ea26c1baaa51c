"""Replay what fuzzing has found: no fault, no hang, no excessive memory. `python -m tests.fuzz` finds more."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import pytest

from multus_daemon.spec.cni.gojson import CONTAINERS_MAX
from tests.fuzz import corpus, targets
from tests.fuzz.__main__ import SECONDS_OF_ONE_INPUT

MIB = 1024 * 1024
# What is the same for every input (exceptions, an event loop), and the 100,000 objects that JSON may have.
MEMORY_FIXED = 16 * MIB
MEMORY_FACTOR = 10


def repeated(piece: bytes, size: int) -> bytes:
    return piece * (size // len(piece))


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "deep arrays": lambda size: repeated(b"[", size),
    "deep objects": lambda size: repeated(b'{"a":', size),
    "deep and closed": lambda size: repeated(b"[", size // 2) + repeated(b"]", size // 2),
    "empty arrays": lambda size: b"[" + repeated(b"[],", size - 3) + b"[]]",
    "empty objects": lambda size: b"[" + repeated(b"{},", min(size, 3 * CONTAINERS_MAX) - 9) + b"{}]",
    "short strings": lambda size: b"[" + repeated(b'"a",', size - 5) + b'"a"]',
    "fractions": lambda size: b"[" + repeated(b"1.5,", size - 5) + b"1.5]",
    "a long number": lambda size: repeated(b"1", size),
    "a long fraction": lambda size: b"0." + repeated(b"1", size - 2),
    "a large exponent": lambda size: b"1e999999999",
    "one long string": lambda size: b'"' + repeated(b"a", size - 2) + b'"',
    "half surrogates": lambda size: b'"' + repeated(b"\\ud800", size - 2) + b'"',
    "one key many times": lambda size: b"{" + repeated(b'"name":"a",', size - 12) + b'"name":"a"}',
    "many keys": lambda size: b"{" + b",".join(b'"%d":1' % number for number in range(size // 12)) + b"}",
    "commas": lambda size: repeated(b",", size),
    "interfaces": lambda size: repeated(b"a@b,", size),
    "no UTF-8": lambda size: repeated(b"\xff", size),
    "zeros": bytes,
    "nothing": lambda size: b"",
}


def run(name: str, data: bytes) -> bool:
    started = time.process_time()
    accepted = targets.run(name, data)
    took = time.process_time() - started
    assert took < SECONDS_OF_ONE_INPUT, f"{len(data)} bytes took {took:.2f} s"
    return accepted


@pytest.mark.parametrize("name", targets.TARGETS)
def test_corpus(name: str) -> None:
    inputs = corpus.read(name)
    assert len(inputs) >= 10
    for data in inputs:
        run(name, data)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_seeds_are_accepted(name: str) -> None:
    assert any(run(name, data) for data in targets.seeds(name))


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", targets.TARGETS)
def test_hostile(name: str, kind: str) -> None:
    run(name, HOSTILE[kind](MIB))
    # Counting memory takes ten times as long.
    data = HOSTILE[kind](MIB // 4)
    tracemalloc.start()
    try:
        targets.run(name, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_FACTOR * len(data) + MEMORY_FIXED, f"{peak / max(1, len(data)):.1f} times the input"
