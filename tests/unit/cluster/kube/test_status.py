import asyncio
import json
import time

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube import latest as module
from multus_daemon.cluster.kube.latest import StatusWriter
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.network_status import ANNOTATION
from multus_daemon.spec.ports import StatusWriteError
from tests.aside import running
from tests.waiting import eventually


@pytest.fixture
def seconds(monkeypatch):
    """Sets how long a `write` may take, and the pauses after it."""

    def set_seconds(patience, retry=(0.02, 0.1)):
        monkeypatch.setattr(deadlines, "NETWORK_STATUS_PATIENCE_SECONDS", patience)
        monkeypatch.setattr(deadlines, "NETWORK_STATUS_RETRY_SECONDS", retry)

    return set_seconds


@pytest.fixture
def writer(client, metrics, seconds):
    """Has more patience than a machine under load needs."""
    seconds(30)
    return StatusWriter(client)


@pytest.fixture
def impatient(client, metrics, seconds):
    """Write statuses with a deadline of 1 s, for a server that fails until it expires."""
    seconds(1)
    return StatusWriter(client)


@pytest.fixture
def hasty(client, metrics, seconds):
    """Put each status off before it is sent."""
    seconds(0)
    return StatusWriter(client)


def declare(server, name="web-1", **metadata):
    found = server.add_pod(name, **metadata)["metadata"]
    return Pod(Namespace("web"), PodName(name), PodUid(found["uid"]))


def written(server, name="web-1"):
    return server.get("pods", "web", name)["metadata"].get("annotations", {}).get(ANNOTATION)


@pytest.mark.conformance("pods-28")
async def test_one_patch_of_our_annotation(server, writer, metrics):
    pod = declare(server, annotations={"other": "kept"})
    await writer.write(pod, '[{"a": "ä \\u003c"}]', keep_trying=True)
    assert server.requests == [("PATCH", "/api/v1/namespaces/web/pods/web-1/status")]
    annotations = server.get("pods", "web", "web-1")["metadata"]["annotations"]
    assert annotations == {"other": "kept", ANNOTATION: '[{"a": "ä \\u003c"}]'}
    assert writer.pending == 0


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_tried_again_within_the_patience(server, writer, status):
    pod = declare(server)
    server.fail(status, times=1)
    await writer.write(pod, "[]", keep_trying=False)
    assert written(server) == "[]"
    assert len(server.requests) == 2


@pytest.mark.weak_spot(38)
@pytest.mark.conformance("pods-32")
async def test_impatience(server, impatient, seconds):
    pod = declare(server)
    server.fail(503, times=1000)
    began = time.monotonic()
    with pytest.raises(StatusWriteError, match=f"{ANNOTATION} of pod web/web-1 was not written: .*503"):
        await impatient.write(pod, "[]", keep_trying=False)
    assert 0.2 < time.monotonic() - began < 10
    assert impatient.pending == 0
    seconds(0)
    with pytest.raises(StatusWriteError, match="it is tried again"):
        await impatient.write(pod, "[]", keep_trying=True)
    assert impatient.pending == 1


@pytest.mark.weak_spot(38)
async def test_a_slow_server(server, impatient, seconds):
    seconds(0.1)
    pod = declare(server)
    server.delay = 20
    began = time.monotonic()
    with pytest.raises(StatusWriteError):
        await impatient.write(pod, "[]", keep_trying=False)
    assert time.monotonic() - began < 10


async def test_retry_after_is_heeded(server, impatient, seconds):
    pod = declare(server)
    seconds(60)
    # It connects, which may take longer than the deadline on a busy machine.
    await impatient.write(pod, "[1]", keep_trying=False)
    server.requests.clear()
    seconds(1)
    server.fail(429, times=5, headers={"Retry-After": "60"})
    with pytest.raises(StatusWriteError):
        await impatient.write(pod, "[]", keep_trying=False)
    assert len(server.requests) == 1


@pytest.mark.conformance("pods-31")
async def test_another_incarnation(server, writer, metrics):
    pod = declare(server)
    server.add_pod(uid="99999999-2222-3333-4444-555555555555")
    with pytest.raises(StatusWriteError, match="created anew"):
        await writer.write(pod, "[]", keep_trying=True)
    assert written(server) is None
    assert (len(server.requests), writer.pending) == (1, 0)


