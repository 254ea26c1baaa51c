"""The condition `multus.io/NetworksReady`: what is written, when it is not, and what a failure does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube import latest as module
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.latest import ConditionWriter
from multus_daemon.spec.attachment import Pod, PodCondition
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NETWORKS_READY
from tests.aside import running
from tests.fakes.apiserver import FakeApiServer
from tests.waiting import eventually

EARLIER = "2026-01-02T03:04:05Z"


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "CONDITION_RETRY_SECONDS", (0.02, 0.1))


@pytest.fixture
def writer(client: ApiClient) -> ConditionWriter:
    return ConditionWriter(client)


def declare(server: FakeApiServer, name: str = "web-1") -> Pod:
    return Pod(Namespace("web"), PodName(name), PodUid(server.add_pod(name)["metadata"]["uid"]))


def written(server: FakeApiServer, name: str = "web-1") -> dict[str, Any]:
    conditions = server.get("pods", "web", name).get("status", {}).get("conditions", [])
    return next((item for item in conditions if item["type"] == NETWORKS_READY), {})


def patches(server: FakeApiServer, name: str = "web-1") -> int:
    return server.requests.count(("PATCH", f"/api/v1/namespaces/web/pods/{name}/status"))


async def until_written(server: FakeApiServer, reason: str, name: str = "web-1") -> dict[str, Any]:
    async with asyncio.timeout(30):
        while (found := written(server, name)).get("reason") != reason:
            await asyncio.sleep(0.005)
    return found


async def test_a_condition_that_the_pod_has_costs_nothing(server: FakeApiServer, client: ApiClient) -> None:
    pod, other = declare(server), declare(server, "web-2")
    has = PodCondition(True, "NetworksAttached", "", EARLIER)
    writer = ConditionWriter(client, lambda asked: has if asked == pod else None)
    async with running(writer.run()):
        for _ in range(2):
            writer.put_condition(pod, ready=True, reason="NetworksAttached", message="")
            writer.put_condition(other, ready=True, reason="NetworksAttached", message="")
            await until_written(server, "NetworksAttached", "web-2")
        # Written in order: what comes after it shows that it is not waiting.
        writer.put_condition(other, ready=True, reason="More", message="")
        await until_written(server, "More", "web-2")
        assert (patches(server), patches(server, "web-2")) == (0, 2)
        # The time of an earlier daemon stays while ready stays.
        writer.put_condition(pod, ready=True, reason="More", message="")
        assert (await until_written(server, "More"))["lastTransitionTime"] == EARLIER
        writer.put_condition(pod, ready=False, reason="AttachmentBroken", message="")
        assert (await until_written(server, "AttachmentBroken"))["lastTransitionTime"] > EARLIER


async def test_the_newest_wins_over_one_on_its_way(server: FakeApiServer, writer: ConditionWriter) -> None:
    pod = declare(server)
    async with running(writer.run()):
        writer.put_condition(pod, ready=True, reason="A", message="")
        await until_written(server, "A")
        server.delay = 0.1
        writer.put_condition(pod, ready=False, reason="B", message="")
        await eventually(lambda: patches(server) >= 2)
        # B is on its way, and A is what was written last.
        writer.put_condition(pod, ready=True, reason="A", message="")
        await until_written(server, "B")
        await until_written(server, "A")


async def test_after_a_failure_nobody_knows_what_the_pod_has(server: FakeApiServer, writer: ConditionWriter) -> None:
    pod = declare(server)
    async with running(writer.run()):
        writer.put_condition(pod, ready=True, reason="A", message="")
        await until_written(server, "A")
        # An answer that is lost: the server may have written B.
        server.fail(500, times=1, method="PATCH")
        writer.put_condition(pod, ready=False, reason="B", message="")
        async with asyncio.timeout(30):
            while patches(server) < 2:
                await asyncio.sleep(0)
        writer.put_condition(pod, ready=True, reason="A", message="")
        await eventually(lambda: patches(server) >= 3)
        await until_written(server, "A")


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_final_refusal_is_not_repeated(server: FakeApiServer, writer: ConditionWriter, status: int) -> None:
    poor, other = declare(server), declare(server, "web-2")
    server.fail(status, times=1, method="PATCH", contains="/web-1/")
    async with running(writer.run()):
        writer.put_condition(poor, ready=True, reason="A", message="")
        for reason in ("A", "B", "C"):
            writer.put_condition(other, ready=True, reason=reason, message="")
            await until_written(server, reason, "web-2")
    assert patches(server) == 1
    assert written(server) == {}


async def test_never_more_than_a_node_has(
    server: FakeApiServer, writer: ConditionWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PENDING_MAX", 2)
    for name in ("web-1", "web-2", "web-3"):
        writer.put_condition(declare(server, name), ready=True, reason="A", message="")
    async with running(writer.run()):
        await until_written(server, "A", "web-3")
    assert [patches(server, name) for name in ("web-1", "web-2", "web-3")] == [0, 1, 1]
