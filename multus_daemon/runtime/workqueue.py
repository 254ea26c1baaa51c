"""Work by key on the event loop: at once, later, or again after a failure. As the work queues of client-go.

One worker at a time works on a key. A key that is added meanwhile is worked on once more. A key that fails waits longer
each time. Keys of the same groups stand in one line; lines take turns, and no group gets all workers.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from multus_daemon.runtime.deadline import backoff

K = TypeVar("K", bound=Hashable)

NEVER: Final = float("inf")

Groups = tuple[str, ...]
_Line = tuple[bool, Groups]
"""Urgency and groups of the keys that stand in one line."""

_ALL: Final = "all"
_ORDINARY: Final = "ordinary"
_FEW: Final = 3


class RetryError(Exception):
    """The work must be done again after a pause. It has been logged: the queue reports it to no one."""


@dataclass(slots=True, eq=False)
class _Item(Generic[K]):
    key: K
    due: float = NEVER
    """When it enters its line, on the loop's clock; NEVER once it has, and while it is worked on."""
    runs: bool = False
    in_line: bool = False
    line: _Line = (False, ())
    """The line that it stands in, or was taken from."""
    again: float = NEVER
    """When it is due after the present work."""
    is_fresh: bool = False
    """It was added during the present work, so that a failure causes no pause."""
    is_forgotten: bool = False
    """It was dropped during the present work."""
    failures: int = 0
    """Since its last success."""
    problem: str = ""
    """The last error."""
    delays: Iterator[float] | None = None
    """The pauses after its next failures."""
    paused_until: float = -NEVER


