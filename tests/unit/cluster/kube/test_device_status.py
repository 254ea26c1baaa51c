"""Claimed devices in `ResourceClaim.status.devices`, over an API server."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.latest import DeviceStatusWriter
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from tests.aside import running
from tests.claims import claim, result
from tests.fakes.apiserver import CLAIMS, FakeApiServer, Object
from tests.waiting import eventually

POD = Pod(Namespace("web"), PodName("p1"), PodUid("u1"))
OTHER = Pod(Namespace("web"), PodName("p2"), PodUid("u2"))
C1, C2 = ContainerId("c1"), ContainerId("c2")


@pytest.fixture(autouse=True)
def retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "CONDITION_RETRY_SECONDS", (0.02, 0.05))


@pytest.fixture
async def writer(client: ApiClient, server: FakeApiServer) -> AsyncIterator[DeviceStatusWriter]:
    server.put(CLAIMS, claim("c1", result("a"), result("b")))
    made = DeviceStatusWriter(client)
    async with running(made.run()):
        yield made


def entry(device: str, interface: str = "net1") -> Object:
    return {"driver": "d", "pool": "p", "device": device, "networkData": {"interfaceName": interface}}


def report(server: FakeApiServer, *entries: Object) -> DeviceReport:
    return DeviceReport("c1", server.get(CLAIMS, "web", "c1")["metadata"]["uid"], entries)


def shown(server: FakeApiServer) -> list[str]:
    devices = server.get(CLAIMS, "web", "c1")["status"].get("devices", [])
    return [f"{item['device']}: {item['networkData']['interfaceName']}" for item in devices]


def patches(server: FakeApiServer) -> int:
    return server.count("PATCH", "/resourceclaims/c1/status")


async def test_entries_come_and_go_with_one_patch_each(server: FakeApiServer, writer: DeviceStatusWriter) -> None:
    writer.put_report(POD, report(server, entry("a"), entry("b", "net2")))
    await eventually(lambda: shown(server) == ["a: net1", "b: net2"])
    writer.put_report(POD, report(server, entry("b", "net2")))
    await eventually(lambda: shown(server) == ["b: net2"])
    writer.put_report(POD, report(server))
    await eventually(lambda: shown(server) == [])
    assert patches(server) == 3
    assert server.count("PATCH", "fieldManager=multus-daemon/u1") == 3


async def test_pods_that_share_a_claim_have_entries_of_their_own(
    server: FakeApiServer, writer: DeviceStatusWriter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer.put_report(POD, report(server, entry("a")))
    writer.put_report(OTHER, report(server, entry("b")))
    await eventually(lambda: len(shown(server)) == 2)
    writer.put_report(POD, report(server))
    await eventually(lambda: shown(server) == ["b: net1"])
    # What another has set is left alone.
    writer.put_report(POD, report(server, entry("b", "mine")))
    await eventually(lambda: "is left alone" in caplog.text)
    assert shown(server) == ["b: net1"]


async def test_a_late_del_of_an_earlier_container_removes_nothing(
    server: FakeApiServer, writer: DeviceStatusWriter
) -> None:
    writer.put_report(POD, report(server, entry("a")))
    await eventually(lambda: shown(server))
    writer.put_report(POD, report(server, entry("a", "net5")))
    await eventually(lambda: shown(server) == ["a: net5"])
    writer.put_report(POD, report(server))
    writer.put_report(POD, report(server, entry("a", "net6")))
    await eventually(lambda: shown(server) == ["a: net6"])
    assert patches(server) == 3


async def test_a_claim_made_anew_is_left_alone(
    server: FakeApiServer, writer: DeviceStatusWriter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old = report(server, entry("a"))
    server.delete(CLAIMS, "web", "c1")
    server.put(CLAIMS, claim("c1", result("a")))
    writer.put_report(POD, old)
    await eventually(lambda: "is left alone" in caplog.text)
    assert shown(server) == []


async def test_a_claim_that_has_gone(
    server: FakeApiServer, writer: DeviceStatusWriter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gone = report(server)
    server.delete(CLAIMS, "web", "c1")
    writer.put_report(POD, gone)
    await eventually(lambda: "device status of ResourceClaim web/c1 is not written" in caplog.text)
    assert patches(server) == 1


async def test_an_api_server_that_is_away(server: FakeApiServer, writer: DeviceStatusWriter) -> None:
    server.fail(503, times=3, method="PATCH")
    writer.put_report(POD, report(server, entry("a")))
    await eventually(lambda: shown(server))
    assert patches(server) == 4


async def test_a_role_that_does_not_allow_it_is_one_line_and_one_attempt_an_hour(
    server: FakeApiServer,
    writer: DeviceStatusWriter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server.fail(403, times=1, method="PATCH")
    for pod in (POD, OTHER):
        writer.put_report(pod, report(server, entry("a")))
        await eventually(lambda: not writer._pending)
    assert patches(server) == 1
    assert caplog.text.count("the role does not allow it") == 1
    # The hour has passed.
    assert writer._forbidden_until > time.monotonic()
    writer._forbidden_until = time.monotonic()
    writer.put_report(OTHER, report(server, entry("a")))
    await eventually(lambda: shown(server))
