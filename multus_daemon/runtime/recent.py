"""A mapping of bounded size, whose values may expire."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps at most `most` values, each for `seconds`. If it is full, the value that was set first leaves."""

    def __init__(
        self, most: int, seconds: float = float("inf"), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._kept: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __setitem__(self, key: K, value: V) -> None:
        self._kept[key] = self._clock() + self._seconds, value
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def get(self, key: K) -> V | None:
        """Return the value; None if there is none, or it has expired."""
        until, value = self._kept.get(key, (0.0, None))
        return value if self._clock() < until else None

    def forget(self, key: K) -> None:
        """Remove the value, if there is one."""
        self._kept.pop(key, None)
