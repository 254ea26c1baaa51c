"""A built-in's functions called as the runner calls them, without what the runner makes of their errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from multus_daemon.kernel import ops
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin.contract import Call, Plugin
from multus_daemon.spec.cni.result import Result

T = TypeVar("T")


class Direct:
    """The verbs of `plugin`, each call with a session of its own in the calling thread."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def add(self, call: Call) -> Result:
        with ops.session(call.invocation.netns) as session:
            return self._plugin.add(call, session)

    def delete(self, call: Call) -> None:
        with ops.session(call.invocation.netns) as session:
            self._plugin.delete(call, session)

    def check(self, call: Call) -> None:
        with ops.session(call.invocation.netns) as session:
            self._plugin.check(call, session)

    def status(self, call: Call) -> None:
        self._plugin.status(call)


def in_pod(path: str, work: Callable[[Session], T]) -> T:
    """What `work` returns or raises, done inside the namespace at `path`."""
    with ops.session(path) as session, session.inside():
        return work(session)


def wait_for_removals() -> None:
    """Until the kernel has let go of all links that were removed: threads and sockets of their own wait for that."""
    end = time.monotonic() + 30
    while any(thread.name == "links" for thread in threading.enumerate()):
        assert time.monotonic() < end, "the kernel does not let go of a link"
        time.sleep(0.01)
