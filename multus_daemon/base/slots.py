"""So many at a time; the rest wait in an order in which a crowd harms nobody, and no longer than they want to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
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
    """There was no slot in time; `waiting`: how many waited at the end, this one included."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} wait")
        self.waiting = waiting


@dataclass(eq=False, slots=True)
class Slot:
    """One that is taken, or waited for."""

    key: str
    rank: int
    turn: int
    arrival: int
    granted: bool = False
    event: asyncio.Future[None] | None = None
    """Where somebody waits: done once it is granted."""
    ordinary: bool = False
    """Set where it has its slot by a rank that is not urgent."""


class Slots:
    """Slots for one event loop.

    The next one is of the lowest rank; among those, of the turn that began first. A key that still waits when it has
    got a slot goes to the end, so keys take turns. What is not urgent leaves `reserved` slots alone.
    """

    def __init__(self, size: int, *, reserved: int = 0) -> None:
        """`size`: at least 1; one slot is for everybody, however many are `reserved`."""
        self.size = size
        self._ordinary_size = max(1, size - reserved)
        self._behind: dict[str, int] = {}
        self._taken = 0
        self._ordinary = 0
        self._waiting: list[Slot] = []
        self._hurried: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """How many slots are taken."""
        return self._taken

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def hold(self, key: str, rank: int, timeout: float) -> AsyncIterator[None]:
        """Hold a slot for the duration of the block; raises as `take` does."""
        slot = await self.take(key, rank, timeout)
        try:
            yield
        finally:
            self.give_back(slot)

    async def take(self, key: str, rank: int, timeout: float) -> Slot:
        """A slot, to be given back. Raises NoSlotError where none is to be had in `timeout` seconds.

        Not by who has another slot of this object: everybody could wait for everybody.
        """
        arrival = next(_arrivals)
        slot = Slot(key, rank, _turn.get(arrival), arrival)
        self._waiting.append(slot)
        self._grant()
        if not slot.granted:
            slot.event = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait((slot.event,), timeout=timeout)
            except BaseException:
                self.give_back(slot)
                raise
            if not slot.granted:
                waiting = len(self._waiting)
                self.give_back(slot)
                raise NoSlotError(waiting)
        return slot

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

    def _is_urgent(self, waiter: Slot) -> bool:
        return waiter.rank == URGENT or waiter.key in self._hurried

    def _grant(self) -> None:
        while self._waiting and self._taken < self.size:
            room = self._ordinary < self._ordinary_size
            able = [waiter for waiter in self._waiting if room or self._is_urgent(waiter)]
            if not able:
                return
            waiter = min(able, key=self._place)
            self._waiting.remove(waiter)
            waiter.ordinary = not self._is_urgent(waiter)
            waiter.granted = True
            if waiter.event is not None:
                waiter.event.set_result(None)
            self._taken += 1
            self._ordinary += waiter.ordinary
            self._move_behind(waiter.key)

    def _place(self, waiter: Slot) -> tuple[int, int, int]:
        rank = URGENT if self._is_urgent(waiter) else waiter.rank
        return rank, max(waiter.turn, self._behind.get(waiter.key, 0)), waiter.arrival

    def _move_behind(self, key: str) -> None:
        """Put what else waits for `key` at the end; forget the key where nothing does."""
        if any(waiter.key == key for waiter in self._waiting):
            self._behind[key] = next(_arrivals)
        else:
            self._behind.pop(key, None)

    def give_back(self, slot: Slot) -> None:
        """What `take` has returned."""
        if not slot.granted:
            self._waiting.remove(slot)
            if not any(other.key == slot.key for other in self._waiting):
                self._behind.pop(slot.key, None)
            return
        self._taken -= 1
        self._ordinary -= slot.ordinary
        self._grant()
