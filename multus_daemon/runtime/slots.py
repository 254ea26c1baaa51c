"""Fair, bounded concurrency with deadlines."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from multus_daemon.runtime import timeline

Groups: TypeAlias = tuple[str, ...]
"""Names that a slot counts for, such as namespace and network, in a fixed order; an empty name counts for nothing."""
URGENT = 0
"""The first rank, the only one that may use the reserved slots."""

_arrivals = itertools.count(1)
_turn: ContextVar[int] = ContextVar("_turn")


@contextlib.contextmanager
def one_turn() -> Iterator[None]:
    """Queue all requests for slots in the block as if they had arrived now.

    For work that needs several slots one after another: work that began first finishes first. Otherwise all such work
    would be half done at its deadline.
    """
    token = _turn.set(next(_arrivals))
    try:
        yield
    finally:
        _turn.reset(token)


class NoSlotError(Exception):
    """There was no free slot in time; `waiting`: number of waiters, including this one.

    `share`: the number of slots that the groups of this waiter may have, all in use; 0 if no slot was free at all.
    """

    def __init__(self, waiting: int, share: int = 0) -> None:
        super().__init__(f"{waiting} wait")
        self.waiting = waiting
        self.share = share


def _order() -> tuple[int, int]:
    """Return the position of a request that is made now: that of its `one_turn` block, and its own."""
    arrival = next(_arrivals)
    return _turn.get(arrival), arrival


@dataclass(eq=False, slots=True)
class Slot:
    """A slot, taken or waited for."""

    key: Any
    """Who asks for the slot; hashable."""
    rank: int = URGENT
    groups: Groups = ()
    order: tuple[int, int] = field(default_factory=_order)
    """Waiters of the same rank and groups are served in this order."""
    granted: bool = False
    event: asyncio.Future[None] | None = None
    """Done when the slot is granted or the waiter's time is over. None without a waiter."""

    shares: list[Hashable] = field(init=False)
    """The shares that the slot counts for: that of all its groups together, then that of each named group."""

    def __post_init__(self) -> None:
        names = [(place, name) for place, name in enumerate(self.groups) if name]
        self.shares = [self.groups, *names] if names else []


