import asyncio
import datetime
import time

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube import events as module
from multus_daemon.cluster.kube.events import BURST, EventRecorder
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from tests.aside import running
from tests.counted import counted
from tests.waiting import eventually


@pytest.fixture
def recorder(client, metrics, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(module, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(deadlines, "EVENT_KEEP_TRYING_SECONDS", 60)
    return EventRecorder(client, metrics, "node-a")


def pod(name="web-1", uid=""):
    return Pod(Namespace("web"), PodName(name), PodUid(uid or f"uid-of-{name}"))


def found(server):
    return list(server.objects["events"].values())


async def test_form(server, recorder):
    recorder.event(pod(), "Normal", "AddedInterface", "Add eth0 [10.1.0.2/24] from net")
    await recorder.flush()
    (event,) = found(server)
    name = event["metadata"].pop("name")
    assert name.startswith("web-1.")
    assert event["metadata"]["namespace"] == "web"
    del event["metadata"]
    now = datetime.datetime.strptime(event.pop("firstTimestamp"), "%Y-%m-%dT%H:%M:%S%z")
    assert abs(now.timestamp() - time.time()) < 60
    assert event.pop("lastTimestamp") == now.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": "web",
            "name": "web-1",
            "uid": "uid-of-web-1",
        },
        "type": "Normal",
        "reason": "AddedInterface",
        "message": "Add eth0 [10.1.0.2/24] from net",
        "source": {"component": "multus", "host": "node-a"},
        "reportingComponent": "multus",
        "reportingInstance": "node-a",
        "count": 1,
    }


async def test_one_event_per_pod_type_and_reason(server, recorder):
    for name in ("web-1", "web-2"):
        for number in range(3):
            recorder.event(pod(name), "Normal", "AddedInterface", f"Add net{number} [] from n{number}")
    recorder.event(pod(), "Normal", "AddedInterface", "Add net1 [] from n1")
    recorder.event(pod(), "Warning", "NetworkStatusNotWritten", "why")
    await recorder.flush()
    assert sorted((event["involvedObject"]["name"], event["message"]) for event in found(server)) == [
        ("web-1", "Add net0 [] from n0; Add net1 [] from n1; Add net2 [] from n2"),
        ("web-1", "why"),
        ("web-2", "Add net0 [] from n0; Add net1 [] from n1; Add net2 [] from n2"),
    ]
    assert len(server.requests) == 3


async def test_repeats_are_counted_up(server, recorder, metrics):
    for _ in range(3):
        recorder.event(pod(), "Warning", "NoNetworkFound", "no such network")
        await recorder.flush()
    (event,) = found(server)
    assert event["count"] == 3
    assert [method for method, _ in server.requests] == ["POST", "PATCH", "PATCH"]


async def test_an_event_that_the_api_server_has_forgotten_is_made_anew(server, recorder):
    recorder.event(pod(), "Normal", "R", "m")
    await recorder.flush()
    server.objects["events"].clear()
    recorder.event(pod(), "Normal", "R", "m")
    await recorder.flush()
    assert [event["count"] for event in found(server)] == [1]


async def test_a_new_incarnation_has_events_of_its_own(server, recorder):
    for uid in ("a", "b"):
        recorder.event(pod(uid=uid), "Normal", "R", "m")
    await recorder.flush()
    assert sorted(event["involvedObject"]["uid"] for event in found(server)) == ["a", "b"]


async def test_a_pod_causes_so_many_and_the_others_are_not_touched(server, recorder, metrics):
    for number in range(BURST + 5):
        recorder.event(pod(), "Warning", "R", f"m{number}")
        await recorder.flush()
    recorder.event(pod("web-2"), "Warning", "R", "m")
    await recorder.flush()
    assert len(found(server)) == BURST + 1
    assert counted(metrics.events_dropped) == 5


