"""Which numbers are taken, as runs without a gap: the next free one is found without a look at each; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Runs:
    """A set of numbers, kept as the first and the last number of each run, in order."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, values: Iterable[int]) -> None:
        """`values` in any order, each once or more often."""
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for value in sorted(values):
            if self._lasts and value <= self._lasts[-1] + 1:
                self._lasts[-1] = value
            else:
                self._firsts.append(value)
                self._lasts.append(value)

    def next_free(self, value: int) -> int:
        """The smallest number from `value` on that is not in the set."""
        position = self._position(value)
        return value if position < 0 else self._lasts[position] + 1

    def add(self, value: int) -> None:
        """Add a number; one that is in the set stays."""
        if self._position(value) >= 0:
            return
        # The run behind `value`, and whether it and the one before touch it.
        behind = bisect_right(self._firsts, value)
        before_touches = behind > 0 and self._lasts[behind - 1] == value - 1
        behind_touches = behind < len(self._firsts) and self._firsts[behind] == value + 1
        if before_touches and behind_touches:
            self._lasts[behind - 1] = self._lasts.pop(behind)
            del self._firsts[behind]
        elif before_touches:
            self._lasts[behind - 1] = value
        elif behind_touches:
            self._firsts[behind] = value
        else:
            self._firsts.insert(behind, value)
            self._lasts.insert(behind, value)

    def discard(self, value: int) -> None:
        """Remove a number; absent is done."""
        position = self._position(value)
        if position < 0:
            return
        first, last = self._firsts[position], self._lasts[position]
        if first == last:
            del self._firsts[position], self._lasts[position]
        elif value == first:
            self._firsts[position] = value + 1
        elif value == last:
            self._lasts[position] = value - 1
        else:
            self._lasts[position] = value - 1
            self._firsts.insert(position + 1, value + 1)
            self._lasts.insert(position + 1, last)

    def _position(self, value: int) -> int:
        """Where the run is that holds `value`; -1 if none does."""
        position = bisect_right(self._firsts, value) - 1
        return position if position >= 0 and value <= self._lasts[position] else -1
