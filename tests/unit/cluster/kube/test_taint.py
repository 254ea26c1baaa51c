import asyncio

import pytest

from multus_daemon.cluster.kube.store import KubeStore
from multus_daemon.cluster.kube.taint import DEGRADED
from tests.aside import running
from tests.fakes.apiserver import NODES
from tests.waiting import eventually

KEY = "readiness.k8s.io/multus-not-ready"
OTHER = {"key": "dedicated", "value": "db", "effect": "NoSchedule"}


@pytest.fixture
def taints(server):
    def read():
        return server.get(NODES, "", "node-a")["spec"]["taints"]

    found = [OTHER, {"key": KEY, "value": "pending", "effect": "NoSchedule"}, {"key": KEY, "effect": "NoExecute"}]
    server.put(NODES, {"metadata": {"name": "node-a"}, "spec": {"taints": found}})
    return read


@pytest.fixture
async def started(server, client, gates):
    """A store whose daemon is not ready yet."""
    gates.close("primary", "not looked at yet")
    async with running(KubeStore(client, "node-a", gates, startup_taint=KEY).run()):
        yield gates


async def test_it_goes_when_the_daemon_is_ready_and_others_stay(server, taints, started):
    await eventually(lambda: list(started.closed) == ["primary"])
    await asyncio.sleep(0.1)
    assert len(taints()) == 3
    started.open("primary")
    await eventually(lambda: taints() == [OTHER])


@pytest.mark.parametrize("status", [403, 422, 503])
async def test_a_refusal_is_said_and_tried_again(server, taints, started, status, monkeypatch):
    monkeypatch.setattr("multus_daemon.deadlines.CONDITION_RETRY_SECONDS", (0.2, 0.2))
    server.fail(status, times=1, method="PATCH", contains="/nodes/node-a")
    started.open("primary")
    await eventually(lambda: "startupTaint" in started.degraded.closed.get(DEGRADED, ""))
    assert len(taints()) == 3
    await eventually(lambda: taints() == [OTHER])
    await eventually(lambda: not started.degraded.closed)


async def test_a_node_without_it_is_not_written(server, started):
    server.put(NODES, {"metadata": {"name": "node-a"}, "spec": {}})
    started.open("primary")
    await eventually(lambda: server.count("GET", "/nodes/node-a"))
    await eventually(lambda: DEGRADED in started.degraded.conditions)
    assert server.count("PATCH") == 0
