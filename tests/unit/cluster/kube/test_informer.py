import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube import client as client_module
from multus_daemon.cluster.kube import informer as module
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.errors import ApiUnavailableError, GoneError, KubeError
from multus_daemon.cluster.kube.informer import Informer
from multus_daemon.metrics import Metrics
from multus_daemon.spec.cni.errors import parted
from multus_daemon.spec.nad import selection
from tests.aside import running
from tests.counted import counted
from tests.waiting import eventually

KEY = ("web", "web-1")


@pytest.fixture(autouse=True)
def retry(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.01, 0.05))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(module, "SHORT_SECONDS", 0)


@pytest.fixture
def pods(client, gates, metrics):
    return Informer(client, objects.pods_of("node-a"), gates, metrics=metrics)


@pytest.fixture
async def watched(server, pods):
    """The pods are listed, and the watch is open."""
    async with running(pods.run()):
        await eventually(lambda: server.watches)
        yield pods


@pytest.fixture
def networks(client, gates, metrics):
    return Informer(client, objects.networks(), gates, metrics=metrics)


# --- lists ---


@pytest.mark.weak_spot(40)
async def test_only_pods_of_the_node_and_only_what_is_needed(server, pods, gates):
    annotations = {"a/b": "c", "kubectl.kubernetes.io/last-applied-configuration": "x" * 1000}
    server.add_pod(annotations=annotations)
    server.add_pod("web-2", node="node-b")
    assert gates.closed["pods"] == "not started"
    async with running(pods.run()):
        await pods.synced.wait()
        assert len(pods) == 1
        assert pods.get(KEY).annotations == {"a/b": "c"}
        assert pods.get(KEY).uid == server.get("pods", *KEY)["metadata"]["uid"]
        assert "pods" not in gates.closed
        assert server.count("GET", "fieldSelector=spec.nodeName%3Dnode-a") == len(server.requests)
        assert server.count("GET", "resourceVersion=0") == 1


async def test_pages(server, networks):
    networks._resource = replace(networks._resource, page_size=10)
    for number in range(35):
        server.add_network(f"net{number}", config=json.dumps({"type": "ptp", "n": number}))
    async with running(networks.run()):
        await networks.synced.wait()
        assert len(networks) == 35
        assert json.loads(networks.get(("web", "net34")).config)["n"] == 34
    assert server.count("GET", "continue=") == 3
    assert server.count("GET", "resourceVersion=0") == 0


async def test_a_page_that_has_expired_begins_again(server, networks):
    networks._resource = replace(networks._resource, page_size=2)
    for number in range(4):
        server.add_network(f"net{number}")
    server.fail(410, contains="continue=")
    with pytest.raises(GoneError):
        await networks.sync_once()
    assert not networks.synced.is_set()
    async with running(networks.run()):
        await networks.synced.wait()
        assert len(networks) == 4


async def test_one_bad_object_does_not_hide_the_others(server, networks, metrics, caplog):
    server.add_network("good")
    server.put(selection.PLURAL, {"metadata": {"namespace": "web", "name": "bad"}, "spec": {"config": 5}})
    server.put(selection.PLURAL, {"metadata": {"namespace": "web", "name": "none"}})
    async with running(networks.run()):
        await networks.synced.wait()
        assert networks.get(("web", "good"))
        assert networks.get(("web", "none")).config == ""
        assert networks.get(("web", "bad")) is None
        await eventually(lambda: server.watches)
        server.put(selection.PLURAL, {"metadata": {"namespace": "web", "name": "bad"}, "spec": []})
        server.add_network("later")
        await eventually(lambda: networks.get(("web", "later")))
    assert "web/bad" in caplog.text


class ListsOnly:
    """The part of a client that opens watches, where a test comes to none."""

    async def turn(self) -> None:
        pass

    def lines(self, *_: Any, **__: Any) -> AsyncGenerator[bytes, None]:
        raise AssertionError("no watch is opened")


