"""Which processes a daemon takes for what a killed one has left, and ends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from multus_daemon.plugins import strays

NUMBER, STARTED, NAMESPACE = strays.mark().split("-")
GONE = f"{NUMBER}-{int(STARTED) - 1}-{NAMESPACE}"
"""Marks a process of an earlier daemon with this process' number."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def lives(stack: ExitStack, mark: str, *, output: int = subprocess.PIPE, **environ: str) -> bool:
    """Return whether a process with this mark survives the search for strays."""
    process = stack.enter_context(
        subprocess.Popen(
            ["/bin/sleep", "30"],
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/bin", strays.VARIABLE: mark, **environ},
        )
    )
    stack.callback(process.kill)
    # Popen returns in the midst of exec, a moment before the environment can be read.
    until = time.monotonic() + 10
    while strays.VARIABLE.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes():
        assert time.monotonic() < until
        time.sleep(0.001)
    strays.end()
    return process.poll() is None


def test_what_a_daemon_that_has_gone_left_is_ended(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    assert not lives(stack, GONE, CNI_COMMAND="ADD")
    assert not lives(stack, GONE)
    assert "which a killed daemon has left running: /bin/sleep 30" in caplog.text


MARKS = {
    "its own": strays.mark(),
    "another namespace's": f"{NUMBER}-1-7",
    **{name: name for name in ("", "x", "1-2", "1-2-x")},
    "no number": f"x-1-{NAMESPACE}",
}


@pytest.mark.parametrize("kind", MARKS)
def test_what_is_a_living_daemons_or_of_other_numbers_is_let_be(kind: str, stack: ExitStack) -> None:
    """A node in a container has other process numbers: its daemon lives, though no process here has its number."""
    assert lives(stack, MARKS[kind], CNI_COMMAND="ADD")


@pytest.mark.parametrize("verb", ["DEL", "GC"])
def test_a_removal_goes_on(verb: str, stack: ExitStack) -> None:
    assert lives(stack, GONE, CNI_COMMAND=verb)


def test_what_has_detached_itself_lives_on(stack: ExitStack) -> None:
    assert lives(stack, GONE, output=subprocess.DEVNULL, CNI_COMMAND="ADD")