@pytest.mark.weak_spot(9)
async def test_pod_gone(server, writer):
    pod = declare(server)
    server.delete("pods", "web", "web-1")
    with pytest.raises(StatusWriteError, match="has gone"):
        await writer.write(pod, "[]", keep_trying=True)
    assert (len(server.requests), writer.pending) == (1, 0)


async def test_a_value_that_is_no_annotation(server, writer):
    pod = declare(server)
    server.fail(422, fields=("metadata.annotations",))
    with pytest.raises(StatusWriteError, match="422"):
        await writer.write(pod, "x" * 10, keep_trying=True)
    assert writer.pending == 0


@pytest.mark.conformance("pods-32")
async def test_everything_is_written_when_the_api_is_back(server, hasty, metrics):
    pods = [declare(server, f"p{number}") for number in range(60)]
    await server.stop()
    async with running(hasty.run()):
        results = await asyncio.gather(
            *[hasty.write(pod, json.dumps([pod.name]), keep_trying=True) for pod in pods], return_exceptions=True
        )
        assert {type(result) for result in results} == {StatusWriteError}
        assert hasty.pending == 60
        server.delete("pods", "web", "p7")
        server.add_pod("p8", uid="99999999-2222-3333-4444-555555555555")
        before = len(server.requests)
        await server.start()
        await eventually(lambda: not hasty.pending)
    assert len(server.requests) - before <= 61
    assert [written(server, pod.name) for pod in pods if pod.name not in ("p7", "p8")] == [
        json.dumps([pod.name]) for pod in pods if pod.name not in ("p7", "p8")
    ]
    assert written(server, "p8") is None
    assert hasty.pending == 0


async def test_kick_ends_a_pause(server, client, seconds):
    seconds(0.1, (30, 30))
    writer = StatusWriter(client)
    pod = declare(server)
    await server.stop()
    async with running(writer.run()):
        with pytest.raises(StatusWriteError):
            await writer.write(pod, "[]", keep_trying=True)
        await asyncio.sleep(0.05)
        await server.start()

        def kicked() -> bool:
            # An attempt may be under way, after which an earlier kick counts for nothing.
            writer.kick()
            return not writer.pending

        await eventually(kicked)
    assert written(server) == "[]"


async def test_the_newest_value_wins(server, hasty):
    pod = declare(server)
    server.fail(503, times=10_000)
    for value in ("old", "new"):
        with pytest.raises(StatusWriteError):
            await hasty.write(pod, value, keep_trying=True)
    assert hasty.pending == 1
    server.faults.clear()
    async with running(hasty.run()):
        await eventually(lambda: not hasty.pending)
        assert written(server) == "new"


async def test_a_newer_value_that_is_written_at_once_replaces_what_waits(server, hasty, seconds):
    writer, pod = hasty, declare(server)
    with pytest.raises(StatusWriteError):
        await writer.write(pod, "old", keep_trying=True)
    seconds(30)
    await writer.write(pod, "new", keep_trying=False)
    async with running(writer.run()):
        await asyncio.sleep(0.05)
    assert written(server) == "new"
    assert writer.pending == 0


async def test_a_newer_value_waits_for_the_older_one_in_flight(server, client, seconds):
    seconds(0.1, (0.01, 0.01))
    writer = StatusWriter(client)
    pod = declare(server)
    server.fail(503, times=10_000)
    with pytest.raises(StatusWriteError):
        await writer.write(pod, "old", keep_trying=True)
    server.faults.clear()
    server.delay = 0.3
    before = len(server.requests)
    async with running(writer.run()):
        await eventually(lambda: len(server.requests) > before)
        with pytest.raises(StatusWriteError, match="still being written"):
            await writer.write(pod, "new", keep_trying=True)
        server.delay = 0
        await eventually(lambda: not writer.pending)
        assert written(server) == "new"


async def test_a_caller_that_goes_away(server, writer):
    pod = declare(server)
    server.fail(503, times=10_000)
    for keep_trying, pending in ((False, 0), (True, 1)):
        task = asyncio.create_task(writer.write(pod, "[]", keep_trying=keep_trying))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert writer.pending == pending


async def test_the_queue_is_bounded(server, client, metrics, seconds, monkeypatch):
    seconds(0.05)
    monkeypatch.setattr(module, "PENDING_MAX", 3)
    writer = StatusWriter(client)
    server.fail(503, times=10_000)
    for number in range(5):
        with pytest.raises(StatusWriteError):
            await writer.write(declare(server, f"p{number}"), "[]", keep_trying=True)
    assert writer.pending == 3


