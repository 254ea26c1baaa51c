"""Undo: order, shielding, deadlines."""

from __future__ import annotations

import asyncio

import pytest

from multus_daemon.builtin.undo import Undo


class Steps:
    def __init__(self) -> None:
        self.done: list[str] = []

    def make(self, name: str, *, seconds: float = 0.0, error: Exception | None = None):
        async def step() -> None:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
            self.done.append(name)

        return step


async def test_nothing_is_undone_on_success() -> None:
    steps = Steps()
    async with Undo() as undo:
        undo.arm("a", steps.make("a"))
    assert steps.done == []


async def test_reverse_order_past_failures_and_deadlines(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps()

    async def work() -> None:
        async with Undo(seconds_for_each=0.05) as undo:
            undo.arm("a", steps.make("a"))
            undo.arm("b", steps.make("b", error=OSError("disk")))
            undo.arm("c", steps.make("c", seconds=30))
            undo.arm("d", steps.make("d"))
            raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        await work()
    assert steps.done == ["d", "a"]
    assert "undo of a failed ADD: b: disk" in caplog.text
    assert "undo of a failed ADD: c: TimeoutError" in caplog.text


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_cancellation_is_undone_whole(cancellations: int) -> None:
    steps = Steps()

    async def work() -> None:
        async with Undo() as undo:
            undo.arm("a", steps.make("a", seconds=0.05))
            undo.arm("b", steps.make("b", seconds=0.05))
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    for _ in range(cancellations):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.done == ["b", "a"]


async def test_cancellation_during_the_undoing_of_an_error() -> None:
    steps = Steps()

    async def work() -> None:
        async with Undo() as undo:
            undo.arm("a", steps.make("a", seconds=0.05))
            raise ValueError("the cause")

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert isinstance(caught.value.__cause__, ValueError)
    assert steps.done == ["a"]
