import asyncio
import contextvars
import gc
import itertools
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.base import aio


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


# --- backoff ---------------------------------------------------------------------------------------------------------


def first(delays: Iterator[float], count: int) -> list[float]:
    return list(itertools.islice(delays, count))


def test_delays_double_up_to_the_last() -> None:
    assert first(aio.backoff(0.5, 5), 6) == [0.5, 1, 2, 4, 5, 5]


@given(st.floats(0.01, 10), st.floats(10, 100), st.floats(0, 0.9))
def test_jitter_is_a_share_of_the_delay(start: float, last: float, jitter: float) -> None:
    for delay, plain in zip(
        first(aio.backoff(start, last, jitter=jitter), 12), first(aio.backoff(start, last), 12), strict=True
    ):
        assert plain * (1 - jitter) - 1e-9 <= delay <= plain * (1 + jitter) + 1e-9


def test_jitter_differs() -> None:
    assert len(set(first(aio.backoff(1, 1, jitter=0.5), 20))) > 1


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


# --- Barriers --------------------------------------------------------------------------------------------------------


async def test_an_open_barrier_is_passed_at_once() -> None:
    barriers = aio.Barriers()
    passing = barriers.passed(["a", "b"])
    with pytest.raises(StopIteration):
        passing.send(None)


async def test_who_comes_to_a_closed_barrier_waits_until_it_opens() -> None:
    barriers, log = aio.Barriers(), []

    async def come(*keys: str) -> None:
        await barriers.passed(keys)
        log.append(keys)

    async with barriers.closed("b"):
        tasks = [asyncio.create_task(come(*keys)) for keys in (("a",), ("a", "b"), ("c",))]
        await turns()
        assert log == [("a",), ("c",)]
    await asyncio.gather(*tasks)
    assert log[-1] == ("a", "b")


async def test_a_barrier_is_closed_by_one_at_a_time_and_opened_by_an_error() -> None:
    barriers = aio.Barriers()
    closed = 0

    async def close() -> None:
        nonlocal closed
        async with barriers.closed("a"):
            closed += 1
            assert closed == 1
            await turns()
            closed -= 1
            raise ZeroDivisionError

    results = await asyncio.gather(*(close() for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [ZeroDivisionError] * 5
    async with asyncio.timeout(30):
        await barriers.passed(["a"])


async def test_who_gives_up_at_a_barrier_leaves_it_as_it_is() -> None:
    barriers = aio.Barriers()
    async with barriers.closed("a"):
        for waiting in (barriers.passed(["a"]), barriers.closed("a").__aenter__()):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await waiting
    async with asyncio.timeout(30), barriers.closed("a"):
        pass


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
            # As one that takes its time to be ended.
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


async def test_a_disk_that_hangs_keeps_only_those_waiting_that_wait_for_it() -> None:
    goes_on = threading.Event()
    stuck = [asyncio.create_task(aio.on_disk(goes_on.wait, 20)) for _ in range(100)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            assert await aio.in_thread(lambda: "done") == "done"
    finally:
        goes_on.set()
        await asyncio.gather(*stuck)


# --- Reads -----------------------------------------------------------------------------------------------------------


class Hanging:
    """A disk that answers when it is told to; each answer is another one."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.begun = 0

    def read(self) -> int:
        self.begun += 1
        number = self.begun
        self.answers.wait(20)
        return number


async def test_a_read_returns_what_it_found_or_raises_and_sees_the_context() -> None:
    field: contextvars.ContextVar[str] = contextvars.ContextVar("field")
    field.set("seen")
    reads = aio.Reads(5)
    assert await reads.of("a", lambda: (field.get(), threading.current_thread() is threading.main_thread())) == (
        "seen",
        False,
    )
    with pytest.raises(ZeroDivisionError):
        await reads.of("a", lambda: 1 // 0)


async def test_the_wait_for_a_read_that_hangs_ends_and_others_do_not_notice() -> None:
    # The other read has the same time, which has to do on a busy machine.
    disk, reads = Hanging(), aio.Reads(1)
    try:
        with pytest.raises(TimeoutError, match=r"\[Errno 110\] the disk did not answer within 1 s"):
            await reads.of("a", disk.read)
        async with asyncio.timeout(30):
            assert await reads.of("b", lambda: "done") == "done"
    finally:
        disk.answers.set()


async def test_an_error_of_time_that_the_disk_itself_has_is_its_own() -> None:
    def fail() -> None:
        raise TimeoutError(110, "of NFS")

    with pytest.raises(TimeoutError, match="of NFS"):
        await aio.Reads(5).of("a", fail)


async def test_a_read_that_hangs_takes_one_thread_however_often_it_is_asked_for() -> None:
    disk, reads = Hanging(), aio.Reads(0.02)
    try:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await reads.of("a", disk.read)
        assert disk.begun == 1
    finally:
        disk.answers.set()


async def test_who_comes_after_a_read_that_hung_reads_anew(caplog: pytest.LogCaptureFixture) -> None:
    """What has been found long ago may be of before a write."""
    disk, reads = Hanging(), aio.Reads(5)
    first = asyncio.create_task(reads.of("a", disk.read))
    while not disk.begun:
        await asyncio.sleep(0.001)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(reads.of("a", disk.read))
    await turns()
    disk.answers.set()
    assert await second == 2
    assert caplog.records == []


async def test_a_read_without_a_thread_yet_is_dropped_with_its_caller() -> None:
    """With every thread hanging, what waits for one does not become more and more."""
    disk, late = Hanging(), Hanging()
    late.answers.set()
    reads = aio.Reads(0.05)
    asked = [asyncio.create_task(reads.of(number, disk.read)) for number in range(16)]
    try:
        await asyncio.wait(asked)
        with pytest.raises(TimeoutError):
            await reads.of("late", late.read)
    finally:
        disk.answers.set()
    assert await aio.Reads(5).of("after", lambda: "done") == "done"
    assert late.begun == 0
    assert [type(task.exception()) for task in asked] == [TimeoutError] * 16
