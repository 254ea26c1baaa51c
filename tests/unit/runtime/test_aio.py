import asyncio
import contextvars
import gc
import threading
import time

import pytest

from multus_daemon.runtime import aio


async def turns(count: int = 5) -> None:
    """Let every other task run until it waits for something."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- KeyedLock -------------------------------------------------------------------------------------------------------


async def test_one_at_a_time_within_a_key_in_the_order_of_arrival() -> None:
    locks, log = aio.KeyedLock(), []

    async def work(number: int) -> None:
        async with locks.hold("a"):
            log.append(f"+{number}")
            await turns()
            log.append(f"-{number}")

    await asyncio.gather(*(work(number) for number in range(4)))
    assert log == ["+0", "-0", "+1", "-1", "+2", "-2", "+3", "-3"]
    assert len(locks) == 0


async def test_a_late_comer_does_not_overtake_one_who_waits() -> None:
    locks, log = aio.KeyedLock(), []

    async def work(name: str) -> None:
        async with locks.hold("a"):
            log.append(name)

    async with locks.hold("a"):
        waiting = asyncio.create_task(work("first"))
        await turns()
    late = asyncio.create_task(work("second"))
    await asyncio.gather(waiting, late)
    assert log == ["first", "second"]


async def test_keys_do_not_wait_for_each_other() -> None:
    locks = aio.KeyedLock()
    async with locks.hold("a"), asyncio.timeout(30), locks.hold("b"):
        assert len(locks) == 2
    assert len(locks) == 0


async def test_a_key_is_remembered_while_somebody_waits_for_it() -> None:
    locks = aio.KeyedLock()
    inside, leave = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with locks.hold("a"):
            inside.set()
            await leave.wait()

    async with locks.hold("a"):
        waiting = asyncio.create_task(work())
        await turns()
        assert not inside.is_set()
    assert len(locks) == 1
    await inside.wait()
    leave.set()
    await waiting
    assert len(locks) == 0


async def test_an_error_inside_frees_the_key() -> None:
    locks = aio.KeyedLock()
    with pytest.raises(ZeroDivisionError):
        async with locks.hold("a"):
            raise ZeroDivisionError
    assert len(locks) == 0


@pytest.mark.parametrize("cancelled", ["holder", "waiter", "both"])
async def test_cancelling_frees_the_key_and_lets_the_next_in(cancelled: str) -> None:
    locks = aio.KeyedLock()

    async def work() -> None:
        async with locks.hold("a"):
            await asyncio.sleep(60)

    holder = asyncio.create_task(work())
    waiter = asyncio.create_task(work())
    await turns()
    stopped = {"holder": [holder], "waiter": [waiter], "both": [holder, waiter]}[cancelled]
    for task in stopped:
        task.cancel()
    await asyncio.gather(*stopped, return_exceptions=True)
    await turns()
    assert len(locks) == (0 if cancelled == "both" else 1)
    for task in (holder, waiter):
        task.cancel()
    await asyncio.gather(holder, waiter, return_exceptions=True)
    assert len(locks) == 0
    async with asyncio.timeout(30), locks.hold("a"):
        assert len(locks) == 1


async def test_a_waiter_cancelled_just_as_the_lock_becomes_free_passes_it_on() -> None:
    locks, log = aio.KeyedLock(), []

    async def work(name: str) -> None:
        async with locks.hold("a"):
            log.append(name)

    async with locks.hold("a"):
        unlucky, next_one = asyncio.create_task(work("unlucky")), asyncio.create_task(work("next"))
        await turns()
    unlucky.cancel()
    async with asyncio.timeout(30):
        await asyncio.gather(unlucky, next_one, return_exceptions=True)
    assert log == ["next"]
    assert len(locks) == 0


# --- TaskGroupOfRequests ---------------------------------------------------------------------------------------------


async def answer(value: int, gate: asyncio.Event | None = None) -> int:
    if gate:
        await gate.wait()
    return value


async def fail(gate: asyncio.Event | None = None) -> int:
    if gate:
        await gate.wait()
    raise LookupError("no such thing")


async def test_the_result_and_the_name() -> None:
    requests = aio.TaskGroupOfRequests()

    async def name() -> str:
        task = asyncio.current_task()
        assert task is not None
        return task.get_name()

    assert await requests.run(answer(3), name="x") == 3
    assert await requests.run(name(), name="ADD c1") == "ADD c1"
    assert len(requests) == 0


async def test_what_the_work_raises_is_raised() -> None:
    requests = aio.TaskGroupOfRequests()
    with pytest.raises(LookupError, match="no such thing"):
        await requests.run(fail(), name="x")
    assert len(requests) == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_a_waiter_that_goes_away_leaves_the_work_running(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    requests, gate, done = aio.TaskGroupOfRequests(), asyncio.Event(), []

    async def work() -> None:
        await gate.wait()
        done.append(True)
        if fails:
            raise LookupError

    waiter = asyncio.create_task(requests.run(work(), name="x"))
    await turns()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert len(requests) == 1
    assert not done
    gate.set()
    assert await requests.drain(5) == 0
    assert done == [True]
    assert len(requests) == 0
    assert not caplog.records  # asyncio reports no exception that was never retrieved


async def test_drain_waits_for_what_ends_in_time() -> None:
    requests, gate = aio.TaskGroupOfRequests(), asyncio.Event()
    waiters = [asyncio.create_task(requests.run(answer(number, gate), name="x")) for number in range(3)]
    await turns()
    assert len(requests) == 3
    asyncio.get_running_loop().call_later(0.02, gate.set)
    assert await requests.drain(5) == 0
    assert await asyncio.gather(*waiters) == [0, 1, 2]


async def test_drain_cancels_what_does_not_end_and_counts_it() -> None:
    requests, gate, cleaned = aio.TaskGroupOfRequests(), asyncio.Event(), []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await turns()  # cleaning up takes a while
            cleaned.append(True)

    waiters = [
        asyncio.create_task(requests.run(work, name="x")) for work in (slow(), slow(), answer(1, gate), fail(gate))
    ]
    await turns()
    gate.set()
    assert await requests.drain(0.05) == 2
    assert cleaned == [True, True]
    assert len(requests) == 0
    first_slow, second_slow, answered, failed = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(first_slow, asyncio.CancelledError)
    assert isinstance(second_slow, asyncio.CancelledError)
    assert answered == 1
    assert isinstance(failed, LookupError)


async def test_drain_of_nothing_returns_at_once() -> None:
    async with asyncio.timeout(30):
        assert await aio.TaskGroupOfRequests().drain(60) == 0


# --- SharedCalls -----------------------------------------------------------------------------------------------------


class Work:
    """Counts its runs and their ends."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.begun = self.ended = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        try:
            await self.may_end.wait()
        finally:
            # The task takes its time to end.
            await turns()
            self.ended += 1
        if self.error:
            raise self.error
        return number


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_all_who_ask_at_the_same_time_share_one_run(error: Exception | None) -> None:
    calls, work = aio.SharedCalls(), Work(error)
    asking = [asyncio.create_task(calls.of("a", work)) for _ in range(5)]
    other = asyncio.create_task(calls.of("b", work))
    await turns()
    work.may_end.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert results == [error or 1] * 5
    await asyncio.gather(other, return_exceptions=True)
    assert work.begun == 2
    await asyncio.gather(calls.of("a", work), return_exceptions=True)
    assert work.begun == 3