class WorkQueue(Generic[K]):
    """The keys that are due, now or later. For one event loop at a time."""

    def __init__(
        self,
        work: Callable[[K], Awaitable[None]],
        *,
        retry: tuple[float, float],
        jitter: float = 0.1,
        shared: bool = False,
        failed: Callable[[K, Exception, float], None] = lambda key, error, seconds: None,
        least: Callable[[Exception], float] = lambda error: 0.0,
        most: Callable[[Exception], float] = lambda error: NEVER,
        at_once: int = 1,
        reserved: int = 0,
        is_urgent: Callable[[K], bool] = lambda key: False,
        groups: Callable[[K], Groups] = lambda key: (),
        not_before: Callable[[K], float] = lambda key: -NEVER,
        name: str = "work",
    ) -> None:
        """`work` succeeds if it returns. After an exception its key is due after a pause, between those of `retry`.

        `shared`: all keys depend on the same server, so they have one pause, and only one is tried after it.
        `failed` is called with the exception and the pause in seconds; `least` and `most` return the shortest and
        the longest pause after an exception (`most`: not of a shared pause). `at_once`: number of workers; keys that
        are urgent when they are due have `reserved` more, and go first. An empty group has no share. `not_before`
        returns the earliest time, on the loop's clock, at which a key may be due. `name`: of the tasks.
        """
        self._work = work
        self._retry = retry
        self._jitter = jitter
        self._shared = shared
        self._failed = failed
        self._least = least
        self._most = most
        self._at_once = at_once
        self._reserved = reserved
        self._is_urgent = is_urgent
        self._groups = groups
        self._not_before = not_before
        self._name = name
        self._items: dict[K, _Item[K]] = {}
        self._timers: list[tuple[float, int, _Item[K]]] = []
        """A heap; an entry whose time is not its item's any more counts for nothing."""
        self._numbers = itertools.count()
        self._lines: dict[_Line, collections.deque[_Item[K]]] = {}
        """The items that wait for a worker; the line whose turn is next comes first."""
        self._running: collections.Counter[Hashable] = collections.Counter()
        """Number of workers: all, those of keys that are not urgent, by groups, and by each group."""
        self._delays: Iterator[float] | None = None
        """If the pauses are shared: the next ones; None after a success."""
        self._paused_until = self._least_until = -NEVER
        """If the pauses are shared: when this one ends, and when it may be ended by `resume`."""
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """The number of keys that are due at some time, or worked on."""
        return len(self._items)

    def add(self, key: K) -> None:
        """Have the key worked on now, and forget its failures: the reason for them may be gone."""
        item = self._item(key)
        item.failures, item.delays, item.paused_until, item.is_fresh = 0, None, -NEVER, item.runs
        self._set_due(item, self._now())

    def add_after(self, key: K, seconds: float) -> bool:
        """Have the key worked on in `seconds`, after the pause of its last failure; False if it is due by then anyway.

        In a call from the work on that key, `seconds` count from now, and a failure of the work comes first.
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
        """The last error of each key whose last work failed."""
        return {item.key: item.problem for item in tuple(self._items.values()) if item.failures}

    def reason(self, key: K) -> str:
        """Return what a key waits for, such as `due in 12 s after 3 failures: no answer`; empty for an unknown key."""
        item = self._items.get(key)
        if item is None:
            return ""
        text = "waits for its turn" if item.in_line else f"due in {max(0.0, item.due - self._now()):.0f} s"
        text = "is worked on" if item.runs else text
        times = "failure" if item.failures == 1 else "failures"
        return f"{text} after {item.failures} {times}: {item.problem}" if item.failures else text

    async def run(self) -> None:
        """Work for ever."""
        await self._serve(lambda: False)

    async def drain(self) -> None:
        """Work until no key is left."""
        await self._serve(lambda: not self._items)

    async def drain_once(self) -> None:
        """Work once on each key that is due now."""
        self._line_up()
        await self._serve(lambda: not self._running and not self._lines, more=False)

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
                soonest = self._soonest() if more else NEVER
                timer = None if soonest == NEVER else loop.call_at(soonest, self._wake.set)
                try:
                    await self._wake.wait()
                finally:
                    if timer is not None:
                        timer.cancel()

    def _soonest(self) -> float:
        """Return when there is something to do, if no work ends before that."""
        due = self._timers[0][0] if self._timers else NEVER
        return min(due, self._paused_until) if self._lines and self._delays else due

    def _line_up(self) -> None:
        """Have each item that is due wait for a worker."""
        now = self._now()
        while self._timers and (self._timers[0][0] <= now or self._timers[0][2].due != self._timers[0][0]):
            due, _, item = heapq.heappop(self._timers)
            if item.due == due:
                self._enter(item)

    def _enter(self, item: _Item[K]) -> None:
        item.due, item.in_line = NEVER, True
        item.line = self._is_urgent(item.key), self._groups(item.key)
        self._lines.setdefault(item.line, collections.deque()).append(item)

    def _next(self) -> _Item[K] | None:
        """Take the next item out of its line, for a worker; None if none may be worked on."""
        if self._delays and (self._running or self._now() < self._paused_until):
            return None
        for line in sorted(self._lines, key=lambda line: not line[0]):
            while (items := self._lines.get(line)) and self._items.get(items[0].key) is not items[0]:
                self._leave(line)
            if items and self._may(line):
                item = self._leave(line)
                item.runs = True
                self._count(line, 1)
                return item
        return None

    def _leave(self, line: _Line) -> _Item[K]:
        """Take the first item out of a line, and put the others behind all other lines."""
        items = self._lines.pop(line)
        item = items.popleft()
        if items:
            self._lines[line] = items
        item.in_line = False
        return item

    def _may(self, line: _Line) -> bool:
        """Return whether there is a worker for the next item of a line."""
        is_urgent, groups = line
        if self._running[_ALL] >= self._at_once + self._reserved:
            return False
        size = self._at_once + (self._reserved if is_urgent else 0)
        if not is_urgent and self._running[_ORDINARY] >= size:
            return False
        # With few workers a single group may have all of them, and keys of the same groups all but one.
        of_one, of_all = (size - 1, size - 2) if size > _FEW else (size, size - 1)
        is_full = any(self._running[share] >= max(1, of_one) for share in _shares(groups))
        return not is_full and (not any(groups) or self._running[groups] < max(1, of_all))

    def _count(self, line: _Line, number: int) -> None:
        """Count a worker that begins (1), or ends (-1)."""
        is_urgent, groups = line
        for share in (_ALL, *(() if is_urgent else (_ORDINARY,)), groups, *_shares(groups)):
            self._running[share] += number
            if not self._running[share]:
                del self._running[share]

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
            item.runs = False
            self._count(item.line, -1)
            # The work of a queue that is ended is not done.
            self._end(item, is_tried=is_tried)
            self._wake.set()

    def _end(self, item: _Item[K], *, is_tried: bool) -> None:
        """Have the item be due again, or drop it."""
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
            self._delays = self._delays or backoff(*self._retry, jitter=self._jitter)
            # What was begun before the pause fails for the same reason.
            if now >= self._paused_until:
                self._least_until = now + self._least(error)
                self._paused_until = max(self._least_until, now + next(self._delays))
            item.paused_until = now
            seconds = self._paused_until - now
        else:
            item.delays = item.delays or backoff(*self._retry, jitter=self._jitter)
            seconds = max(self._least(error), min(next(item.delays), self._most(error)))
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
        """Have the item be due then, unless it is due by then; return whether that is earlier than before."""
        if item.in_line:
            return False
        if item.runs:
            is_earlier, item.again = at < item.again, min(at, item.again)
            return is_earlier
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


def _shares(groups: Groups) -> list[tuple[int, str]]:
    """Return what each group is counted by."""
    return [(place, name) for place, name in enumerate(groups) if name]
