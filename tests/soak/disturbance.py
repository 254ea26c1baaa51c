"""Disturb the daemon during the load: a thread strikes again and again."""

from __future__ import annotations

import abc
import math
import random
import threading
import time
from types import TracebackType
from typing import Self


class Disturbance(abc.ABC):
    """A context manager: it strikes in its block, and not beyond. An error ends it, and is raised after the block."""

    def __init__(self, name: str, pause: tuple[float, float]) -> None:
        """`name`: the thread's; `pause`: seconds before each strike, the least and the most."""
        self._pause = pause
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name)
        self._error: BaseException | None = None
        self.strikes = 0
        """So many have been done."""
        self.mended = 0.0
        """The monotonic time at which the last one ended, infinite while one is done."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()
        if self._error and kind is None:
            raise self._error

    @property
    def has_failed(self) -> bool:
        """True where a strike could not be done, so that none follows."""
        return self._error is not None

    @abc.abstractmethod
    def strike(self) -> None:
        """Disturb once, and mend it."""

    def _work(self) -> None:
        try:
            while not self._ending.wait(random.uniform(*self._pause)):
                self.mended = math.inf
                self.strike()
                self.strikes += 1
                self.mended = time.monotonic()
        except BaseException as error:
            self._error = error