async def test_the_queue_is_bounded(server, client, metrics, monkeypatch):
    monkeypatch.setattr(module, "QUEUE_MAX", 10)
    recorder = EventRecorder(client, metrics, "node-a")
    for number in range(15):
        recorder.event(pod(f"p{number}"), "Normal", "R", "m")
    assert counted(metrics.events_dropped) == 5
    await recorder.flush()
    assert len(found(server)) == 10
    recorder.event(pod(), "Normal", "R", "m")
    await recorder.flush()
    assert counted(metrics.events_dropped) == 5


async def test_neither_blocks_nor_raises(recorder):
    for number in range(10_000):
        recorder.event(pod(f"p{number}"), "%s", "{}", "%d")


async def test_api_away_for_a_while(server, recorder, metrics):
    await server.stop()
    async with running(recorder.run()):
        recorder.event(pod(), "Normal", "R", "m")
        await asyncio.sleep(0.3)
        await server.start()
        await eventually(lambda: found(server))
    assert not counted(metrics.events_dropped)


async def test_what_comes_while_the_api_is_away_joins_what_waits(server, recorder, metrics):
    server.fail(503, times=2)
    async with running(recorder.run()):
        recorder.event(pod(), "Normal", "R", "first")
        await eventually(lambda: server.requests)
        recorder.event(pod(), "Normal", "R", "second")
        await eventually(lambda: found(server) and not recorder._queued)
    assert "; ".join(event["message"] for event in found(server)) == "first; second"
    assert not counted(metrics.events_dropped)


async def test_api_away_for_long(server, client, metrics, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(deadlines, "EVENT_KEEP_TRYING_SECONDS", 0.2)
    recorder = EventRecorder(client, metrics, "node-a")
    server.fail(503, times=10_000)
    recorder.event(pod(), "Normal", "R", "m")
    recorder.event(pod("web-2"), "Normal", "R", "m")
    began = time.monotonic()
    await recorder.flush()
    assert time.monotonic() - began < 20
    assert counted(metrics.events_dropped) == 2


@pytest.mark.parametrize("status", [403, 404, 422])
async def test_refused(server, recorder, metrics, status):
    """Such as in a namespace that is being deleted."""
    server.fail(status)
    recorder.event(pod(), "Normal", "R", "m")
    await recorder.flush()
    assert (len(server.requests), counted(metrics.events_dropped)) == (1, 1)


async def test_long_names_and_messages(server, recorder):
    for letter in "vwxyz":
        recorder.event(pod("p" * 230 + "." + "q" * 22), "Normal", "R", letter * 10_000)
    await recorder.flush()
    (event,) = found(server)
    assert len(event["metadata"]["name"]) <= 253
    assert event["message"] == "; ".join(letter * 1000 for letter in "vwxyz")[:4093] + "..."


async def test_little_is_remembered(server, recorder):
    recorder._posted._most = recorder._allowances._most = 3
    for number in range(6):
        recorder.event(pod(f"p{number}"), "Normal", "R", "m")
    await recorder.flush()
    assert len(recorder._posted._kept) == len(recorder._allowances._kept) == 3


async def test_the_node_is_named_as_the_kubelet_names_it(server, recorder):
    recorder.node_event("Warning", "CNIConfigRestored", "put back")
    recorder.node_event("Warning", "CNIConfigRestored", "put back")
    recorder.event(pod("node-a", uid="of-a-pod"), "Normal", "R", "m")
    await recorder.flush()
    event, _ = found(server)
    assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "node-a"}
    assert event["metadata"]["namespace"] == "default"
    assert event["metadata"]["name"].startswith("node-a.")
    assert (event["type"], event["reason"], event["message"]) == ("Warning", "CNIConfigRestored", "put back")


async def test_an_allowance_of_the_nodes_own(server, recorder, metrics):
    for number in range(BURST + 5):
        recorder.node_event("Warning", f"R{number}", "m")
        await recorder.flush()
    assert len(found(server)) == BURST
    recorder.event(pod(), "Warning", "R", "m")
    await recorder.flush()
    assert len(found(server)) == BURST + 1
