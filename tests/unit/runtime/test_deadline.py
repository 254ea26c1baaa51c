import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Deadline, ExpiredError, Interrupted, backoff
from tests.aside import Aside
from tests.waiting import PATIENCE

LONG = 60.0
"""Longer than any test here waits."""


class Watch:
    """Measure how long a block takes."""

    def __enter__(self) -> "Watch":
        self._began = time.monotonic()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.seconds = time.monotonic() - self._began


# --- Deadline --------------------------------------------------------------------------------------------------------


def test_without_a_time_it_never_ends() -> None:
    limit = Deadline()
    assert limit.left == float("inf")
    assert not limit.expired
    assert not limit.stopped
    limit.check()


def test_its_time_goes_by_and_is_over() -> None:
    limit = Deadline(0.05)
    assert 0 < limit.left <= 0.05
    limit.check()
    time.sleep(0.06)
    assert limit.left == 0
    assert limit.expired
    assert not limit.stopped
    with pytest.raises(Interrupted):
        limit.check()


def test_it_can_be_stopped_before_its_time_and_more_than_once() -> None:
    limit = Deadline(LONG)
    limit.stop()
    limit.stop()
    assert limit.stopped
    assert not limit.expired
    with pytest.raises(Interrupted):
        limit.check()


def test_the_word_may_be_shared() -> None:
    stopped: futures.Future[None] = futures.Future()
    first, second = Deadline(LONG, stopped=stopped), Deadline(stopped=stopped)
    first.stop()
    assert second.stopped


def test_an_interruption_is_no_exception_so_that_no_cleanup_takes_it_for_one() -> None:
    assert not issubclass(Interrupted, Exception)


def test_an_expired_block_is_a_timeout() -> None:
    assert issubclass(ExpiredError, TimeoutError)


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_pause_lasts_as_long_as_was_said() -> None:
    with Watch() as watch:
        Deadline(LONG).pause(0.05)
    assert 0.05 <= watch.seconds < LONG / 2


@pytest.mark.parametrize("wait", [lambda limit: limit.pause(LONG), lambda limit: limit.wait(futures.Future())])
def test_the_end_of_the_time_interrupts_a_wait(wait: Callable[[Deadline], None]) -> None:
    with Watch() as watch, pytest.raises(Interrupted):
        wait(Deadline(0.05))
    assert 0.05 <= watch.seconds < LONG / 2


@pytest.mark.parametrize("seconds", [LONG, float("inf")])
@pytest.mark.parametrize("wait", [lambda limit: limit.pause(LONG), lambda limit: limit.wait(futures.Future())])
def test_a_stop_interrupts_a_wait_in_another_thread(wait: Callable[[Deadline], None], seconds: float) -> None:
    limit, waits = Deadline(seconds), threading.Event()

    def work() -> None:
        waits.set()
        wait(limit)

    aside = Aside(work)
    assert waits.wait(PATIENCE)
    time.sleep(0.02)
    assert not aside.done
    with Watch() as watch:
        limit.stop()
        with pytest.raises(Interrupted):
            aside.result()
    assert watch.seconds < LONG / 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_returns_when_one_of_the_events_is_done_whatever_came_of_it(fails: bool) -> None:
    never, event = futures.Future[None](), futures.Future[None]()
    aside = Aside(lambda: Deadline(LONG).wait(never, event))
    time.sleep(0.01)
    assert not aside.done
    if fails:
        event.set_exception(ZeroDivisionError())
    else:
        event.set_result(None)
    aside.result()


def test_what_is_done_is_done_even_where_the_time_is_over_or_the_work_is_to_stop() -> None:
    event = futures.Future[None]()
    event.set_result(None)
    limit = Deadline(-1)
    limit.stop()
    limit.wait(event)


def test_a_wait_leaves_nothing_behind_at_what_it_waited_for() -> None:
    limit, event = Deadline(LONG), futures.Future[None]()
    for _ in range(10):
        with pytest.raises(ExpiredError), deadline.given(limit), deadline.within(0.001) as inner:
            inner.wait(event)
    assert event._waiters == limit._stopped._waiters == []


# --- of the context --------------------------------------------------------------------------------------------------


def test_without_one_the_context_has_one_without_end() -> None:
    assert deadline.current().left == float("inf")
    deadline.check()
    deadline.pause(0)


def test_a_block_has_the_given_one_and_no_other() -> None:
    outer, inner = Deadline(LONG), Deadline()
    with deadline.given(outer) as entered:
        assert entered is outer is deadline.current()
        with deadline.given(inner):
            assert deadline.current() is inner
        assert deadline.current() is outer
        with pytest.raises(ZeroDivisionError), deadline.given(inner):
            raise ZeroDivisionError
        assert deadline.current() is outer
    assert deadline.current() not in (outer, inner)


def test_check_and_pause_are_of_the_context() -> None:
    limit = Deadline()
    limit.stop()
    with deadline.given(limit):
        for waits in (deadline.check, lambda: deadline.pause(LONG)):
            with pytest.raises(Interrupted):
                waits()


# --- within ----------------------------------------------------------------------------------------------------------


