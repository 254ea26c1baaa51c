"""So many at a time; the rest wait in an order in which a crowd harms nobody, and no longer than they want to."""

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
class Slot:
    """One that is taken, or waited for."""

    key: str
    rank: int
    turn: int
    arrival: int
    groups: tuple[str, ...] = ()
    granted: bool = False
    event: asyncio.Future[None] | None = None
    """Where somebody waits: done once it is granted."""
    ordinary: bool = False
    """Set where it has its slot by a rank that is not urgent."""
    lines: tuple[Hashable, ...] = field(init=False)
    """Those who take turns: the groups, else the key; and within them the keys."""
    shares: tuple[Hashable, ...] = field(init=False)
    """What it counts for: all groups together first, then each that has a name."""

    def __post_init__(self) -> None:
        if any(self.groups):
            self.lines = (self.groups, (self.groups, self.key))
            self.shares = (self.groups, *((place, name) for place, name in enumerate(self.groups) if name))
        else:
            self.lines = (self.key,)
            self.shares = ()


class Slots:
    """Slots for one event loop.

    The next one is of the lowest rank; among those, of the groups and then the key whose turn it is, and then of the
    turn that began first. Whoever still waits when another with its groups, or its key, has got a slot goes to the
    end, so they take turns. What is not urgent leaves `reserved` slots alone.

    No single group holds the last `kept` slots, and those who have all groups in common not the last two times as
    many: whatever hangs there, there are slots for others. Of three slots or fewer only the latter holds, for `kept`.
    """

    def __init__(self, size: int, *, reserved: int = 0, kept: int = 0, name: str = "slots") -> None:
        """`size`: at least 1; one slot is for everybody, however many are `reserved` or `kept`.

        `name`: what has a slot, in the plural; for the timeline of who waits.
        """
        self.size = size
        self._name = name
        self._kept = kept
        self._ordinary_size = max(1, size - reserved)
        # By groups and by key.
        self._behind: dict[Hashable, int] = {}
        self._in_line: Counter[Hashable] = Counter()
        self._taken = 0
        self._ordinary = 0
        self._waiting: list[Slot] = []
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
        """Hold a slot for the duration of the block; raises as `take` does."""
        slot = await self.take(key, rank, timeout, groups)
        try:
            yield
        finally:
            self.give_back(slot)

    async def take(self, key: str, rank: int, timeout: float, groups: tuple[str, ...] = ()) -> Slot:
        """A slot, to be given back. Raises NoSlotError where none is to be had in `timeout` seconds.

        `groups`: whom it counts for, each name in its place; an empty one counts for nobody.

        Not by who has another slot of this object: everybody could wait for everybody.
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
            slot.event = asyncio.get_running_loop().create_future()
            timeline.note(
                f"waits for its turn: {self._taken} of at most {self.size} {self._name} run, {len(self._waiting)} wait"
            )
            try:
                await asyncio.wait((slot.event,), timeout=timeout)
            except BaseException:
                self.give_back(slot)
                raise
            if not slot.granted:
                error = NoSlotError(len(self._waiting), self._full_share(slot))
                self.give_back(slot)
                raise error
        return slot

    def give_back(self, slot: Slot) -> None:
        """What `take` has returned."""
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
        """While the block runs, whatever waits for `key` is urgent: somebody urgent waits for it."""
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
                    # What else waits in it goes to its end.
                    self._behind[line] = next(_arrivals)
            self._have(slot)
            if slot.event is not None:
                slot.event.set_result(None)

    def _have(self, slot: Slot) -> None:
        slot.granted = True
        slot.ordinary = not self._is_urgent(slot)
        self._taken += 1
        self._ordinary += slot.ordinary
        for name in slot.shares:
            self._held[name] += 1

    def _leave_lines(self, slot: Slot) -> None:
        """It waits no more. What is known of a line in which nobody waits is forgotten."""
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
        """The share that its groups have all of; 0 where they may have one more."""
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


def _count_down(counter: Counter[Any], name: Hashable) -> int:
    """One less; what is left. Nothing is kept of who has none."""
    counter[name] -= 1
    left = counter[name]
    if not left:
        del counter[name]
    return left
