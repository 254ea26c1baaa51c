"""A built-in's functions called as the runner calls them, without what the runner makes of their errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import restore
from multus_daemon.plugins.builtin.contract import Call, Module
from multus_daemon.spec.cni.result import Result
from tests.waiting import until

T = TypeVar("T")


class Direct:
    """The verbs of `plugin`, each call with the namespace opened for it in the calling thread."""

    def __init__(self, plugin: Module) -> None:
        self._plugin: Any = plugin

    def add(self, call: Call) -> Result:
        with PodNetns(call.invocation.netns) as netns:
            result: Result = self._plugin.add(replace(call, netns=netns), netns)
            return result

    def delete(self, call: Call) -> None:
        with PodNetns(call.invocation.netns) as netns:
            self._plugin.delete(replace(call, netns=netns), netns)

    def check(self, call: Call) -> None:
        with PodNetns(call.invocation.netns) as netns:
            made = replace(call, netns=netns)
            if hasattr(self._plugin, "check"):
                self._plugin.check(made, netns)
            elif hasattr(self._plugin, "differences"):
                restore.check(made, netns, self._plugin.differences)

    def status(self, call: Call) -> None:
        if hasattr(self._plugin, "status"):
            self._plugin.status(call)


def in_pod(path: str, work: Callable[[PodNetns], T]) -> T:
    """Run `work` inside the namespace at `path`; return or raise what it does."""
    with PodNetns(path) as netns, netns.inside():
        return work(netns)


def wait_for_threads(before: set[threading.Thread]) -> None:
    """Until there are no threads but those of before: a thread tells its result, and ends a moment later."""
    end = time.monotonic() + 30
    # The event loop's own stay.
    while left := {item for item in threading.enumerate() if not item.name.startswith("asyncio_")} - before:
        assert time.monotonic() < end, left
        time.sleep(0.005)


def wait_for_removals() -> None:
    """Until the kernel has let go of all links that were removed: threads and sockets of their own wait for that."""
    until(
        lambda: not any(thread.name == "links" for thread in threading.enumerate()),
        what="the kernel does not let go of a link",
    )