@pytest.mark.parametrize("answer", ["<html>login</html>", "{}", "[]", '{"metadata": {}, "items": 5}'])
async def test_an_answer_that_is_no_list(gates, answer):
    class Client(ListsOnly):
        async def request(self, *_, **__):
            return answer.encode()

    with pytest.raises(ApiUnavailableError, match="not that of a Kubernetes API server"):
        await Informer(Client(), objects.networks(), gates, Metrics()).sync_once()  # type: ignore[arg-type]  # it lists, as a client does


# --- watches ---


async def test_changes(server, watched, metrics):
    server.add_pod()
    await eventually(lambda: watched.get(KEY))
    first = watched.get(KEY).uid
    server.add_pod(annotations={"a": "b"})
    await eventually(lambda: watched.get(KEY).annotations == {"a": "b"})
    server.add_pod("web-2", node="node-b")
    server.delete("pods", *KEY)
    await eventually(lambda: watched.get(KEY) is None)
    assert watched.deleted_uid(KEY) == first
    server.add_pod()
    await eventually(lambda: watched.get(KEY))
    assert watched.deleted_uid(KEY) is None
    assert len(watched) == 1
    assert server.count("GET", "limit=") == 1


async def test_a_watch_goes_on_where_the_last_one_ended(server, watched):
    server.skip_versions(1000)
    server.bookmark()
    await asyncio.sleep(0.02)
    server.cut_watches()
    await eventually(lambda: server.count("GET", "watch=true") == 2 and server.watches)
    server.add_pod()
    await eventually(lambda: watched.get(KEY))
    assert server.requests[-1][1].count("resourceVersion=1100") == 1
    assert "allowWatchBookmarks=true" in server.requests[-1][1]
    assert server.count("GET", "limit=") == 1


@pytest.mark.parametrize("rest", [b'{"type": "ADDED", "obj', b"nonsense\n", b'{"type": 5}\n', b'{"type":"ADDED"}\n'])
async def test_a_watch_cut_within_a_line(server, watched, rest, metrics):
    server.cut_watches(rest)
    await eventually(lambda: server.count("GET", "watch=true") == 2 and server.watches)
    server.add_pod()
    await eventually(lambda: watched.get(KEY))
    assert watched.connected
    assert counted(metrics.informer_errors, resource="pods") == 1
    assert server.count("GET", "limit=") == 1


async def test_changes_while_the_watch_is_down(server, pods):
    server.add_pod()
    async with running(pods.run()):
        await eventually(lambda: server.watches)
        await server.stop()
        await eventually(lambda: not pods.connected)
        assert pods.get(KEY)
        assert pods.stale_seconds < 5
        server.delete("pods", *KEY)
        server.add_pod("web-2")
        await server.start()
        await eventually(lambda: pods.get(("web", "web-2")) and not pods.get(KEY))
        assert pods.stale_seconds == 0
    assert server.count("GET", "limit=") == 1


async def test_what_is_known_ages_from_the_last_word(server, watched):
    await asyncio.sleep(0.01)
    before = time.monotonic()
    server.add_pod()
    await eventually(lambda: watched.get(KEY))
    await server.stop()
    await eventually(lambda: not watched.connected)
    # Metrics are rendered like this, in a thread without an event loop.
    stale = await asyncio.to_thread(lambda: watched.stale_seconds)
    assert 0 < stale < time.monotonic() - before


async def test_410_lists_again(server, pods, metrics):
    server.add_pod()
    server.add_pod("web-3")
    async with running(pods.run()):
        await eventually(lambda: server.watches)
        gone = pods.get(KEY).uid
        server.silent = True
        server.delete("pods", *KEY)
        server.add_pod("web-2")
        server.compact()
        server.silent = False
        kept = pods.get(("web", "web-3"))
        server.cut_watches(b"{")
        await eventually(lambda: server.count("GET", "limit=") == 2 and server.watches)
        assert pods.get(("web", "web-2"))
        assert pods.get(KEY) is None
        assert pods.deleted_uid(KEY) == gone
        # An unchanged object is not kept twice.
        assert pods.get(("web", "web-3")) is kept
    # From memory only the first time: that may be older than what is known.
    assert server.count("GET", "resourceVersion=0") == 1