def test_a_block_that_waits_too_long_has_expired() -> None:
    with Watch() as watch, pytest.raises(ExpiredError) as raised, deadline.within(0.05):
        deadline.pause(LONG)
    assert 0.05 <= watch.seconds < LONG / 2
    assert isinstance(raised.value.__cause__, Interrupted)


def test_a_block_in_time_returns_and_its_deadline_is_gone() -> None:
    with deadline.within(0.01) as inner:
        assert deadline.current() is inner
    time.sleep(0.02)
    deadline.check()


def test_an_error_of_the_block_is_its_own_also_when_the_time_is_over() -> None:
    with pytest.raises(ZeroDivisionError), deadline.within(0):
        raise ZeroDivisionError


def test_the_narrower_one_counts_whether_inside_or_outside() -> None:
    with deadline.within(LONG) as outer, pytest.raises(ExpiredError), deadline.within(0.01) as inner:
        deadline.pause(LONG)
    assert inner.left <= 0.01 < outer.left
    with pytest.raises(ExpiredError), deadline.within(0.01) as outer, deadline.within(LONG) as inner:
        deadline.pause(LONG)
    assert inner.end == outer.end


def test_the_block_whose_time_is_over_is_the_one_that_expires() -> None:
    """The inner one has time left: it must not answer for the outer one's end."""

    def inner() -> None:
        with pytest.raises(Interrupted), deadline.within(LONG):
            deadline.pause(LONG)
        deadline.check()

    with pytest.raises(ExpiredError), deadline.within(0.01):
        inner()


def test_a_block_goes_on_after_one_inside_has_expired() -> None:
    with deadline.within(LONG):
        with contextlib.suppress(ExpiredError), deadline.within(0.01):
            deadline.pause(LONG)
        deadline.pause(0.001)
        deadline.check()


def test_a_time_that_was_given_is_interrupted_and_does_not_expire() -> None:
    """Whoever gave it knows what it means; it is the request's, not this block's."""
    with deadline.given(Deadline(0.01)), pytest.raises(Interrupted), deadline.within(LONG):
        deadline.pause(LONG)


def test_a_stop_goes_through_every_block() -> None:
    limit, waits = Deadline(), threading.Event()

    def work() -> None:
        with deadline.given(limit), deadline.within(LONG), deadline.within(LONG / 2):
            waits.set()
            deadline.pause(LONG)

    aside = Aside(work)
    assert waits.wait(PATIENCE)
    limit.stop()
    with pytest.raises(Interrupted):
        aside.result()


def test_a_stop_counts_for_more_than_a_time_that_is_over_too() -> None:
    limit = Deadline()

    def work() -> None:
        limit.stop()
        time.sleep(0.02)
        deadline.check()

    with deadline.given(limit), pytest.raises(Interrupted), deadline.within(0.01) as inner:
        work()
    assert inner.expired


def test_stopping_the_deadline_of_a_block_stops_the_work_around_it() -> None:
    limit = Deadline()
    with deadline.given(limit), deadline.within(LONG) as inner:
        inner.stop()
        assert limit.stopped
        with pytest.raises(Interrupted):
            deadline.check()


def test_what_was_ended_by_itself_has_not_expired() -> None:
    """A call of the event loop ends like this when other code cancels its task."""
    with pytest.raises(Interrupted), deadline.within(LONG):
        raise Interrupted


# --- a block with a deadline of its own ------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["stopped", "expired"])
def test_a_shielded_block_works_whatever_has_become_of_the_deadline_outside(over: str) -> None:
    limit = Deadline(LONG)
    if over == "stopped":
        limit.stop()
    else:
        limit.end = time.monotonic() - 1
    with deadline.given(limit):
        with deadline.given(Deadline()), deadline.within(LONG) as inner:
            deadline.pause(0.001)
            assert not inner.stopped
            assert LONG / 2 < inner.left <= LONG
        with pytest.raises(Interrupted):
            deadline.check()


def test_a_stop_does_not_reach_into_a_shielded_block_and_waits_behind_it() -> None:
    limit, log = Deadline(), []

    def work() -> None:
        with deadline.given(limit):
            with deadline.given(Deadline()), deadline.within(LONG):
                limit.stop()
                deadline.pause(0.01)
                log.append("undone")
            deadline.pause(LONG)

    with pytest.raises(Interrupted):
        Aside(work).result()
    assert log == ["undone"]


# --- backoff ----------------------------------------------------------------------------------------------------------


def first(delays: Iterator[float], count: int) -> list[float]:
    return list(itertools.islice(delays, count))


def test_delays_double_up_to_the_last() -> None:
    assert first(backoff(0.5, 5), 6) == [0.5, 1, 2, 4, 5, 5]


@given(st.floats(0.01, 10), st.floats(10, 100), st.floats(0, 0.9))
def test_jitter_is_a_share_of_the_delay(start: float, last: float, jitter: float) -> None:
    for delay, plain in zip(
        first(backoff(start, last, jitter=jitter), 12), first(backoff(start, last), 12), strict=True
    ):
        assert plain * (1 - jitter) - 1e-9 <= delay <= plain * (1 + jitter) + 1e-9


def test_jitter_differs() -> None:
    assert len(set(first(backoff(1, 1, jitter=0.5), 20))) > 1