# --- where PATCH is forbidden ----------------------------------------------------------------------------------------

STATUS_PATH = "/api/v1/namespaces/web/pods/web-1/status"
POD_PATH = "/api/v1/namespaces/web/pods/web-1"


async def test_put_where_only_that_is_allowed_and_patch_is_not_tried_again(server, writer, metrics, caplog):
    server.fail(403, times=float("inf"), method="PATCH")
    pod = declare(server, annotations={"other": "kept"}, labels={"a": "b"})
    await writer.write(pod, "[1]", keep_trying=True)
    assert server.requests == [("PATCH", STATUS_PATH), ("GET", POD_PATH), ("PUT", STATUS_PATH)]
    found = server.get("pods", "web", "web-1")
    assert found["metadata"]["annotations"] == {"other": "kept", ANNOTATION: "[1]"}
    assert (found["metadata"]["labels"], found["spec"]["nodeName"]) == ({"a": "b"}, "node-a")
    server.requests.clear()
    await writer.write(pod, "[2]", keep_trying=True)
    assert server.requests == [("GET", POD_PATH), ("PUT", STATUS_PATH)]
    assert written(server) == "[2]"
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "grant the verb patch on pods/status" in line


async def test_back_to_patch_where_put_is_refused(server, writer, metrics):
    pod = declare(server)
    server.fail(403, times=1, method="PATCH")
    await writer.write(pod, "[1]", keep_trying=True)
    server.fail(403, times=float("inf"), method="PUT")
    server.requests.clear()
    await writer.write(pod, "[2]", keep_trying=True)
    await writer.write(pod, "[3]", keep_trying=True)
    assert [method for method, _ in server.requests] == ["GET", "PUT", "PATCH", "PATCH"]
    assert written(server) == "[3]"


async def test_neither_allowed_names_the_first_refusal(server, impatient, metrics):
    server.fail(403, times=float("inf"), method="P")
    pod = declare(server)
    with pytest.raises(StatusWriteError, match="PATCH .*403"):
        await impatient.write(pod, "[]", keep_trying=False)
    assert written(server) is None


async def test_a_role_that_is_bound_later(server, writer, metrics):
    # PATCH and the GET before a PUT, twice.
    server.fail(403, times=4)
    pod = declare(server)
    await writer.write(pod, "[]", keep_trying=False)
    assert [method for method, _ in server.requests] == ["PATCH", "GET", "PATCH", "GET", "PATCH"]
    assert written(server) == "[]"


async def test_a_pod_that_others_write_to_is_read_again(server, writer):
    server.fail(403, times=float("inf"), method="PATCH")
    pod = declare(server)
    server.fail(409, times=2, method="PUT")
    await writer.write(pod, "[]", keep_trying=True)
    assert [method for method, _ in server.requests] == ["PATCH", *["GET", "PUT"] * 3]
    assert written(server) == "[]"


async def test_a_conflict_that_stays_is_tried_later(server, writer):
    server.fail(403, times=float("inf"), method="PATCH")
    pod = declare(server)
    server.fail(409, times=4, method="PUT")
    await writer.write(pod, "[]", keep_trying=True)
    assert written(server) == "[]"


async def test_put_never_lands_on_another_incarnation(server, writer, metrics):
    server.fail(403, times=float("inf"), method="PATCH")
    pod = declare(server)
    server.add_pod(uid="99999999-2222-3333-4444-555555555555")
    with pytest.raises(StatusWriteError, match="created anew"):
        await writer.write(pod, "[]", keep_trying=True)
    assert written(server) is None
    assert (server.count("PUT"), writer.pending) == (0, 0)


async def test_put_of_a_pod_that_has_gone(server, writer):
    server.fail(403, times=float("inf"), method="PATCH")
    pod = declare(server)
    server.delete("pods", "web", "web-1")
    with pytest.raises(StatusWriteError, match="has gone"):
        await writer.write(pod, "[]", keep_trying=True)
    assert (server.count("PUT"), writer.pending) == (0, 0)


async def test_an_answer_that_is_no_pod_is_not_written_back(server, impatient):
    server.fail(403, times=float("inf"), method="PATCH")
    pod = declare(server)
    server.objects["pods"]["web", "web-1"] = {"metadata": None}
    with pytest.raises(StatusWriteError, match="not a pod"):
        await impatient.write(pod, "[]", keep_trying=False)
    assert server.count("PUT") == 0