async def test_410_as_status_lists_again(server, watched):
    server.fail(410, contains="watch=true")
    server.cut_watches(b"{")
    await eventually(lambda: server.count("GET", "limit=") == 2)


async def test_a_restored_backup_lists_again(server, watched):
    server.skip_versions(-50)
    server.cut_watches(b"{")
    await eventually(lambda: server.count("GET", "limit=") == 2 and server.watches)
    server.add_pod()
    await eventually(lambda: watched.get(KEY))


async def test_a_silent_connection_is_given_up(server, pods, monkeypatch):
    monkeypatch.setattr(deadlines, "INFORMER_INACTIVITY_SECONDS", 0.05)
    async with running(pods.run()):
        await eventually(lambda: server.watches)
        server.silent = True
        server.add_pod()
        await eventually(lambda: "nothing heard within 0.05 s" in pods.problem)
        server.silent = False
        await eventually(lambda: pods.get(KEY))


async def test_a_server_that_ends_each_watch_is_given_a_rest(server, pods, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(module, "SHORT_SECONDS", 1)
    async with running(pods.run()):
        for _ in range(4):
            await eventually(lambda: server.watches)
            server.cut_watches()
            await eventually(lambda: not server.watches)
        began, before = time.monotonic(), server.count("GET", "watch=true")
        while time.monotonic() - began < 0.5:
            server.cut_watches()
            await asyncio.sleep(0.005)
        assert server.count("GET", "watch=true") - before <= 12


async def test_unknown_events_are_passed_over(server, watched):
    server.send_on_watches(b'{"type": "FUTURE", "object": {}}\n')
    server.add_pod()
    await eventually(lambda: watched.get(KEY))
    assert server.count("GET", "watch=true") == 1


# --- failures ---


async def test_a_right_that_is_missing_is_named_with_the_role_that_lacks_it(server, networks, gates):
    server.fail(403, times=float("inf"), contains="network-attachment-definitions")
    async with running(networks.run()):
        await eventually(lambda: "403" in gates.closed["networks"])
        cause, remedy = parted(gates.closed["networks"])
    assert "network-attachment-definitions" in cause
    assert "ClusterRole is multus-daemon" in remedy


@pytest.mark.weak_spot(56)
async def test_api_down_at_the_start(tmp_path, server, gates, caplog, metrics, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "STABLE_SECONDS", 0)
    config = server.kubeconfig(tmp_path / "k")
    await server.stop()
    connected = []
    async with ApiClient(Kubeconfig(config)) as client:
        pods = Informer(
            client,
            objects.pods_of("node-a"),
            gates,
            metrics=metrics,
            on_connected=lambda: connected.append(1),
        )
        assert pods.stale_seconds == float("inf")
        async with running(pods.run()):
            await eventually(lambda: counted(metrics.informer_errors, resource="pods") > 3)
            assert "GET /api/v1/pods" in gates.closed["pods"]
            assert not pods.connected
            assert not connected
            server.add_pod()
            await server.start()
            await pods.synced.wait()
            assert pods.get(KEY)
            assert "pods" not in gates.closed
            assert connected == [1]
            await server.stop()
            await eventually(lambda: not pods.connected)
            # The node can serve what it knows: it stays ready.
            assert "pods" not in gates.closed
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2


async def test_pauses_grow_and_are_bounded(gates, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.5, 20.0))
    pauses: list[float] = []

    class Client(ListsOnly):
        async def request(self, *_, **__):
            raise ApiUnavailableError(
                "away", retry_after=12 if len(pauses) == 20 else 500 if len(pauses) > 20 else None
            )

    informer = Informer(Client(), objects.networks(), gates, Metrics())  # type: ignore[arg-type]  # as above

    async def pause(seconds, woken):
        woken.close()
        pauses.append(seconds)
        if len(pauses) == 22:
            raise asyncio.CancelledError

    monkeypatch.setattr(module, "at_most", pause)
    with pytest.raises(asyncio.CancelledError):
        await informer.run()
    assert 0.25 <= pauses[0] <= 0.75
    assert all(seconds <= 30 for seconds in pauses)
    assert all(seconds >= 10 for seconds in pauses[6:20])
    assert pauses[20] >= 12
    assert pauses[21] >= 20


