import asyncio
import contextvars
import gc
import logging
import threading
import time
from collections.abc import Callable

import pytest

from multus_daemon.runtime import deadline, portal
from multus_daemon.runtime.deadline import Deadline, ExpiredError, Interrupted
from multus_daemon.runtime.portal import LoopPortal
from tests.waiting import PATIENCE, eventually

LONG = 60.0
"""Longer than any test here waits."""


class Hanging:
    """Blocking work that pauses until its deadline interrupts it, and then takes until `may_end` to undo its part."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.interrupted = threading.Event()
        self.may_end = threading.Event()
        self.ended = False

    def __call__(self) -> None:
        self.begun.set()
        try:
            deadline.pause(LONG)
        finally:
            self.interrupted.set()
            self.may_end.wait(PATIENCE)
            self.ended = True


# --- run -------------------------------------------------------------------------------------------------------------


async def test_work_returns_its_result_in_a_thread_with_the_name_the_context_and_the_deadline() -> None:
    field: contextvars.ContextVar[str] = contextvars.ContextVar("field")
    field.set("seen")
    limit = Deadline(LONG)

    def work() -> tuple[str, str, bool, Deadline]:
        thread = threading.current_thread()
        return field.get(), thread.name, thread is threading.main_thread(), deadline.current()

    assert await portal.run(limit, work, name="ADD c1") == ("seen", "ADD c1", False, limit)
    assert deadline.current() is not limit, "the deadline is that of the work, not of the caller"


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), TimeoutError(110, "of NFS"), TimeoutError()])
async def test_what_the_work_raises_is_raised_with_its_traceback(error: Exception) -> None:
    """asyncio's own way from a thread makes a new TimeoutError, and the log would not say where it came from."""

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await portal.run(Deadline(), fail)
    assert raised.value is error
    assert raised.traceback[-1].name == "fail"


async def test_work_whose_time_is_over_is_a_timeout_when_it_has_ended() -> None:
    work = Hanging()
    work.may_end.set()
    with pytest.raises(TimeoutError) as raised:
        await portal.run(Deadline(0.02), work)
    assert work.ended
    assert isinstance(raised.value.__cause__, Interrupted)


async def test_work_that_is_stopped_by_somebody_else_is_cancelled_for_its_caller() -> None:
    work, limit = Hanging(), Deadline(LONG)
    work.may_end.set()
    running = asyncio.create_task(portal.run(limit, work))
    await eventually(work.begun.is_set)
    limit.stop()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert work.ended


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_caller_stops_the_work_and_waits_for_its_end(
    times: int, caplog: pytest.LogCaptureFixture
) -> None:
    work, limit = Hanging(), Deadline(LONG)
    running = asyncio.create_task(portal.run(limit, work))
    await eventually(work.begun.is_set)
    for _ in range(times):
        running.cancel()
        await asyncio.sleep(0.01)
        assert not running.done(), "what comes after the call must not run beside the work"
    assert limit.stopped
    assert work.interrupted.wait(PATIENCE)
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert work.ended
    del running
    gc.collect()
    assert caplog.records == [], "asyncio reports no exception that nobody retrieved"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_is_cancelled_whatever_the_work_came_to(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gate = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        gate.wait(PATIENCE)
        if fails:
            raise RuntimeError("dropped")
        return "dropped"

    running = asyncio.create_task(portal.run(Deadline(), work))
    await eventually(begun.is_set)
    running.cancel()
    await asyncio.sleep(0.01)
    assert not running.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    del running
    gc.collect()
    assert caplog.records == []


async def test_a_thread_that_the_kernel_holds_is_logged_until_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portal, "_STILL_RUNNING_SECONDS", 0.01)
    work = Hanging()
    running = asyncio.create_task(portal.run(Deadline(), work, name="ADD"))
    await eventually(work.begun.is_set)
    assert not caplog.records
    running.cancel()
    await eventually(lambda: len(caplog.records) >= 2)
    assert {(record.levelno, record.getMessage().split(":")[0]) for record in caplog.records} == {
        (logging.ERROR, "ADD")
    }
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running


# --- LoopPortal.call -------------------------------------------------------------------------------------------------


async def from_a_thread(work: Callable[[], object], limit: Deadline | None = None) -> object:
    """Run `work` in a thread, like a request, while the loop stays free."""
    return await portal.run(limit or Deadline(), work)


async def test_a_call_runs_on_the_loop_and_returns_what_the_coroutine_returns() -> None:
    way = LoopPortal()

    async def work(first: int, *, second: int) -> tuple[int, object]:
        await asyncio.sleep(0)
        return first + second, threading.current_thread()

    assert await from_a_thread(lambda: way.call(work, 1, second=2)) == (3, threading.main_thread())


async def test_the_coroutine_sees_the_context_of_the_thread() -> None:
    """The fields of its log lines, and its turn among those who wait for a place."""
    way = LoopPortal()
    field: contextvars.ContextVar[str] = contextvars.ContextVar("field", default="")
    told: list[str] = []

    async def look() -> str:
        return field.get()

    def thread() -> str:
        field.set("seen")
        way.tell(lambda: told.append(field.get()))
        return way.call(look)

    assert await from_a_thread(thread) == "seen"
    assert told == ["seen"]
    assert field.get() == ""


