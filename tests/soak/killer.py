"""Ends the daemon again and again, as the kernel does: kill -9, then a new one.

With every plugin that it runs, as when its container ends, or so that they live on without it. Or otherwise: stopped
for a while (SIGSTOP), ended in good order (SIGTERM), relieved by one that is there before.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence

import multus_shim
from tests.e2e.node import Node
from tests.soak.disturbance import Disturbance
from tests.soak.remains import processes

WAYS = ("kill", "freeze", "end", "relieve")


class Killer(Disturbance):
    """In its block the daemon is killed `pause` seconds after it was ready, and started anew."""

    def __init__(
        self,
        node: Node,
        pause: tuple[float, float] = (0.5, 1.5),
        *,
        ready: bool = True,
        with_plugins: float = 0.5,
        ways: Sequence[str] = ("kill",),
        starts: int = 1,
    ) -> None:
        """`ready`: whether a new daemon is waited for until it is ready, or only until it listens.

        `with_plugins`: how often plugins are killed with it, from 0 to 1. `ways`: of WAYS, one at a time. `starts`: how
        often a new one is started that ends by itself, as by the kubelet.
        """
        super().__init__("killer", pause)
        self._node = node
        self._ready = ready
        self._with_plugins = with_plugins
        self._ways = ways
        self._starts = starts
        self.counts: Counter[str] = Counter()
        """How often it has been struck in which way."""

    def strike(self) -> None:
        way = random.choice(self._ways)
        ways: dict[str, Callable[[], None]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "end": self._end,
            "relieve": self._relieve,
        }
        try:
            assert self._node.daemon is None or self._node.daemon.poll() is None, "the daemon has ended by itself"
            ways[way]()
            self.counts[way] += 1
        except BaseException as error:
            daemon = self._node.daemon
            error.add_note(f"exit status of the daemon: {daemon and daemon.poll()} (negative: the signal)")
            raise

    def _kill(self) -> None:
        self._node.kill()
        if random.random() < self._with_plugins:
            self._kill_plugins()
        time.sleep(random.choice((0, 0, 0.2)))
        self._start()

    def _freeze(self) -> None:
        """Stop it where it is. Each second time it is killed there."""
        assert self._node.daemon
        self._node.daemon.send_signal(signal.SIGSTOP)
        time.sleep(random.uniform(0.2, 3))
        if random.random() < 0.5:
            self._kill()
        else:
            self._node.daemon.send_signal(signal.SIGCONT)

    def _end(self) -> None:
        _require_no_crash(self._node.stop(timeout=90))
        self._start()

    def _relieve(self) -> None:
        """Start the successor first, as a DaemonSet with maxSurge does."""
        old, self._node.daemon = self._node.daemon, None
        assert old
        before = self._node.socket.stat().st_ino
        try:
            self._start()
            deadline = time.monotonic() + 90
            while self._node.socket.stat().st_ino == before:
                assert time.monotonic() < deadline, "the successor does not take the socket"
                # It is the old one that says ready until then.
                if self._node.daemon is None or self._node.daemon.poll() is not None:
                    self.counts["start failed"] += 1
                    assert self.counts["start failed"] < self._starts * (1 + self.strikes), "no successor starts"
                    self._start()
                time.sleep(0.02)
            time.sleep(random.uniform(0, 0.5))
        finally:
            old.send_signal(signal.SIGTERM)
            _require_no_crash(old.wait(timeout=90))

    def _start(self) -> None:
        for left in range(self._starts - 1, -1, -1):
            try:
                self._node.start(timeout=90, ready=self._ready)
            except AssertionError:
                if not left or self._node.daemon is None or self._node.daemon.poll() is None:
                    raise
                self.counts["start failed"] += 1
            else:
                return

    def _kill_plugins(self) -> None:
        for line in processes(self._node):
            if str(multus_shim.binary()) in line:
                # The runtime's: it has the plugins' environment.
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)


def _require_no_crash(status: int) -> None:
    """Raise AssertionError where a daemon that was asked to end was ended by a signal."""
    assert status >= 0, f"the daemon has crashed: {signal.Signals(-status).name}"
