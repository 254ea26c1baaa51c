import asyncio

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
    assert len(locks._locks) == 0


async def test_keys_do_not_wait_for_each_other() -> None:
    locks = aio.KeyedLock()
    async with locks.hold("a"), asyncio.timeout(30), locks.hold("b"):
        assert len(locks._locks) == 2
    assert len(locks._locks) == 0


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
    assert len(locks._locks) == (0 if cancelled == "both" else 1)
    for task in (holder, waiter):
        task.cancel()
    await asyncio.gather(holder, waiter, return_exceptions=True)
    assert len(locks._locks) == 0
    async with asyncio.timeout(30), locks.hold("a"):
        assert len(locks._locks) == 1


# --- TaskGroupOfRequests ---------------------------------------------------------------------------------------------


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


async def test_a_run_that_has_ended_is_not_shared() -> None:
    calls, work = aio.SharedCalls(), Work()
    work.may_end.set()
    first = asyncio.create_task(calls.of("a", work))
    while not work.ended:
        # The loop calls the task's callbacks in its next iteration.
        await asyncio.sleep(0)
    assert await calls.of("a", work) == 2
    assert await first == 1


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
