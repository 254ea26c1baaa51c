"""Work by key on the event loop: at once, later, or again after a failure, like a work queue of client-go.

One worker at a time works on a key. A key that is added during work on it is worked on once more. A key that fails
waits longer each time. Groups of keys take turns, and no group gets all workers (`runtime.slots`).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from multus_daemon.runtime.deadline import backoff
from multus_daemon.runtime.slots import URGENT, Groups, Slot, Turns

K = TypeVar("K", bound=Hashable)

NEVER: Final = float("inf")
_JITTER: Final = 0.1


class RetryError(Exception):
    """The work must be done again after a pause. The work has logged the reason: the queue does not report it."""


@dataclass(slots=True, eq=False)
class _Item(Generic[K]):
    key: K
    due: float = NEVER
    """When the key begins to wait for a worker, on the loop's clock; NEVER while it waits or is worked on."""
    slot: Slot | None = None
    """The slot of its worker, or the wait for a slot; None if it is neither worked on nor waits."""
    again: float = NEVER
    """When it is due again after the present work."""
    is_fresh: bool = False
    """True if it was added during the present work: if that fails, it is due without a pause."""
    is_forgotten: bool = False
    """True if it was dropped during the present work."""
    failures: int = 0
    """Number of failures since its last success."""
    problem: str = ""
    """Text of the last failure; empty after a success."""
    delays: Iterator[float] | None = None
    """The pauses after its next failures."""
    paused_until: float = -NEVER

    @property
    def runs(self) -> bool:
        return self.slot is not None and self.slot.granted