class Turns:
    """Decides who gets the next free slot.

    The lowest rank is first; within a rank the next groups, then the next key, then the earliest `order`. Groups and
    keys take turns: after a slot, their other waiters go to the end. Only rank URGENT may use the `reserved` slots.

    No single group gets the last `kept` slots, and no combination of groups the last 2 * `kept`, so that others have
    slots when something hangs. With three slots or fewer, only a combination is limited, by `kept` slots.
    """

    def __init__(self, size: int, *, reserved: int = 0, kept: int = 0) -> None:
        """`size`: number of slots, at least 1; one of them is for every rank and group."""
        self.size = size
        self.running = 0
        """Number of taken slots."""
        self._kept = kept
        self._ordinary_size = max(1, size - reserved)
        self._ordinary = 0
        self._lines: dict[tuple[int, Groups], list[Slot]] = {}
        """The waiters, by rank and groups, in their order."""
        self._behind: dict[tuple[int, Groups], int] = {}
        """When a line whose groups have names had its last turn."""
        self._held: Counter[Hashable] = Counter()
        """Slots by share."""

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return sum(map(len, self._lines.values()))

    @property
    def load(self) -> dict[str, int]:
        """The number of slots in use, of waiters, and of all slots."""
        return {"running": self.running, "waiting": self.waiting, "limit": self.size}

    def wait(self, slot: Slot) -> None:
        """Have the slot wait for its turn."""
        bisect.insort(self._lines.setdefault((slot.rank, slot.groups), []), slot, key=lambda item: item.order)

    def leave(self, slot: Slot) -> None:
        """End the wait for a slot."""
        line = slot.rank, slot.groups
        self._lines[line].remove(slot)
        if not self._lines[line]:
            del self._lines[line]
            self._behind.pop(line, None)

    def next(self) -> Slot | None:
        """Grant the next slot; None if none is free for those who wait."""
        if self.running < self.size:
            for line in sorted(self._lines, key=self._place):
                slot = self._lines[line][0]
                if (slot.rank == URGENT or self._ordinary < self._ordinary_size) and not self.full_share(slot):
                    self._grant(slot)
                    return slot
        return None

    def end(self, slot: Slot) -> None:
        """Give a granted slot back."""
        self._count(slot, -1)

    def full_share(self, slot: Slot) -> int:
        """Return the number of slots that the slot's groups may have, if all of these are in use; else 0."""
        size = self.size if slot.rank == URGENT else self._ordinary_size
        for name in slot.shares:
            together = name is slot.groups
            if size > 3:
                share = max(1, size - self._kept * (2 if together else 1))
            else:
                share = max(1, size - self._kept) if together else size
            if self._held[name] >= share:
                return share
        return 0

    def _place(self, line: tuple[int, Groups]) -> tuple[int, int, int]:
        turn, arrival = self._lines[line][0].order
        return line[0], max(turn, self._behind.get(line, 0)), arrival

    def _grant(self, slot: Slot) -> None:
        self.leave(slot)
        slot.granted = True
        self._count(slot, 1)
        line = slot.rank, slot.groups
        if line in self._lines:
            if slot.shares:
                self._behind[line] = next(_arrivals)
            others = [other for other in self._lines[line] if other.key == slot.key]
            for other in others:
                other.order = next(_arrivals), other.order[1]
            if others:
                self._lines[line].sort(key=lambda item: item.order)

    def _count(self, slot: Slot, number: int) -> None:
        self.running += number
        self._ordinary += number if slot.rank != URGENT else 0
        for name in slot.shares:
            self._held[name] += number
            if not self._held[name]:
                del self._held[name]


class Slots(Turns):
    """Slots for one event loop, which tasks wait for."""

    def __init__(self, size: int, *, reserved: int = 0, kept: int = 0, name: str = "slots") -> None:
        """`name`: what has the slots, in the plural, for timelines."""
        super().__init__(size, reserved=reserved, kept=kept)
        self._name = name
        self._hurried: Counter[Hashable] = Counter()

    async def take(self, key: str, rank: int, timeout: float, groups: Groups = ()) -> Slot:
        """Return a slot, for `give_back`. Raises NoSlotError after `timeout` seconds.

        A holder must not take a second slot (deadlock).
        """
        slot = Slot(key, URGENT if key in self._hurried else rank, groups)
        self.wait(slot)
        self._grant_all()
        if not slot.granted:
            loop = asyncio.get_running_loop()
            slot.event = loop.create_future()
            timeline.note(
                f"waits for its turn: {self.running} of at most {self.size} {self._name} run, {self.waiting} wait"
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
                error = NoSlotError(self.waiting, self.full_share(slot))
                self.give_back(slot)
                raise error
        return slot

    def give_back(self, slot: Slot) -> None:
        """Release a slot that `take` returned."""
        if slot.granted:
            self.end(slot)
            self._grant_all()
        else:
            self.leave(slot)

    @contextlib.contextmanager
    def hurried(self, key: str) -> Iterator[None]:
        """During the block, treat present and new waiters for `key` as urgent: urgent work must wait for them."""
        self._hurried[key] += 1
        for slot in [slot for line in self._lines.values() for slot in line if slot.key == key]:
            self.leave(slot)
            slot.rank = URGENT
            self.wait(slot)
        self._grant_all()
        try:
            yield
        finally:
            self._hurried[key] -= 1
            if not self._hurried[key]:
                del self._hurried[key]

    def _grant_all(self) -> None:
        while (slot := self.next()) is not None:
            if slot.event is not None:
                _settle(slot.event)


def _settle(event: asyncio.Future[None]) -> None:
    if not event.done():
        event.set_result(None)
