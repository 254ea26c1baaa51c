"""Disturb the daemon during the load: a thread strikes again and again."""

from __future__ import annotations

import abc
import math
import random
import threading
import time
from types import TracebackType
from typing import Self


class Repeated(abc.ABC):
    """A context manager: it works in its block, and not beyond. An error ends it, and is raised after the block."""

    def __init__(self, name: str, pause: tuple[float, float]) -> None:
        """`name`: the thread's; `pause`: seconds before each time, the least and the most."""
        self._pause = pause
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._error: BaseException | None = None

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
        """True where the work could not be done, so that it is not done again."""
        return self._error is not None

    @abc.abstractmethod
    def work(self) -> None:
        """Do it once."""

    def _run(self) -> None:
        try:
            while not self._ending.wait(random.uniform(*self._pause)):
                self.work()
        except BaseException as error:
            self._error = error


class Disturbance(Repeated):
    """It strikes in its block."""

    strikes = 0
    """So many have been done."""
    mended = 0.0
    """The monotonic time at which the last one ended, infinite while one is done."""

    @abc.abstractmethod
    def strike(self) -> None:
        """Disturb once, and mend it."""

    def work(self) -> None:
        """Strike, and count it."""
        self.mended = math.inf
        self.strike()
        self.strikes += 1
        self.mended = time.monotonic()
