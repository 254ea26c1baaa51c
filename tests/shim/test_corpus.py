"""The real binary handles the inputs that fuzzing found for its parsers (`python -m tests.fuzz shim`).

The first byte of an input chooses what the rest is: even, the bytes of a reply; odd, the runtime's stdin.
"""

from __future__ import annotations

import json

import pytest

from tests.fuzz import corpus
from tests.shim.conftest import Result, Shim, Stub

INPUTS = [data for data in corpus.read("shim") if data]
REPLIES, CONFIGURATIONS = ([data for data in INPUTS if data[0] % 2 == kind] for kind in (0, 1))


def assert_answer(result: Result) -> None:
    """A result, or one CNI error; never the end of a program fault."""
    assert result.code in (0, 1)
    assert b"failed inside" not in result.out
    if result.code == 1:
        error = json.loads(result.out)
        assert error["code"] > 0
        assert error["msg"]
    assert result.seconds < 30


@pytest.mark.waits
@pytest.mark.parametrize("data", REPLIES, ids=range(len(REPLIES)))
def test_replies(shim: Shim, daemon: Stub, data: bytes) -> None:
    daemon.answer(data[1:])
    # STATUS: an ADD would call a daemon again that said nothing.
    result = shim("STATUS")
    if result.code == 1 and b"application/vnd.multus.cni-stdout" in data:
        # A body of that type is the daemon's own words.
        assert b"failed inside" not in result.out
        return
    assert_answer(result)


@pytest.mark.parametrize("data", CONFIGURATIONS, ids=range(len(CONFIGURATIONS)))
def test_configurations(shim: Shim, data: bytes) -> None:
    # VERSION and unknown verbs read it too; the socket's folder is that of the test where it names none.
    assert_answer(shim("FROB", stdin=data[1:]))
