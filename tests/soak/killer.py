"""Ends the daemon again and again, as the kernel does: kill -9, then a new one.

With every plugin that it runs, as when its container ends, or so that they live on without it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import multus_shim
from tests.e2e.node import Node
from tests.soak.disturbance import Disturbance
from tests.soak.remains import processes


class Killer(Disturbance):
    """In its block the daemon is killed `pause` seconds after it was ready, and started anew."""

    def __init__(
        self, node: Node, pause: tuple[float, float] = (0.5, 1.5), *, ready: bool = True, with_plugins: float = 0.5
    ) -> None:
        """`ready`: whether a new daemon is waited for until it is ready, or only until it listens.

        `with_plugins`: how often plugins are killed with it, from 0 to 1.
        """
        super().__init__("killer", pause)
        self._node = node
        self._ready = ready
        self._with_plugins = with_plugins

    def strike(self) -> None:
        try:
            self._node.kill()
            if random.random() < self._with_plugins:
                self._kill_plugins()
            time.sleep(random.choice((0, 0, 0.2)))
            self._node.start(timeout=90, ready=self._ready)
        except BaseException as error:
            daemon = self._node.daemon
            error.add_note(f"exit status of the daemon: {daemon and daemon.poll()} (negative: the signal)")
            raise

    def _kill_plugins(self) -> None:
        for line in processes(self._node):
            if str(multus_shim.binary()) in line:
                # The runtime's: it has the plugins' environment.
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