async def test_one_who_gives_up_does_not_end_the_run_of_the_others() -> None:
    calls, work = aio.SharedCalls(), Work()
    first, second = (asyncio.create_task(calls.of("a", work)) for _ in range(2))
    await turns()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    work.may_end.set()
    assert await second == 1


async def test_the_last_one_to_give_up_ends_the_run_and_waits_for_its_end() -> None:
    calls, work = aio.SharedCalls(), Work()
    tasks = [asyncio.create_task(calls.of("a", work)) for _ in range(2)]
    await turns()
    for task in tasks:
        task.cancel()
    await turns(2)
    late = asyncio.create_task(calls.of("a", work))
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [True, True]
    assert work.ended == 1
    work.may_end.set()
    assert await late == 2, "a run that is being ended is not shared"


# --- in_thread -------------------------------------------------------------------------------------------------------


async def test_work_in_a_thread_returns_its_result_and_sees_the_context() -> None:
    field: contextvars.ContextVar[str] = contextvars.ContextVar("field")
    field.set("seen")

    def work(first: int, *, second: int) -> tuple[int, str, bool]:
        return first + second, field.get(), threading.current_thread() is threading.main_thread()

    assert await aio.in_thread(work, 1, second=2) == (3, "seen", False)


async def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await aio.in_thread(lambda: 1 // 0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_caller_waits_for_the_end_of_the_work(
    times: int, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    started, gate, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        started.set()
        gate.wait(5)
        ended.append(True)
        if fails:
            raise RuntimeError("dropped")

    task = asyncio.create_task(aio.in_thread(work))
    while not started.is_set():
        await asyncio.sleep(0.001)
    for _ in range(times):
        task.cancel()
        await turns()
        assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    del task
    gc.collect()
    assert caplog.records == []


async def test_a_deadline_waits_for_the_work_too() -> None:
    ended: list[bool] = []

    def work() -> None:
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await aio.in_thread(work)
    assert ended == [True]


# --- side_by_side ----------------------------------------------------------------------------------------------------


async def test_items_are_begun_in_their_order_so_many_at_once() -> None:
    running, most, begun = 0, 0, []

    async def work(item: int) -> None:
        nonlocal running, most
        begun.append(item)
        running += 1
        most = max(most, running)
        await turns(item % 3)
        running -= 1

    await aio.side_by_side(range(10), work, at_once=3)
    assert begun == list(range(10))
    assert most == 3


async def test_what_one_item_raises_ends_the_others() -> None:
    ended = []

    async def work(item: int) -> None:
        if item == 1:
            raise LookupError("no such thing")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(item)

    with pytest.raises(ExceptionGroup) as raised:
        await aio.side_by_side(range(10), work, at_once=2)
    assert [str(error) for error in raised.value.exceptions] == ["no such thing"]
    assert ended == [0]


# --- root tasks ------------------------------------------------------------------------------------------------------


async def test_the_first_failure_is_raised_and_the_others_are_logged(caplog):
    async def fail(text):
        raise ValueError(text)

    running = [asyncio.create_task(fail(name), name=name) for name in ("one", "two")]
    running.append(asyncio.create_task(asyncio.sleep(60), name="sleeps"))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="one") as caught:
        await aio.end(running)
    # The program's last line shows it, with its traceback.
    assert caught.value.__notes__ == ["root task one"]
    [record] = caplog.records
    assert record.getMessage() == "ValueError: two (root task two)"
    assert record.exc_info
    assert running[2].cancelled()


async def test_tasks_that_are_cancelled_have_not_failed(caplog):
    running = [asyncio.create_task(asyncio.sleep(60), name="sleeps")]
    await aio.end(running)
    assert caplog.records == []
