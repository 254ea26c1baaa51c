"""Pods of one network, or of one namespace, that hang: what becomes of the pods beside them. From outside."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.real_daemon import RealDaemon

HANGING = 64
OTHERS = 8

Answer = tuple[int, bytes]


class Crowd:
    """Pods whose ADD hangs in a plugin, until they are let go."""

    def __init__(self, root: Path, netns: str, **settings: object) -> None:
        self.daemon = RealDaemon(root, {"maxDelegateProcesses": 8, "metricsPort": None, **settings})
        self.daemon.netns = netns
        self.go = root / "go"
        self.begun = root / "begun"
        done = 'test "$CNI_COMMAND" = DEL || echo \'{"cniVersion":"1.0.0"}\''
        self.daemon.plugin("plain", done)
        wait = f"echo >>{self.begun}; while [ ! -e {self.go} ]; do sleep 0.05; done"
        self.daemon.plugin("hangs", f"{wait}; {done}")
        self.daemon.network("cluster", "plain")
        self._pool = ThreadPoolExecutor(HANGING)
        self._calls: list[Future[Answer]] = []

    def __enter__(self) -> Crowd:
        self.daemon.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.touch()
        self._pool.shutdown()
        self.daemon.__exit__(None, None, None)

    def hang(self, pods: list[tuple[str, str]], verb: str = "ADD") -> None:
        """One call for each of them (namespace, name), until as many hang as will."""
        before = len(self._calls)
        for number, (namespace, name) in enumerate(pods, before):
            self._calls.append(self._pool.submit(self.daemon.cni, verb, f"h{number}", name, namespace))
        self.daemon.until(lambda: len(self.hanging) >= 4, "four hang")

    @property
    def hanging(self) -> str:
        """A character for each plugin that hangs."""
        return self.begun.read_text() if self.begun.exists() else ""

    def let_go(self) -> list[int]:
        """The status of each answer."""
        self.go.touch()
        return [call.result()[0] for call in self._calls]

    def pairs(self, namespace: str, name: str) -> list[Answer]:
        """ADD and DEL of others, side by side, which must come through meanwhile."""

        def pair(number: int) -> list[Answer]:
            return [self.daemon.cni(verb, f"c{number}", name, namespace, seconds=15) for verb in ("ADD", "DEL")]

        with ThreadPoolExecutor(OTHERS) as pool:
            return [answer for answers in pool.map(pair, range(OTHERS)) for answer in answers]


def test_one_network_that_hangs_fails_nobody_else(tmp_path, netns):
    """Neither pods of other namespaces, nor those of its own with other networks."""
    with Crowd(tmp_path, netns) as crowd:
        crowd.daemon.network("bad", "hangs", "default")
        crowd.daemon.pod("bad", "default", "bad")
        for namespace in ("default", "other"):
            crowd.daemon.pod("good", namespace)
        crowd.hang([("default", "bad")] * HANGING)
        for namespace in ("default", "other"):
            answers = crowd.pairs(namespace, "good")
            assert [status for status, _ in answers] == [200] * 2 * OTHERS, answers
        # What hangs has had its share and no more: of seven places for ADD, two were left.
        crowd.daemon.until(lambda: len(crowd.hanging) >= 5, "it has its share")
        assert len(crowd.hanging) == 5
        assert crowd.let_go() == [200] * HANGING


def test_one_network_of_many_namespaces_fails_nobody_else(tmp_path, netns):
    with Crowd(tmp_path, netns) as crowd:
        crowd.daemon.network("bad", "hangs", "default")
        for number in range(8):
            crowd.daemon.pod("bad", f"ns{number}", "default/bad")
        crowd.daemon.pod("good", "other")
        crowd.hang([(f"ns{number % 8}", "bad") for number in range(HANGING)])
        answers = crowd.pairs("other", "good")
        assert [status for status, _ in answers] == [200] * 2 * OTHERS, answers
        assert crowd.let_go() == [200] * HANGING


def test_one_namespace_of_many_networks_fails_nobody_else(tmp_path, netns):
    with Crowd(tmp_path, netns) as crowd:
        for number in range(8):
            crowd.daemon.network(f"bad{number}", "hangs", "default")
            crowd.daemon.pod(f"bad{number}", "default", f"bad{number}")
        crowd.daemon.pod("good", "other")
        crowd.hang([("default", f"bad{number % 8}") for number in range(HANGING)])
        answers = crowd.pairs("other", "good")
        assert [status for status, _ in answers] == [200] * 2 * OTHERS, answers
        assert crowd.let_go() == [200] * HANGING


def test_requests_of_one_namespace_do_not_take_every_thread(tmp_path, netns):
    with Crowd(tmp_path, netns, connectionLimit=16) as crowd:
        crowd.daemon.network("bad", "hangs", "default")
        crowd.daemon.pod("bad", "default", "bad")
        crowd.daemon.pod("good", "other")
        crowd.hang([("default", "bad")] * HANGING)
        answers = crowd.pairs("other", "good")
        assert [status for status, _ in answers] == [200] * 2 * OTHERS, answers
        assert crowd.let_go() == [200] * HANGING


def test_pods_with_thousands_of_port_mappings_fail_nobody_else(tmp_path, netns):
    """They are told the bound at once, and no plugin works for them; those with as many as allowed get theirs."""
    with Crowd(tmp_path, netns) as crowd:
        crowd.daemon.network("ports", "hangs", "default")
        for name, number in (("greedy", 2500), ("modest", 128)):
            mappings = [{"hostPort": port, "containerPort": port} for port in range(1, number + 1)]
            crowd.daemon.pod(name, "default", json.dumps([{"name": "ports", "portMappings": mappings}]))
        crowd.daemon.pod("good", "default")
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda number: crowd.daemon.cni("ADD", f"g{number}", "greedy", "default"), range(8))
            )
        for status, text in answers:
            assert status == 400
            error = json.loads(text)
            assert error["code"] == 7
            assert error["msg"].startswith("2500 portMappings of pod default/greedy, and at most 128 are allowed")
        assert crowd.hanging == ""
        answers = crowd.pairs("default", "good")
        assert [status for status, _ in answers] == [200] * 2 * OTHERS, answers
        crowd.go.touch()
        assert crowd.daemon.cni("ADD", "m1", "modest", "default")[0] == 200
