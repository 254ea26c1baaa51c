"""Ends the daemon again and again, as the kernel does: kill -9, then a new one.

Each second time, by chance, with every plugin that it runs, as when its container ends; else they live on without it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from types import TracebackType

from tests.e2e.node import Node
from tests.soak.remains import processes


class Killer:
    """A context manager: in its block the daemon is killed `pause` seconds after it was ready, and started anew."""

    def __init__(self, node: Node, pause: tuple[float, float] = (0.5, 1.5), *, ready: bool = True) -> None:
        """`ready`: whether a new daemon is waited for until it is ready, or only until it listens."""
        self._node = node
        self._pause = pause
        self._ready = ready
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="killer")
        self._error: BaseException | None = None
        self.kills = 0

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()
        if self._error and kind is None:
            raise self._error

    @property
    def has_failed(self) -> bool:
        """True where no daemon could be started any more."""
        return self._error is not None

    def _work(self) -> None:
        try:
            while not self._ending.wait(random.uniform(*self._pause)):
                self._node.kill()
                self.kills += 1
                if random.random() < 0.5:
                    self._kill_plugins()
                time.sleep(random.choice((0, 0, 0.2)))
                self._node.start(timeout=90, ready=self._ready)
        except BaseException as error:
            self._error = error

    def _kill_plugins(self) -> None:
        for line in processes(self._node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
