"""The road of a request: how often it changes threads, and how deep its stack is when the kernel is asked."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.daemon import Daemon
from multus_daemon.kernel import transport
from multus_daemon.runtime.timeline import Timeline
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NETWORKS_ANNOTATION
from tests.fakes.cluster import WarmStore
from tests.netns.conftest import Netns
from tests.netns.trace import make_daemon, ptp
from tests.unit.api.harness import body

NETWORKS = ("a", "b")
FRAMES_MAX = 18
POD = Pod(Namespace("web"), PodName("web-1"), PodUid("u-1"), {NETWORKS_ANNOTATION: ",".join(NETWORKS)})


@pytest.fixture
def make(tmp_path: Path) -> Callable[[], tuple[Daemon, WarmStore]]:
    """Make a daemon that is not started: the test does not use its socket."""

    def daemon() -> tuple[Daemon, WarmStore]:
        store = WarmStore(
            {name: ptp(name, tmp_path, number) for number, name in enumerate(("cluster", *NETWORKS))}, POD
        )
        return make_daemon(tmp_path, store), store

    return daemon


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often somebody goes from one thread to another."""
    found: Counter[str] = Counter()

    def counted(owner: Any, name: str, *, elsewhere: bool = False) -> None:
        real, loop = getattr(owner, name), threading.current_thread()

        def noted(*arguments: Any, **options: Any) -> Any:
            if not elsewhere or threading.current_thread() is not loop:
                found[name] += 1
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    counted(threading.Thread, "start")
    counted(asyncio.BaseEventLoop, "run_in_executor")
    counted(asyncio.BaseEventLoop, "call_soon_threadsafe", elsewhere=True)
    return found


def add(
    make: Callable[[], tuple[Daemon, WarmStore]], netns: Netns, *, before: Callable[[], None] = lambda: None
) -> WarmStore:
    """One ADD, by a daemon whose event loop is that of this thread. `before` is called once the daemon is made."""

    async def call() -> WarmStore:
        daemon, store = make()
        before()
        answer = await daemon._api.call(body(CNI_NETNS=netns.path))
        assert answer.status == 200, answer.body
        return store

    return asyncio.run(call())


def test_an_add_of_three_networks_goes_to_its_thread_and_comes_back_once(
    make: Callable[[], tuple[Daemon, WarmStore]], netns: Netns, crossings: Counter[str]
) -> None:
    # A daemon that starts looks for binaries, in a thread.
    store = add(make, netns, before=crossings.clear)
    assert len(store.written) == 1
    events = crossings["call_soon_threadsafe"] - 1 - len(store.written)
    # One thread; from it to the loop with the end, once for the request to the API server, with the record, which the
    # loop follows, and an Event for each network, which nobody waits for.
    assert (crossings["start"], crossings["run_in_executor"], events) == (1, 0, len(NETWORKS) + 2)


def test_the_stages_of_an_add_are_measured_one_after_the_other(
    make: Callable[[], tuple[Daemon, WarmStore]], netns: Netns
) -> None:
    async def call() -> Timeline:
        daemon, _ = make()
        await daemon._api.call(body(CNI_NETNS=netns.path))
        [kept] = daemon._api._timelines
        return kept

    kept = asyncio.run(call())
    assert list(kept.stages) == ["queue", "record", "gather", "plan", "plugin", "keep", "publish"]
    assert min(kept.stages.values()) > 0
    # They add up to at most the duration: none is measured inside another.
    assert kept.ended is not None
    assert sum(kept.stages.values()) <= kept.ended


def test_the_stack_is_shallow_when_the_kernel_is_asked(
    make: Callable[[], tuple[Daemon, WarmStore]], netns: Netns, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = transport.Socket._send
    deepest: list[str] = []

    def noted(self: transport.Socket, *arguments: Any) -> int:
        nonlocal deepest
        frame: Any = sys._getframe(1)
        own = ["_send"]
        while frame is not None:
            if "multus_daemon" in frame.f_code.co_filename:
                own.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
            frame = frame.f_back
        deepest = max(deepest, own, key=len)
        return real(self, *arguments)

    monkeypatch.setattr(transport.Socket, "_send", noted)
    add(make, netns)
    assert 5 < len(deepest) <= FRAMES_MAX, "\n".join(reversed(deepest))