class WorkQueue(Generic[K]):
    """The keys that are due, now or later. For one event loop at a time."""

    def __init__(
        self,
        work: Callable[[K], Awaitable[None]],
        *,
        retry: tuple[float, float],
        shared: bool = False,
        failed: Callable[[K, Exception, float], None] = lambda key, error, seconds: None,
        pause: Callable[[Exception, float], float] = lambda error, seconds: seconds,
        at_once: int = 1,
        reserved: int = 0,
        place: Callable[[K], tuple[int, Groups]] = lambda key: (URGENT + 1, ()),
        not_before: Callable[[K], float] = lambda key: -NEVER,
        name: str = "work",
    ) -> None:
        """`work` succeeds if it returns. After an exception its key is due after a pause, between those of `retry`.

        `shared`: all keys depend on the same server, so they have one pause, and only one is tried after it.
        `failed` is called with the exception and the pause in seconds. `pause` may change the pause after an exception;
        with 0 seconds it returns the shortest. `at_once`: number of workers; keys that are urgent when due have
        `reserved` more. `place` returns rank and groups of a key: see `Turns`. `not_before` returns the earliest time,
        on the loop's clock, at which a key may be due. `name`: of the tasks.
        """
        self._work = work
        self._retry = retry
        self._shared = shared
        self._failed = failed
        self._pause = pause
        self._turns = Turns(at_once + reserved, reserved=reserved, kept=1)
        self._place = place
        self._not_before = not_before
        self._name = name
        self._items: dict[K, _Item[K]] = {}
        self._timers: list[tuple[float, int, _Item[K]]] = []
        """A heap; an entry whose time is not its item's any more counts for nothing."""
        self._numbers = itertools.count()
        self._delays: Iterator[float] | None = None
        """If the pauses are shared: the next ones; None after a success."""
        self._paused_until = self._least_until = -NEVER
        """If the pauses are shared: when this one ends, and when it may be ended by `resume`."""
        self._wake = asyncio.Event()

    def add(self, key: K) -> None:
        """Have the key worked on now, and forget its failures: the reason for them may be gone."""
        item = self._item(key)
        item.failures, item.delays, item.paused_until, item.is_fresh = 0, None, -NEVER, item.runs
        self._set_due(item, self._now())

    def add_after(self, key: K, seconds: float) -> bool:
        """Have the key worked on in `seconds`, after its pause for a failure; False if it is due earlier anyway.

        In a call from the work on that key, `seconds` count from now; if the work fails, its pause counts instead.
        """
        item = self._item(key)
        return self._set_due(item, max(self._now() + seconds, item.paused_until))

    def forget(self, key: K) -> None:
        """Drop the key and its failures. Work on it that has begun goes on."""
        item = self._items.get(key)
        if item is not None and item.runs:
            item.is_forgotten, item.is_fresh, item.again, item.failures = True, False, NEVER, 0
        elif item is not None:
            del self._items[key]
            item.due = NEVER
            if item.slot is not None:
                self._turns.leave(item.slot)

    def resume(self) -> None:
        """End the shared pause: the server has answered."""
        if self._delays:
            self._paused_until = max(self._least_until, min(self._paused_until, self._now()))
            self._wake.set()

    def failures(self, key: K) -> int:
        """Return how many times the work on the key has failed since its last success."""
        item = self._items.get(key)
        return item.failures if item else 0

    @property
    def problems(self) -> dict[K, str]:
        """The last error of each key whose last work failed. Thread-safe."""
        return {item.key: item.problem for item in tuple(self._items.values()) if item.failures}

    async def run(self) -> None:
        """Work for ever."""
        await self._serve(lambda: False)

    async def drain(self) -> None:
        """Work until no key is left."""
        await self._serve(lambda: not self._items)

    async def drain_once(self) -> None:
        """Work once on each key that is due now."""
        self._line_up()
        await self._serve(lambda: not self._turns.running and not self._turns.waiting, more=False)

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def _serve(self, is_done: Callable[[], bool], *, more: bool = True) -> None:
        """Work until `is_done`; `more`: also on keys that are due later."""
        loop = asyncio.get_running_loop()
        # A queue may go on in another loop.
        self._wake = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                if more:
                    self._line_up()
                while (item := self._next()) is not None:
                    group.create_task(self._serve_one(item), name=self._name)
                if is_done():
                    return
                soonest = self._timers[0][0] if self._timers and more else NEVER
                # The end of the one that is tried wakes this, too.
                if self._delays and self._turns.waiting and not self._turns.running and more:
                    soonest = min(soonest, self._paused_until)
                timer = None if soonest == NEVER else loop.call_at(soonest, self._wake.set)
                try:
                    await self._wake.wait()
                finally:
                    if timer is not None:
                        timer.cancel()

    def _line_up(self) -> None:
        """Move each item that is due to the waiters for a worker."""
        now = self._now()
        while self._timers and (self._timers[0][0] <= now or self._timers[0][2].due != self._timers[0][0]):
            due, _, item = heapq.heappop(self._timers)
            if item.due == due:
                self._enter(item)

    def _enter(self, item: _Item[K]) -> None:
        rank, groups = self._place(item.key)
        item.due, item.slot = NEVER, Slot(item, rank, groups)
        self._turns.wait(item.slot)

    def _next(self) -> _Item[K] | None:
        """Give the next waiting item a worker; None if none waits or no worker is free for it."""
        if self._delays and (self._turns.running or self._now() < self._paused_until):
            return None
        slot = self._turns.next()
        item: _Item[K] | None = slot.key if slot else None
        return item

    # --- one item ----------------------------------------------------------------------------------------------------

    async def _serve_one(self, item: _Item[K]) -> None:
        is_tried = False
        try:
            await self._work(item.key)
            is_tried = True
            item.failures, item.delays, item.paused_until = 0, None, -NEVER
            self._delays = None
        except Exception as error:
            is_tried = True
            self._note_failure(item, error)
        finally:
            assert item.slot is not None
            self._turns.end(item.slot)
            item.slot = None
            # The work of a queue that is ended is not done.
            self._end(item, is_tried=is_tried)
            self._wake.set()

    def _end(self, item: _Item[K], *, is_tried: bool) -> None:
        """After the work on the item, set when it is due again, or drop it. `is_tried`: False if it did not begin."""
        again, item.again = (item.again if is_tried else self._now()), NEVER
        if item.failures and not item.is_forgotten and is_tried:
            again = min(again, item.paused_until) if item.is_fresh else item.paused_until
        item.is_fresh = False
        if again == NEVER or (item.is_forgotten and not is_tried):
            self._items.pop(item.key, None)
        elif self._shared and item.failures:
            self._enter(item)
        else:
            self._set_due(item, again)

    def _note_failure(self, item: _Item[K], error: Exception) -> None:
        if item.is_forgotten:
            return
        now = self._now()
        item.failures += 1
        item.problem = str(error) or type(error).__name__
        if self._shared:
            self._delays = self._delays or backoff(*self._retry, jitter=_JITTER)
            # What was begun before the pause fails for the same reason.
            if now >= self._paused_until:
                self._least_until = now + self._pause(error, 0.0)
                self._paused_until = now + self._pause(error, next(self._delays))
            item.paused_until = now
            seconds = self._paused_until - now
        else:
            item.delays = item.delays or backoff(*self._retry, jitter=_JITTER)
            seconds = self._pause(error, next(item.delays))
            item.paused_until = now + seconds
        if not isinstance(error, RetryError):
            self._failed(item.key, error, seconds)

    def _item(self, key: K) -> _Item[K]:
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _Item(key)
        item.is_forgotten = False
        return item

    def _set_due(self, item: _Item[K], at: float) -> bool:
        """Make the item due `at` that time, unless it is due earlier; return True if this changed it."""
        if item.runs:
            is_earlier, item.again = at < item.again, min(at, item.again)
            return is_earlier
        if item.slot is not None:
            return False
        at = max(at, self._not_before(item.key))
        if at >= item.due:
            return False
        item.due = at
        heapq.heappush(self._timers, (at, next(self._numbers), item))
        if at <= self._timers[0][0]:
            self._wake.set()
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
