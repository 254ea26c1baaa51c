"""Fair, bounded concurrency with deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from multus_daemon.runtime import timeline

URGENT = 0
"""The first rank, the only one that may use the reserved slots."""

_arrivals = itertools.count(1)
_turn: ContextVar[int] = ContextVar("_turn")


@contextlib.contextmanager
def one_turn() -> Iterator[None]:
    """Give all requests for slots in the block the present time as their arrival.

    For work that needs several slots in turn: work that began first finishes first. Otherwise all of it would be half
    done at its deadline.
    """
    token = _turn.set(next(_arrivals))
    try:
        yield
    finally:
        _turn.reset(token)


class NoSlotError(Exception):
    """There was no free slot in time; `waiting`: number of waiters, with this one.

    `share`: the full share of its groups, in slots; 0 if all slots were taken.
    """

    def __init__(self, waiting: int, share: int = 0) -> None:
        super().__init__(f"{waiting} wait")
        self.waiting = waiting
        self.share = share


@dataclass(eq=False, slots=True)
class Slot:
    """A slot, taken or waited for."""

    key: str
    rank: int
    turn: int
    arrival: int
    groups: tuple[str, ...] = ()
    granted: bool = False
    event: asyncio.Future[None] | None = None
    """Done when the slot is granted or the time is over, if there is a waiter."""
    ordinary: bool = False
    """True if it was granted without urgency."""
    lines: tuple[Hashable, ...] = field(init=False)
    """Lines that take turns: the groups and their keys, or the key."""
    shares: tuple[Hashable, ...] = field(init=False)
    """Shares that it counts for: all groups together, then each named one."""

    def __post_init__(self) -> None:
        if any(self.groups):
            self.lines = (self.groups, (self.groups, self.key))
            self.shares = (self.groups, *((place, name) for place, name in enumerate(self.groups) if name))
        else:
            self.lines = (self.key,)
            self.shares = ()


class Slots:
    """Slots for one event loop.

    A free slot goes to the lowest rank; within it to the next groups, then to the next key, then to the first turn.
    Groups and keys take turns: after a grant, their other waiters go to the end. Only urgent ones use the `reserved`
    slots.

    No single group takes the last `kept` slots, and requests with the same groups not the last 2 * `kept`, so that
    others have slots when something hangs. With three slots or fewer, only the latter holds, for `kept` slots.
    """

    def __init__(self, size: int, *, reserved: int = 0, kept: int = 0, name: str = "slots") -> None:
        """`size`: at least 1; one slot is always for all. `name`: of the holders, in the plural, for timelines."""
        self.size = size
        self._name = name
        self._kept = kept
        self._ordinary_size = max(1, size - reserved)
        self._behind: dict[Hashable, int] = {}
        self._in_line: Counter[Hashable] = Counter()
        self._taken = 0
        self._ordinary = 0
        self._waiting: list[Slot] = []
        self._hurried: Counter[str] = Counter()
        # Slots by share.
        self._held: Counter[Hashable] = Counter()

    @property
    def running(self) -> int:
        """Number of taken slots."""
        return self._taken

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def hold(self, key: str, rank: int, timeout: float, groups: tuple[str, ...] = ()) -> AsyncIterator[None]:
        """Hold a slot during the block. Raises as `take` does."""
        slot = await self.take(key, rank, timeout, groups)
        try:
            yield
        finally:
            self.give_back(slot)

    async def take(self, key: str, rank: int, timeout: float, groups: tuple[str, ...] = ()) -> Slot:
        """Return a slot, for `give_back`. Raises NoSlotError after `timeout` seconds.

        `groups`: names that are charged for the slot, in a fixed order; an empty name is charged for nothing. A holder
        must not take a second slot (deadlock).
        """
        arrival = next(_arrivals)
        slot = Slot(key, rank, _turn.get(arrival), arrival, groups)
        if not self._waiting and self._taken < self.size and self._may(slot):
            self._have(slot)
            return slot
        self._waiting.append(slot)
        for line in slot.lines:
            self._in_line[line] += 1
        self._grant()
        if not slot.granted:
            loop = asyncio.get_running_loop()
            slot.event = loop.create_future()
            timeline.note(
                f"waits for its turn: {self._taken} of at most {self.size} {self._name} run, {len(self._waiting)} wait"
            )
            # A hundred requests may wait: asyncio.wait takes 1.5 KB more for each.
            expiry = loop.call_later(timeout, _settle, slot.event)
            try:
                await slot.event
            except BaseException:
                self.give_back(slot)
                raise
            finally:
                expiry.cancel()
            if not slot.granted:
                error = NoSlotError(len(self._waiting), self._full_share(slot))
                self.give_back(slot)
                raise error
        return slot

    def give_back(self, slot: Slot) -> None:
        """Release a slot that `take` returned."""
        if not slot.granted:
            self._leave_lines(slot)
            return
        self._taken -= 1
        self._ordinary -= slot.ordinary
        for name in slot.shares:
            _count_down(self._held, name)
        self._grant()

    @contextlib.contextmanager
    def hurried(self, key: str) -> Iterator[None]:
        """Treat waiters for `key` as urgent during the block, as urgent work waits for them."""
        self._hurried[key] += 1
        self._grant()
        try:
            yield
        finally:
            _count_down(self._hurried, key)

    def _is_urgent(self, slot: Slot) -> bool:
        return slot.rank == URGENT or slot.key in self._hurried

    def _grant(self) -> None:
        while self._waiting and self._taken < self.size:
            able = [slot for slot in self._waiting if self._may(slot)]
            if not able:
                return
            slot = min(able, key=self._place)
            self._leave_lines(slot)
            for line in slot.lines:
                if line in self._in_line:
                    # Its other waiters go to the end.
                    self._behind[line] = next(_arrivals)
            self._have(slot)
            if slot.event is not None:
                _settle(slot.event)

    def _have(self, slot: Slot) -> None:
        slot.granted = True
        slot.ordinary = not self._is_urgent(slot)
        self._taken += 1
        self._ordinary += slot.ordinary
        for name in slot.shares:
            self._held[name] += 1

    def _leave_lines(self, slot: Slot) -> None:
        """Stop waiting; forget lines without waiters."""
        self._waiting.remove(slot)
        for line in slot.lines:
            if _count_down(self._in_line, line) == 0:
                self._behind.pop(line, None)

    def _place(self, slot: Slot) -> tuple[int, ...]:
        rank = URGENT if self._is_urgent(slot) else slot.rank
        return rank, *(max(slot.turn, self._behind.get(line, 0)) for line in slot.lines), slot.arrival

    def _may(self, slot: Slot) -> bool:
        return (self._ordinary < self._ordinary_size or self._is_urgent(slot)) and not self._full_share(slot)

    def _full_share(self, slot: Slot) -> int:
        """Return the share of its groups if they use all of it, else 0."""
        size = self.size if self._is_urgent(slot) else self._ordinary_size
        for name in slot.shares:
            together = name is slot.groups
            if size > 3:
                share = max(1, size - self._kept * (2 if together else 1))
            else:
                share = max(1, size - self._kept) if together else size
            if self._held[name] >= share:
                return share
        return 0


def _settle(event: asyncio.Future[None]) -> None:
    if not event.done():
        event.set_result(None)


def _count_down(counter: Counter[Any], name: Hashable) -> int:
    counter[name] -= 1
    left = counter[name]
    if not left:
        del counter[name]
    return left