async def test_what_the_coroutine_raises_is_raised_in_the_thread() -> None:
    way = LoopPortal()

    async def fail() -> None:
        raise LookupError("no such pod")

    with pytest.raises(LookupError, match="no such pod"):
        await from_a_thread(lambda: way.call(fail))


async def test_a_call_may_be_to_a_loop_that_is_not_the_running_one() -> None:
    """So the composition root may make it before the loop has anything to do."""
    way = LoopPortal(asyncio.get_running_loop())
    assert await from_a_thread(lambda: way.call(asyncio.sleep, 0, "done")) == "done"


async def test_calls_of_several_threads_go_on_side_by_side() -> None:
    way, both = LoopPortal(), asyncio.Barrier(2)

    async def meet() -> None:
        async with asyncio.timeout(PATIENCE):
            await both.wait()

    await asyncio.gather(*(from_a_thread(lambda: way.call(meet)) for _ in range(2)))


class Coroutine:
    """Hangs on the loop until it is cancelled, and then takes until `may_end` to clean up."""

    def __init__(self) -> None:
        self.begun = self.cancelled = self.ended = False
        self.may_end = asyncio.Event()

    async def __call__(self) -> None:
        self.begun = True
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            self.cancelled = True
            await self.may_end.wait()
            self.ended = True
            raise


async def test_an_interrupted_call_cancels_the_coroutine_and_waits_for_its_end() -> None:
    way, work, limit = LoopPortal(), Coroutine(), Deadline()
    log: list[str] = []

    def thread() -> None:
        try:
            way.call(work)
        except Interrupted:
            log.append("interrupted" if work.ended else "too early")
            raise

    running = asyncio.create_task(from_a_thread(thread, limit))
    await eventually(lambda: work.begun)
    assert not work.cancelled
    limit.stop()
    await eventually(lambda: work.cancelled)
    await asyncio.sleep(0.02)
    assert log == []
    assert not running.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert log == ["interrupted"]


async def test_a_call_whose_time_is_over_is_interrupted_the_same_way() -> None:
    way, work = LoopPortal(), Coroutine()
    work.may_end.set()

    def thread() -> bool:
        try:
            with deadline.within(0.2):
                way.call(work)
        except ExpiredError:
            return work.ended
        return False

    assert await from_a_thread(thread)


async def test_an_interrupted_call_drops_what_the_coroutine_still_made_or_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller no longer wants the result, so the late end of the coroutine is dropped."""
    way = LoopPortal()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            raise LookupError("too late") from None

    def thread() -> bool:
        try:
            with deadline.within(0.02):
                way.call(stubborn)
        except ExpiredError:
            return True
        return False

    assert await from_a_thread(thread)
    gc.collect()
    assert caplog.records == []


@pytest.mark.parametrize("limit", [Deadline(-1), Deadline()])
async def test_a_call_of_work_that_is_to_stop_never_begins(limit: Deadline) -> None:
    if not limit.expired:
        limit.stop()
    way, work = LoopPortal(), Coroutine()

    def thread() -> bool:
        with deadline.given(limit), pytest.raises(Interrupted):
            way.call(work)
        return True

    assert await from_a_thread(thread)
    await asyncio.sleep(0)
    assert not work.begun


async def test_a_call_interrupted_before_the_loop_took_it_up_never_begins() -> None:
    way, work = LoopPortal(), Coroutine()
    # `begin` is queued behind the rest of this test's step, so the stop is there first.
    limit = Deadline()
    running = asyncio.create_task(from_a_thread(lambda: way.call(work), limit))
    await asyncio.sleep(0)
    time.sleep(0.05)
    limit.stop()
    time.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not work.begun


async def test_a_task_that_somebody_else_cancels_interrupts_the_caller() -> None:
    """The end of the event loop does this: it cancels all tasks."""
    way, work = LoopPortal(), Coroutine()
    work.may_end.set()
    before = asyncio.all_tasks()

    def thread() -> str:
        try:
            way.call(work)
        except Interrupted:
            return "interrupted"
        return ""

    running = asyncio.create_task(from_a_thread(thread))
    await eventually(lambda: work.begun)
    (task,) = asyncio.all_tasks() - before - {running}
    task.cancel()
    assert await running == "interrupted"


def test_a_call_to_a_loop_that_has_ended_is_interrupted() -> None:
    loop = asyncio.new_event_loop()
    way = LoopPortal(loop)
    loop.close()
    with pytest.raises(Interrupted):
        way.call(asyncio.sleep, 0)
    way.tell(pytest.fail, "it runs nowhere")


# --- LoopPortal.tell -------------------------------------------------------------------------------------------------


async def test_what_is_told_is_done_on_the_loop_and_nobody_waits_for_it() -> None:
    way = LoopPortal()
    log: list[tuple[str, int, object]] = []

    def note(what: str, *, number: int) -> None:
        log.append((what, number, threading.current_thread()))

    def thread() -> None:
        way.tell(note, "event", number=1)
        way.tell(note, "event", number=2)

    await from_a_thread(thread)
    await eventually(lambda: len(log) == 2)
    assert log == [("event", number, threading.main_thread()) for number in (1, 2)]


async def test_work_that_is_to_stop_may_still_tell() -> None:
    way, limit = LoopPortal(), Deadline()
    log: list[str] = []
    limit.stop()

    def thread() -> None:
        with deadline.given(limit):
            way.tell(log.append, "event")

    await from_a_thread(thread)
    await eventually(lambda: log == ["event"])
