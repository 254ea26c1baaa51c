"""So many at a time; the rest wait in an order in which a crowd harms nobody, and no longer than they want to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

URGENT = 0
"""The rank that comes first, and the only one that may have the reserved slots."""

_arrivals = itertools.count(1)
_turn: ContextVar[int] = ContextVar("_turn")


@contextlib.contextmanager
def one_turn() -> Iterator[None]:
    """Whatever asks for a slot within the block counts as having come now, and so does what it asks for later.

    For work that needs slots again and again: among many that is finished first which was begun first. Else all of it
    would be at its middle when the time of all of it is over.
    """
    token = _turn.set(next(_arrivals))
    try:
        yield
    finally:
        _turn.reset(token)


class NoSlotError(Exception):
    """There was no slot in time; `waiting`: how many waited at the end, this one included.

    `share`: of how many slots its groups had all that they may have; 0 where there was none for anybody.
    """

    def __init__(self, waiting: int, share: int = 0) -> None:
        super().__init__(f"{waiting} wait")
        self.waiting = waiting
        self.share = share


@dataclass(eq=False, slots=True)
class _Waiter:
    key: str
    groups: tuple[str, ...]
    rank: int
    granted: asyncio.Future[None]
    turn: int
    arrival: int
    ordinary: bool = False
    """Set where it has its slot by a rank that is not urgent."""


class Slots:
    """Slots for one event loop.

    The next one is of the lowest rank; among those, of the groups and then the key whose turn it is, and then of the
    turn that began first. Whoever still waits when another with its groups, or its key, has got a slot goes to the
    end, so they take turns. What is not urgent leaves `reserved` slots alone.

    No single group holds the last `kept` slots, and those who have all groups in common not the last two times as
    many: whatever hangs there, there are slots for others. Of three slots or fewer only the latter holds, for `kept`.
    """

    def __init__(self, size: int, *, reserved: int = 0, kept: int = 0) -> None:
        """`size`: at least 1; one slot is for everybody, however many are `reserved` or `kept`."""
        self.size = size
        self._kept = kept
        self._ordinary_size = max(1, size - reserved)
        # By groups and by key.
        self._behind: dict[Hashable, int] = {}
        self._in_line: Counter[Hashable] = Counter()
        self._taken = 0
        self._ordinary = 0
        self._waiting: list[_Waiter] = []
        self._hurried: Counter[str] = Counter()
        # Slots by group, with its place among the groups, and by all groups together.
        self._held: Counter[Hashable] = Counter()

    @property
    def running(self) -> int:
        """How many slots are taken."""
        return self._taken

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def hold(self, key: str, rank: int, timeout: float, groups: tuple[str, ...] = ()) -> AsyncIterator[None]:
        """Hold a slot for the duration of the block. Raises NoSlotError where none is to be had in `timeout` seconds.

        `groups`: whom it counts for, each name in its place; an empty one counts for nobody.

        Not from within the block of another slot of this object: everybody could wait for everybody.
        """
        arrival = next(_arrivals)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(key, groups, rank, granted, _turn.get(arrival), arrival)
        self._waiting.append(waiter)
        self._in_line.update(_lines(waiter))
        try:
            self._grant()
            if not granted.done():
                await asyncio.wait((granted,), timeout=timeout)
            if not granted.done():
                raise NoSlotError(len(self._waiting), self._full_share(waiter))
            yield
        finally:
            self._leave(waiter)

    @contextlib.contextmanager
    def hurried(self, key: str) -> Iterator[None]:
        """While the block runs, whatever waits for `key` is urgent: somebody urgent waits for it."""
        self._hurried[key] += 1
        self._grant()
        try:
            yield
        finally:
            self._hurried[key] -= 1
            if not self._hurried[key]:
                del self._hurried[key]

    def _is_urgent(self, waiter: _Waiter) -> bool:
        return waiter.rank == URGENT or waiter.key in self._hurried

    def _grant(self) -> None:
        while self._waiting and self._taken < self.size:
            able = [waiter for waiter in self._waiting if self._may(waiter)]
            if not able:
                return
            waiter = min(able, key=self._place)
            self._waiting.remove(waiter)
            waiter.ordinary = not self._is_urgent(waiter)
            waiter.granted.set_result(None)
            self._taken += 1
            self._ordinary += waiter.ordinary
            self._held.update(_shares(waiter))
            self._move_behind(waiter)

    def _may(self, waiter: _Waiter) -> bool:
        return (self._ordinary < self._ordinary_size or self._is_urgent(waiter)) and not self._full_share(waiter)

    def _full_share(self, waiter: _Waiter) -> int:
        """The share that its groups have taken all of; 0 where they may have one more."""
        size = self.size if self._is_urgent(waiter) else self._ordinary_size
        for name in _shares(waiter):
            share = self._share(size, together=name == waiter.groups)
            if self._held[name] >= share:
                return share
        return 0

    def _share(self, size: int, *, together: bool) -> int:
        if size <= 3:
            return max(1, size - self._kept) if together else size
        return max(1, size - self._kept * (2 if together else 1))

    def _place(self, waiter: _Waiter) -> tuple[int, ...]:
        rank = URGENT if self._is_urgent(waiter) else waiter.rank
        return rank, *(max(waiter.turn, self._behind.get(line, 0)) for line in _lines(waiter)), waiter.arrival

    def _move_behind(self, waiter: _Waiter) -> None:
        """Put what else waits for its groups and its key at the end; forget them where nothing does."""
        for line in self._out_of_line(waiter):
            self._behind[line] = next(_arrivals)

    def _out_of_line(self, waiter: _Waiter) -> list[Hashable]:
        """It waits no more; in which of its lines others do. What is known of the other lines is forgotten."""
        lines = _lines(waiter)
        self._in_line.subtract(lines)
        for line in lines:
            if not self._in_line[line]:
                del self._in_line[line]
                self._behind.pop(line, None)
        return [line for line in lines if line in self._in_line]

    def _leave(self, waiter: _Waiter) -> None:
        if not waiter.granted.done():
            self._waiting.remove(waiter)
            self._out_of_line(waiter)
            return
        self._taken -= 1
        self._ordinary -= waiter.ordinary
        self._held.subtract(shares := _shares(waiter))
        for name in shares:
            if not self._held[name]:
                del self._held[name]
        self._grant()


def _lines(waiter: _Waiter) -> tuple[Hashable, Hashable]:
    """Those who take turns: the groups, else the key; and within them the keys."""
    return waiter.groups if any(waiter.groups) else waiter.key, (waiter.groups, waiter.key)


def _shares(waiter: _Waiter) -> list[Hashable]:
    """What its slot counts for: all groups together, and each of them."""
    if not any(waiter.groups):
        return []
    return [waiter.groups, *((place, name) for place, name in enumerate(waiter.groups) if name)]
