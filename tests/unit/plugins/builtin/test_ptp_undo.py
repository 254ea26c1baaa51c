"""Undo: order, deadlines of its own, whatever became of the request."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from multus_daemon import deadlines
from multus_daemon.plugins.builtin.contract import Undo
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import ExpiredError
from tests.aside import Aside
from tests.waiting import PATIENCE


class Steps:
    def __init__(self) -> None:
        self.done: list[str] = []

    def make(self, name: str, *, seconds: float = 0.0, error: Exception | None = None) -> Callable[[], None]:
        def step() -> None:
            deadline.pause(seconds)
            if error is not None:
                raise error
            self.done.append(name)

        return step


def test_reverse_order_past_failures_and_deadlines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "BUILTIN_UNDO_SECONDS", 0.05)
    steps = Steps()

    def work() -> None:
        with Undo() as undo:
            undo.arm("a", steps.make("a"))
            undo.arm("b", steps.make("b", error=OSError("disk")))
            undo.arm("c", steps.make("c", seconds=30))
            undo.arm("d", steps.make("d"))
            raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        work()
    assert steps.done == ["d", "a"]
    assert "undo of a failed ADD: b: disk" in caplog.text
    assert "undo of a failed ADD: c: did not end within 0.05 s" in caplog.text


def test_what_had_no_more_time_is_undone_whole() -> None:
    steps = Steps()

    def work() -> None:
        with deadline.within(0.05), Undo() as undo:
            undo.arm("a", steps.make("a", seconds=0.1))
            undo.arm("b", steps.make("b", seconds=0.1))
            deadline.pause(30)

    with pytest.raises(ExpiredError):
        work()
    assert steps.done == ["b", "a"]


def test_a_stop_during_the_undoing_of_an_error() -> None:
    steps = Steps()
    began = threading.Event()

    def work() -> None:
        with Undo() as undo:
            undo.arm("a", steps.make("a", seconds=0.05))
            undo.arm("b", began.set)
            raise ValueError("the cause")

    call = Aside(work)
    assert began.wait(PATIENCE)
    call.stop()
    # The call waits for no deadline after that, so the error comes out as it is.
    with pytest.raises(ValueError, match="the cause"):
        call.result()
    assert steps.done == ["a"]
