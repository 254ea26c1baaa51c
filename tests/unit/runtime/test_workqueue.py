"""The queue of work by key, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from multus_daemon.runtime.slots import URGENT
from multus_daemon.runtime.workqueue import RetryError, WorkQueue
from tests import aside, virtual_time
from tests.virtual_time import in_virtual_time

RETRY = (1.0, 300.0)


class Work:
    """Takes `seconds`, raises what `errors` has for the key, and notes when it began."""

    def __init__(self, **options: Any) -> None:
        self.began: list[tuple[float, str]] = []
        self.errors: dict[str, Exception] = {}
        self.seconds: Callable[[str], float] = lambda key: 0.0
        self.running: list[str] = []
        self.most = 0
        self.failed: list[tuple[str, float]] = []
        self.start = now()
        asked: dict[str, Any] = {"retry": RETRY, "failed": self._note} | options
        self.queue = WorkQueue[str](self.do, **asked)

    def _note(self, key: str, error: Exception, seconds: float) -> None:
        self.failed.append((key, seconds))

    async def do(self, key: str) -> None:
        assert key not in self.running, "two workers for one key"
        self.began.append((now() - self.start, key))
        self.running.append(key)
        self.most = max(self.most, len(self.running))
        try:
            await asyncio.sleep(self.seconds(key))
        finally:
            self.running.remove(key)
        if error := self.errors.get(key):
            raise error

    def times(self, key: str) -> list[float]:
        return [at for at, name in self.began if name == key]

    @property
    def order(self) -> list[str]:
        return [key for _, key in self.began]


def now() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def running(queue: WorkQueue[str]) -> AsyncIterator[None]:
    async with aside.running(queue.run()):
        await asyncio.sleep(0)
        yield


@in_virtual_time
async def test_a_key_is_worked_on_once_for_each_time_that_it_was_due() -> None:
    work = Work()
    async with running(work.queue):
        work.queue.add("a")
        work.queue.add("a")
        assert work.queue.add_after("b", 5)
        assert not work.queue.add_after("b", 7)
        assert work.queue.add_after("b", 3)
        await asyncio.sleep(20)
    assert [(round(at), key) for at, key in work.began] == [(0, "a"), (3, "b")]
    assert len(work.queue._items) == 0


@in_virtual_time
async def test_what_is_added_during_the_work_is_worked_on_after_it() -> None:
    work = Work(at_once=4)
    work.seconds = lambda key: 10
    async with running(work.queue):
        work.queue.add("a")
        await asyncio.sleep(1)
        assert work.queue.add_after("a", 2)
        assert not work.queue.add_after("a", 3)
        work.queue.add_after("a", 30)
        await asyncio.sleep(100)
    assert work.times("a") == [0, 10]


@in_virtual_time
async def test_a_key_that_fails_waits_longer_each_time() -> None:
    work = Work()
    work.errors["a"] = OSError("no answer")
    async with running(work.queue):
        work.queue.add("a")
        await asyncio.sleep(2000)
        pauses = [after - before for before, after in itertools.pairwise(work.times("a"))]
        assert all(0.9 * min(2.0**n, 300) <= pause <= 1.1 * min(2.0**n, 300) for n, pause in enumerate(pauses))
        assert len({round(pause / min(2.0**n, 300), 6) for n, pause in enumerate(pauses)}) > 3, "no jitter"
        assert [round(seconds) for _, seconds in work.failed[: len(pauses)]] == list(map(round, pauses))
        number = len(work.times("a"))
        assert work.queue.failures("a") == number
        assert work.queue.problems == {"a": "no answer"}
        # What asks for it again does not shorten the pause; a reason to try does, and the pauses begin anew.
        assert not work.queue.add_after("a", 0)
        await asyncio.sleep(0.5)
        assert len(work.times("a")) == number
        work.queue.add("a")
        await asyncio.sleep(2.5)
        assert len(work.times("a")) == number + 2
        # So they do after a success.
        work.errors.clear()
        await asyncio.sleep(5)
        assert work.queue.problems == {}
        assert len(work.queue._items) == 0
        work.errors["a"] = OSError("no answer")
        work.queue.add_after("a", 0)
        await asyncio.sleep(0.5)
        assert work.queue.failures("a") == 1


@in_virtual_time
async def test_a_reason_to_try_that_comes_during_a_failing_try_counts() -> None:
    work = Work()
    work.errors["a"] = OSError("no answer")
    work.seconds = lambda key: 1
    async with running(work.queue):
        work.queue.add("a")
        await asyncio.sleep(0.5)
        work.queue.add_after("a", 0)
        await asyncio.sleep(1.3)
        assert work.times("a") == [0]
        await asyncio.sleep(0.7)
        assert len(work.times("a")) == 2
        work.queue.add("a")
        await asyncio.sleep(0.9)
        assert len(work.times("a")) == 3
        assert work.queue.failures("a") == 1


@in_virtual_time
async def test_what_asks_for_a_retry_itself_is_not_reported() -> None:
    work = Work()
    work.errors["a"] = RetryError("2 routes are missing")
    async with running(work.queue):
        work.queue.add("a")
        await asyncio.sleep(1.5)
        assert len(work.times("a")) == 2
        assert work.failed == []
        assert work.queue.problems == {"a": "2 routes are missing"}


@in_virtual_time
async def test_what_is_forgotten_is_not_worked_on() -> None:
    work = Work()
    work.errors["a"] = OSError("no answer")
    work.seconds = lambda key: 5
    async with running(work.queue):
        work.queue.add_after("b", 2)
        work.queue.forget("b")
        work.queue.add("a")
        work.queue.add_after("c", 1)
        await asyncio.sleep(2)
        # The one that runs, and one that waits for the worker.
        work.queue.add("a")
        work.queue.forget("a")
        work.queue.forget("c")
        work.queue.forget("unknown")
        await asyncio.sleep(10)
        assert work.order == ["a"]
        assert len(work.queue._items) == 0
        assert work.failed == []
        # It may come again, also while it still runs; that is one worker at a time nevertheless.
        work.queue.add("a")
        await asyncio.sleep(1)
        work.queue.forget("a")
        work.queue.add_after("a", 0)
        work.errors.clear()
        await asyncio.sleep(20)
        assert work.order == ["a"] * 3


@in_virtual_time
async def test_so_many_at_once_in_the_order_in_which_they_are_due() -> None:
    work = Work(at_once=3)
    work.seconds = lambda key: 1
    for number in range(9):
        work.queue.add(str(number))
    await work.queue.drain()
    assert work.most == 3
    assert work.order == [str(number) for number in range(9)]


@in_virtual_time
async def test_groups_take_turns_and_none_has_all_workers() -> None:
    work = Work(at_once=4, place=lambda key: (1, (key[0],)))
    work.seconds = lambda key: 3600 if key[0] == "x" else 1
    async with running(work.queue):
        for number in range(10):
            work.queue.add(f"x{number}")
        for number in range(3):
            work.queue.add(f"a{number}")
            work.queue.add(f"b{number}")
        await asyncio.sleep(100)
    assert [key for key in work.order if key[0] != "x"] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    # Keys that have all their groups in common leave two to others.
    assert sum(key[0] == "x" for key in work.order) == 2


@in_virtual_time
async def test_keys_with_one_group_in_common_leave_one_worker_to_others() -> None:
    work = Work(at_once=4, place=lambda key: (1, (key[0], key[1])))
    work.seconds = lambda key: 3600
    async with running(work.queue):
        for number in range(9):
            work.queue.add(f"x{number}")
        work.queue.add("yz")
        await asyncio.sleep(100)
    assert work.order == ["x0", "x1", "x2", "yz"]


@pytest.mark.parametrize(("at_once", "most"), [(1, 1), (2, 1), (3, 2), (4, 2), (8, 6)])
def test_the_share_of_keys_with_the_same_groups(at_once: int, most: int) -> None:
    async def scenario() -> None:
        work = Work(at_once=at_once, place=lambda key: (1, ("x", "y")))
        work.seconds = lambda key: 1
        for number in range(10):
            work.queue.add(str(number))
        await work.queue.drain()
        assert work.most == most

    virtual_time.run(scenario())


@in_virtual_time
async def test_what_is_urgent_has_workers_of_its_own_and_goes_first() -> None:
    work = Work(at_once=2, reserved=1, place=lambda key: (URGENT if key.startswith("!") else URGENT + 1, ()))
    work.seconds = lambda key: 10
    async with running(work.queue):
        for number in range(6):
            work.queue.add(str(number))
        await asyncio.sleep(1)
        assert work.order == ["0", "1"]
        for number in range(3):
            work.queue.add(f"!{number}")
        await asyncio.sleep(100)
    assert work.order == ["0", "1", "!0", "!1", "!2", "2", "3", "4", "5"]
    assert work.most == 3


@in_virtual_time
async def test_a_key_is_not_due_before_its_time() -> None:
    earliest = now() + 20
    work = Work(not_before=lambda key: earliest)
    async with running(work.queue):
        work.queue.add("a")
        assert not work.queue.add_after("a", 1)
        await asyncio.sleep(19)
        assert work.order == []
        await asyncio.sleep(2)
        assert work.times("a") == [20]


async def test_while_one_is_tried_for_the_others_the_loop_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    def line_up(queue: WorkQueue[str]) -> None:
        nonlocal turns
        turns += 1
        look(queue)

    look = WorkQueue._line_up
    monkeypatch.setattr(WorkQueue, "_line_up", line_up)
    work = Work(shared=True, retry=(0.01, 0.01), at_once=4)
    work.errors = dict.fromkeys("abc", OSError("no answer"))
    async with running(work.queue):
        for key in "abc":
            work.queue.add(key)
        await asyncio.sleep(0.005)
        work.seconds = lambda key: 0.3
        await asyncio.sleep(0.2)
        assert len(work.running) == 1
        assert turns < 20


@in_virtual_time
async def test_a_server_that_is_away_gets_one_request_after_each_pause() -> None:
    work = Work(at_once=4, shared=True)
    keys = [str(number) for number in range(12)]
    work.errors = dict.fromkeys(keys, OSError("no answer"))
    async with running(work.queue):
        for key in keys:
            work.queue.add(key)
        await asyncio.sleep(0.5)
        assert work.order == keys[:4]
        await asyncio.sleep(1)
        # Not always the same one.
        assert work.order == [*keys[:4], "4"]
        # After 1, 3, 7 and 15 s.
        await asyncio.sleep(24)
        assert len(work.order) == 4 + 4
        work.errors.clear()
        work.queue.resume()
        await asyncio.sleep(0.1)
        assert sorted(set(work.order)) == sorted(keys)
        assert len(work.queue._items) == 0
        assert work.queue.problems == {}
        # The pauses begin anew.
        work.errors["0"] = OSError("no answer")
        work.queue.add("0")
        await asyncio.sleep(1.3)
        assert work.times("0")[-1] - work.times("0")[-2] <= 1.1


@in_virtual_time
async def test_one_that_is_refused_does_not_hold_up_the_others() -> None:
    work = Work(shared=True)
    work.errors["a"] = OSError("forbidden")
    async with running(work.queue):
        for key in "abc":
            work.queue.add(key)
        await asyncio.sleep(1.2)
        assert work.order == ["a", "b", "c", "a"]


@in_virtual_time
async def test_a_pause_that_the_server_asked_for_is_not_ended() -> None:
    for options in ({}, {"shared": True}):
        work = Work(pause=lambda error, seconds: max(20.0, seconds), **options)
        work.errors["a"] = OSError("too many requests")
        async with running(work.queue):
            work.queue.add("a")
            for _ in range(19):
                await asyncio.sleep(1)
                work.queue.resume()
            assert len(work.order) == 1
            await asyncio.sleep(2)
            assert len(work.order) == 2


@in_virtual_time
async def test_a_queue_that_is_ended_goes_on_later() -> None:
    work = Work()
    work.seconds = lambda key: 10
    async with running(work.queue):
        work.queue.add("a")
        work.queue.add("b")
        await asyncio.sleep(1)
    assert len(work.queue._items) == 2
    work.seconds = lambda key: 0
    await work.queue.drain()
    assert sorted(work.order) == ["a", "a", "b"]


@in_virtual_time
async def test_each_is_tried_once() -> None:
    work = Work()
    work.errors["a"] = OSError("no answer")
    work.queue.add("a")
    work.queue.add("b")
    work.queue.add_after("later", 60)
    await work.queue.drain_once()
    assert work.order == ["a", "b"]
    assert len(work.queue._items) == 2
    await work.queue.drain_once()
    assert work.order == ["a", "b"]
    await asyncio.sleep(2)
    await work.queue.drain_once()
    assert work.order == ["a", "b", "a"]
    # Also what is due again at once.
    unpaused = Work(retry=(0.0, 0.0))
    unpaused.errors["a"] = OSError("no answer")
    unpaused.queue.add("a")
    await unpaused.queue.drain_once()
    assert unpaused.order == ["a"]
    work.errors.clear()
    await work.queue.drain()
    assert len(work.queue._items) == 0
