"""Nothing is lost: the proofs of `tests/soak`, short; see docs/reliability.md for the long ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.apiserver import ApiServer
from tests.e2e.memory_group import MemoryGroup, NoMemoryGroupError
from tests.e2e.node import Node
from tests.e2e.test_kubernetes import Cluster
from tests.soak import churn, isolation, memory, outages, steady
from tests.soak.remains import Remains

pytest_plugins = ["tests.e2e.kube_fixtures"]

MakeNode = Callable[..., Node]


def test_the_proofs_see_whatever_is_left(make_node: MakeNode) -> None:
    node = make_node(settings={"builtinPlugins": "fallback"})
    node.ptp("cluster", "10.95.0.0/24", ipMasq=True)
    node.pod("hello")
    node.plugin("sleepy", "sleep 300 >/dev/null & sleep 300")
    node.network("slow", {"cniVersion": "1.0.0", "name": "slow", "type": "sleepy"}, "default")
    node.pod("waits", "slow")
    node.start()
    netns = node.add_netns()
    for verb in ("ADD", "DEL"):
        assert node.cni(verb, "c0", netns, "hello").code == 0
    remains = Remains(node)
    assert remains.now([netns]) == []
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    kinds = {line.split()[0] for line in remains.now([netns])}
    assert kinds == {"link", "route", "rule", "file"}
    assert "link eth0" in "\n".join(remains.now([netns]))
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert remains.settled([netns], 5) == []
    with pytest.raises(Exception, match="timed out"):
        node.cni("ADD", "c2", netns, "waits", timeout=3)
    found: list[str] = []

    def has_all() -> bool:
        found[:] = [line.removeprefix("process ") for line in remains.now() if line.startswith("process ")]
        return sorted(line.partition(": ")[2].split()[0] for line in found) == ["/bin/sh", "sleep", "sleep"]

    node.wait_until(has_all, "the plugin and what it has started are seen")
    for line in found:
        os.kill(int(line.partition(":")[0]), signal.SIGKILL)


@pytest.mark.parametrize(("mode", "disk"), [*((mode, "well") for mode in churn.MODES), ("prefer", "sick")])
def test_churn(mode: str, disk: str, make_node: MakeNode, reference: Path) -> None:
    outcome = churn.run(make_node(settings=churn.settings(mode)), 48, 8, disk=disk)
    assert outcome.wrong == [], outcome.summary


def test_outages(make_node: MakeNode, reference: Path, api_server: ApiServer, api_namespace: str) -> None:
    cluster = Cluster(api_server, make_node(settings=dict(outages.SETTINGS), standalone=False), api_namespace)
    cluster.prepare()
    with api_server.reachable_in(cluster.node.host):
        outcome = outages.run(cluster, 50, 10)
        cluster.node.kill()
    assert outcome.wrong == [], outcome.summary


def test_steady(make_node: MakeNode, reference: Path) -> None:
    outcome = steady.run(make_node(settings=churn.settings("prefer")), 200)
    assert outcome.wrong == [], outcome.summary


@pytest.mark.weak_spot(35)
def test_large_plugins_fit_into_a_small_memory_limit(make_node: MakeNode) -> None:
    try:
        group = MemoryGroup(128 * memory.MIB)
    except NoMemoryGroupError as error:
        pytest.skip(str(error))
    with group, memory.held(group, 30):
        node = make_node(group=group)
        memory.prepare(node)
        try:
            outcome = memory.run(node, group, 12)
        finally:
            # The group can't be removed before.
            node.kill()
    assert outcome.wrong == [], outcome.summary


def test_isolation(make_node: MakeNode, reference: Path) -> None:
    # Other tests run beside.
    outcome = isolation.run(make_node(settings=dict(isolation.SETTINGS)), 25, slowest=20)
    assert outcome.wrong == [], outcome.summary
