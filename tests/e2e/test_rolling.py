"""Daemons of upstream and ours take turns while shims of either kind run, as while a cluster rolls there and back."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.node import Answer
from tests.e2e.takeover import Make, Takeover
from tests.e2e.upstream import NEW, OLD, shim_of

pytest_plugins = ["tests.e2e.kube_fixtures", "tests.e2e.takeover_fixtures"]

WORKERS = 3


class Runtime:
    """ADD and DEL of one container after the other, each in a namespace of its own, until `finish`."""

    def __init__(self, made: Takeover, shim: str) -> None:
        self.stopping = ""
        """The daemon that stopped last."""
        self.done = 0
        self.failed: list[tuple[str, str, Answer]] = []
        """The value of `stopping`, the verb and the answer of each call that failed."""
        self._made, self._shim = made, shim
        # Whatever the daemons do to the file: the runtime has read it.
        self._stdin = made.upstream.stdin()
        self._numbers = itertools.count()
        self._finishing = threading.Event()
        self._pool = ThreadPoolExecutor(WORKERS)
        pods = [f"pod-{number}" for number in range(WORKERS)]
        for pod in pods:
            made.pod(pod, "macvlan")
        self._workers = [self._pool.submit(self._work, pod) for pod in pods]

    def _work(self, pod: str) -> None:
        while not self._finishing.is_set():
            container, netns = f"c-{next(self._numbers)}", self._made.node.add_netns()
            for verb in ("ADD", "DEL"):
                answer = self._call(verb, container, netns, pod)
                if answer.code != 0:
                    self.failed.append((self.stopping, verb, answer))
            self._made.node.remove_netns(netns)
            self.done += 1

    def _call(self, verb: str, container: str, netns: str, pod: str) -> Answer:
        made, uid = self._made, self._made.uids[pod]
        if self._shim == "ours":
            return made.node.cni(verb, container, netns, pod, made.namespace, uid=uid, stdin=self._stdin, timeout=120)
        return made.upstream.cni(verb, container, netns, pod, made.namespace, uid, self._stdin, self._shim)

    def go_on(self) -> None:
        """Until more are through than can have been on their way."""
        wanted = self.done + 3 * WORKERS
        self._made.node.wait_until(lambda: self.done >= wanted, f"{wanted} containers", timeout=90)

    def finish(self) -> None:
        """Until all are through; what failed in a thread fails here."""
        self._finishing.set()
        self._pool.shutdown()
        for worker in self._workers:
            worker.result()


@pytest.mark.parametrize(("release", "shim"), [(OLD, "ours"), (OLD, OLD), (NEW, "ours"), (NEW, OLD), (NEW, NEW)])
def test_there_and_back_while_shims_run(takeover_from: Make, release: str, shim: str) -> None:
    if shim != "ours":
        shim_of(shim)
    with takeover_from("conf", release=release) as made:
        runtime = Runtime(made, shim)
        try:
            for stopping in ("upstream", "ours", "upstream"):
                runtime.go_on()
                runtime.stopping = stopping
                if stopping == "upstream":
                    made.take_over()
                else:
                    assert made.node.stop(timeout=60) == 0
                    made.upstream.start()
            runtime.go_on()
        finally:
            runtime.finish()
        failed = [stopped for stopped, verb, _ in runtime.failed if verb == "ADD"]
        assert len(failed) == len(runtime.failed), runtime.failed
        # Upstream's daemon cuts requests as it stops, v4.3.1 after 10 s. Only the new shim sends no ADD meanwhile.
        # The old one does not ask for readiness: our daemon serves its ADDs for 20 s, and undoes those that it cuts.
        may_fail = {NEW: set(), OLD: {"upstream", "ours"}, "ours": {"upstream"}}
        assert set(failed) <= may_fail[shim], runtime.failed
        # Upstream's shim reports a DEL that no daemon took as success.
        assert made.collect([]).code == 0
        made.node.wait_until(lambda: made.node.leftovers() == [], "nothing is left")
