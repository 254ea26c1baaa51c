"""An event loop in a thread of its own, and its share of processor time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from multus_daemon.runtime import side_loop
from multus_daemon.runtime.side_loop import Share
from tests.waiting import eventually


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_reserve_may_be_spent_at_once_and_then_the_share() -> None:
    clock = Clock()
    share = Share(0.1, 1.0, clock=clock)
    assert share.spend(0.6) == 0
    assert share.spend(0.4) == 0
    assert share.spend(0.01) == pytest.approx(0.1)
    clock.now += 0.1
    assert share.spend(0) == pytest.approx(0)
    # No more than the reserve is saved.
    clock.now += 1000
    assert share.spend(1.01) == pytest.approx(0.1)


def test_one_long_turn_costs_a_second_at_most() -> None:
    share = Share(0.1, 1.0, clock=Clock())
    assert share.spend(100) == pytest.approx(1.0)


async def test_the_work_runs_in_another_thread_and_asks_this_one() -> None:
    here, found = asyncio.get_running_loop(), []

    async def work() -> None:
        found.append(threading.get_ident())
        found.append(await side_loop.ask(here, where))

    async def where() -> int:
        return threading.get_ident()

    await side_loop.run(work, Share(1, 1), name="a")
    assert found[0] != found[1] == threading.get_ident()


async def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("it is bad")

    with pytest.raises(ValueError, match="it is bad"):
        await side_loop.run(work, Share(1, 1), name="a")


@pytest.mark.parametrize("pause", [0.0, 0.1])
async def test_it_has_ended_when_its_cancellation_returns(pause: float) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append("work")

    task = asyncio.create_task(side_loop.run(work, Share(1, 1), name="side"))
    await asyncio.sleep(pause)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work"] or not pause
    await eventually(lambda: "side" not in {thread.name for thread in threading.enumerate()}, 10)


async def test_a_busy_loop_pauses() -> None:
    async def work() -> None:
        begun, used = time.monotonic(), time.thread_time()
        while time.monotonic() - begun < 1:
            await asyncio.sleep(0)
        shares.append((time.thread_time() - used) / (time.monotonic() - begun))

    shares: list[float] = []
    await side_loop.run(work, Share(0.1, 0.05), name="a")
    assert 0 < shares[0] < 0.25