async def test_poke_ends_no_pause_after_a_bad_answer(server, pods, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", (30, 30))
    server.fail(500, times=1)
    async with running(pods.run()):
        await eventually(lambda: pods.problem.startswith("GET"))
        for _ in range(20):
            pods.poke()
            await asyncio.sleep(0.005)
    assert server.count("GET") == 1


async def test_a_list_that_is_too_long_is_asked_for_in_smaller_pages(server, pods, monkeypatch):
    monkeypatch.setattr(client_module, "ANSWER_MAX_BYTES", 4096)
    for number in range(12):
        server.add_pod(f"web-{number}", annotations={"a": "x" * 1500})
    async with running(pods.run()):
        await pods.synced.wait()
        assert len(pods) == 12
    assert server.count("GET", "limit=500") == 1
    assert server.count("GET", "resourceVersion=0") == 1


async def test_poke_ends_a_pause(server, pods, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", (30, 30))
    await server.stop()
    async with running(pods.run()):
        await eventually(lambda: pods.problem.startswith("GET"))
        await server.start()
        pods.poke()
        await pods.synced.wait()
        pods.poke()


async def test_a_bug_is_not_swallowed(gates):
    class Client(ListsOnly):
        async def request(self, *_, **__):
            raise TypeError("bug")

    with pytest.raises(TypeError):
        await Informer(Client(), objects.networks(), gates, Metrics()).run()  # type: ignore[arg-type]  # as above


# --- waiting ---


async def test_wait_for_is_woken_by_the_event(server, watched):
    task = asyncio.create_task(watched.wait_for(KEY, lambda pod: pod.annotations.get("ready") == "yes", 5))
    server.add_pod()
    await eventually(lambda: watched.get(KEY))
    assert not task.done()
    server.add_pod(annotations={"ready": "yes"})
    assert (await task).annotations == {"ready": "yes"}
    assert await watched.wait_for(KEY, lambda pod: True, 0) is watched.get(KEY)
    assert not watched._waiting


async def test_wait_for_is_woken_by_a_list(server, pods):
    server.add_pod()
    task = asyncio.create_task(pods.wait_for(KEY, lambda pod: True, 5))
    await asyncio.sleep(0)
    async with running(pods.run()):
        assert (await task).name == "web-1"


async def test_wait_for_ends(server, pods):
    assert await pods.wait_for(KEY, lambda pod: True, 0.02) is None
    async with running(pods.run()):
        await eventually(lambda: server.watches)
        server.add_pod()
        await eventually(lambda: pods.get(KEY))
        task = asyncio.create_task(pods.wait_for(KEY, lambda pod: pod.annotations == {"last": "1"}, 5))
        await asyncio.sleep(0)
        server.add_pod(annotations={"last": "1"})
        server.delete("pods", *KEY)
        await task
        cancelled = asyncio.create_task(pods.wait_for(KEY, lambda pod: True, 5))
        await asyncio.sleep(0)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
    assert not pods._waiting


@pytest.mark.parametrize(
    ("types", "found"), [(["ADDED", "MODIFIED", "DELETED"], "1"), (["DELETED", "DELETED", "ADDED"], None)]
)
async def test_who_waits_is_answered_once(gates, types, found):
    """Several events that would do arrive together, before the one who waits has its turn."""

    class Client(ApiClient):
        def __init__(self):
            pass

        async def turn(self):
            pass

        async def request(self, *_, **__):
            return b'{"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []}'

        async def lines(self, path, query, *, inactivity=0.0, on_open=lambda: None):
            on_open()
            for number, kind in enumerate(types, 1):
                metadata = {"namespace": "web", "name": "web-1", "uid": "u", "annotations": {"n": str(number)}}
                yield json.dumps({"type": kind, "object": {"metadata": metadata}}).encode()

    pods = Informer(Client(), objects.pods_of("node-a"), gates, Metrics())
    task = asyncio.create_task(pods.wait_for(KEY, lambda pod: True, 5))
    await asyncio.sleep(0)
    await pods.sync_once()
    answer = await task
    assert (answer and answer.annotations["n"]) == found


async def test_few_deletions_are_remembered(server, pods):
    pods._deleted._most = 3
    async with running(pods.run()):
        await eventually(lambda: server.watches)
        for number in range(5):
            server.add_pod(f"p{number}")
            server.delete("pods", "web", f"p{number}")
        await eventually(lambda: pods.deleted_uid(("web", "p4")))
        assert [pods.deleted_uid(("web", f"p{number}")) is None for number in range(5)] == [True, True, *[False] * 3]


async def test_sync_once_is_finite(server, pods):
    task = asyncio.create_task(pods.sync_once())
    await eventually(lambda: server.watches)
    server.cut_watches(b"{")
    with pytest.raises(KubeError):
        await task


# --- what is reported ---


async def test_each_change_is_reported_once_also_after_a_new_list(server, pods):
    reported = []
    pods.changed = lambda pod: reported.append((pod.name, pod.annotations.get("a")))
    server.add_pod(annotations={"a": "1"})
    server.add_pod("web-2", annotations={"a": "1"})
    async with running(pods.run()):
        await eventually(lambda: len(reported) == 2)
        server.add_pod(annotations={"a": "2"})
        await eventually(lambda: len(reported) == 3)
        # What the daemon does not read is no change.
        server.add_pod("web-2", annotations={"a": "1"}, uid=pods.get(("web", "web-2")).uid, labels={"b": "c"})
        server.skip_versions(5)
        server.cut_watches()
        server.compact()
        server.add_pod("web-3", annotations={"a": "1"})
        await eventually(lambda: len(reported) == 4)
    assert reported[0:2] in ([("web-1", "1"), ("web-2", "1")], [("web-2", "1"), ("web-1", "1")])
    assert reported[2:] == [("web-1", "2"), ("web-3", "1")]


async def test_the_end_of_an_object_is_reported_also_by_a_new_list(server, pods):
    gone = []
    pods.gone = lambda pod: gone.append(pod.name)
    for name in ("web-1", "web-2", "web-3"):
        server.add_pod(name)
    async with running(pods.run()):
        await eventually(lambda: pods.get(("web", "web-3")))
        server.delete("pods", "web", "web-1")
        await eventually(lambda: gone == ["web-1"])
        server.silent = True
        server.delete("pods", "web", "web-2")
        server.silent = False
        server.skip_versions(5)
        server.cut_watches()
        server.compact()
        await eventually(lambda: gone == ["web-1", "web-2"])
    assert pods.get(("web", "web-3"))


async def test_a_fault_of_the_one_who_is_told_does_not_end_the_watch(server, pods, caplog):
    def fail(pod):
        raise ZeroDivisionError(pod.name)

    pods.changed = fail
    server.add_pod()
    async with running(pods.run()):
        await eventually(lambda: pods.get(KEY))
        server.add_pod("web-2")
        await eventually(lambda: pods.get(("web", "web-2")))
        assert pods.connected
    assert caplog.text.count("could not be processed") == 2
