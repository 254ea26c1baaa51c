import asyncio
import time
from dataclasses import replace

import pytest

from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.store import KubeStore
from multus_daemon.deadlines import EVENT_KEEP_TRYING_SECONDS
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.recent import Recent
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.network_status import ANNOTATION
from multus_daemon.spec.ports import NetworkNotFoundError, PodNotFoundError, StoreUnavailableError
from tests.aside import running
from tests.waiting import eventually

OTHER = "99999999-2222-3333-4444-555555555555"


def args(name: str = "web-1", uid: str = "", namespace: str = "web") -> tuple[Namespace, PodName, PodUid]:
    return Namespace(namespace), PodName(name), PodUid(uid)


def live(server, what):
    return server.count("GET", f"/namespaces/web/{what}")


@pytest.fixture
def quick(store):
    store._pod_patience = store._unsynced_patience = 0.05
    return store


# --- pods ---


async def test_what_is_not_known_of_a_pod_is_told_without_a_wait(server, store):
    """The same holds for another incarnation of the pod, which the watch is about to report."""
    server.add_pod()
    await eventually(lambda: store.pods.get(("web", "web-1")))
    before = len(server.requests)
    assert store.known_pod(*args(uid=OTHER)) is None
    assert store.known_pod(*args("web-2")) is None
    assert store.networks.get(("web", "net1")) is None
    assert len(server.requests) == before


async def test_what_a_pod_asks_for_is_told_as_text(server, store):
    """So that pods of one template are known by it, before anybody has read what it means."""
    annotations = {selection.NETWORKS_ANNOTATION: "net1, net2", selection.DEFAULT_NETWORK_ANNOTATION: "cluster"}
    server.add_pod(annotations=annotations)
    await eventually(lambda: store.pods.get(("web", "web-1")))
    pod = names.kubernetes_args("K8S_POD_NAMESPACE=web;K8S_POD_NAME=web-1")
    assert store.asked_networks(pod) == "cluster\nnet1, net2"
    assert store.asked_networks(replace(pod, uid=PodUid(OTHER))) == ""
    assert store.asked_networks(names.kubernetes_args("")) == ""


@pytest.mark.weak_spot(37)
@pytest.mark.conformance("verbs-19")
async def test_add_before_the_watch_event(server, store):
    store._pod_patience = 60
    task = asyncio.create_task(store.pod(*args()))
    await asyncio.sleep(0.05)
    uid = server.add_pod()["metadata"]["uid"]
    assert (await task).uid == uid
    assert not live(server, "pods")


async def test_add_before_the_event_of_the_new_incarnation(server, store):
    store._pod_patience = 60
    server.add_pod()
    await eventually(lambda: store.pods.get(("web", "web-1")))
    task = asyncio.create_task(store.pod(*args(uid=OTHER)))
    await asyncio.sleep(0.02)
    server.add_pod(uid=OTHER)
    assert (await task).uid == OTHER
    assert not live(server, "pods")


async def test_one_live_get_where_no_event_comes(server, quick):
    server.silent = True
    uid = server.add_pod()["metadata"]["uid"]
    assert (await quick.pod(*args(uid=uid))).uid == uid
    assert live(server, "pods") == 1


@pytest.mark.weak_spot(37)
async def test_a_live_get_may_take_its_time(server, quick):
    """Upstream gives it 50 ms."""
    server.silent = True
    uid = server.add_pod()["metadata"]["uid"]
    server.delay = 0.5
    assert (await quick.pod(*args(uid=uid))).uid == uid


async def test_deleted_pod_is_not_waited_for(server, store):
    uid = server.add_pod()["metadata"]["uid"]
    await eventually(lambda: store.pods.get(("web", "web-1")))
    server.delete("pods", "web", "web-1")
    await eventually(lambda: not store.pods.get(("web", "web-1")))
    for asked in (uid, ""):
        with pytest.raises(PodNotFoundError):
            await store.pod(*args(uid=asked))
    assert live(server, "pods") == 2
    # Its successor is.
    task = asyncio.create_task(store.pod(*args(uid=OTHER)))
    await asyncio.sleep(0.02)
    server.add_pod(uid=OTHER)
    assert (await task).uid == OTHER


async def test_pod_deleted_while_waited_for(server, store):
    store._pod_patience = 60
    server.add_pod()
    await eventually(lambda: store.pods.get(("web", "web-1")))
    task = asyncio.create_task(store.pod(*args(uid=OTHER)))
    await asyncio.sleep(0.02)
    server.silent = True
    server.add_pod(uid=OTHER)
    server.silent = False
    server.delete("pods", "web", "web-1")
    with pytest.raises(PodNotFoundError):
        async with asyncio.timeout(30):
            await task


@pytest.mark.conformance("e2e-3")
async def test_static_pods(server, store):
    """The kubelet's UID is a hash, the API's that of the mirror."""
    server.add_pod(annotations={"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "h4sh"})
    await eventually(lambda: store.pods.get(("web", "web-1")))
    found = await store.pod(*args(uid="h4sh"))
    assert found.is_static
    assert found.uid != "h4sh"


async def test_api_away(server, quick):
    uid = server.add_pod()["metadata"]["uid"]
    await eventually(lambda: quick.pods.get(("web", "web-1")))
    await server.stop()
    await eventually(lambda: not quick.pods.connected)
    assert (await quick.pod(*args(uid=uid))).uid == uid
    with pytest.raises(StoreUnavailableError, match="pod web/web-2: the API server can't be asked"):
        await quick.pod(*args("web-2"))
    with pytest.raises(StoreUnavailableError, match="NetworkAttachmentDefinition web/net1: "):
        await quick.network("web", "net1")
    await server.start()


@pytest.mark.parametrize(("status", "match"), [(403, "refuses"), (503, "can't be asked")])
async def test_refusals(server, quick, status, match):
    server.fail(status, times=2, contains="/namespaces/")
    with pytest.raises(StoreUnavailableError, match=match):
        await quick.pod(*args())
    with pytest.raises(StoreUnavailableError, match=match):
        await quick.network("web", "net1")


async def test_an_object_that_is_none(server, quick):
    server.put("network-attachment-definitions", {"metadata": {"namespace": "web", "name": "n"}, "spec": {"config": 5}})
    with pytest.raises(StoreUnavailableError, match="can't be decoded"):
        await quick.network("web", "n")


async def test_api_down_at_the_start(server, tmp_path, gates):
    """Everything can be made, says why it can't answer, and works once the API is there."""
    config = server.kubeconfig(tmp_path / "k")
    await server.stop()
    async with ApiClient(Kubeconfig(config)) as client:
        store = KubeStore(client, "node-a", gates)
        store._unsynced_patience = store._lookup._patience = 0.05
        async with running(store.run()):
            with pytest.raises(StoreUnavailableError):
                await store.pod(*args())
            with pytest.raises(StoreUnavailableError):
                await store.network("web", "net1")
            store.events.event(Pod(*args(uid="u")), "Normal", "R", "m")
            server.add_pod()
            server.add_network()
            await server.start()
            # The live GET does this, and also ends the informers' pauses.
            assert await store.pod(*args())
            assert await store.network("web", "net1")
            await eventually(lambda: not gates.closed)


@pytest.mark.parametrize("name", ["", "..", "../secrets", "A", "a/b", "a?watch=1", "a" * 254])
async def test_names_that_nothing_can_have_are_not_asked_for(server, store, name):
    before = len(server.requests)
    for namespace, item in (("web", name), (name, "x")):
        with pytest.raises(PodNotFoundError):
            await store.pod(*args(item, namespace=namespace))
        with pytest.raises(NetworkNotFoundError):
            await store.network(namespace, item)
    assert len(server.requests) == before


# --- networks ---


async def test_network_that_the_watch_has_not_told_of(server, store):
    server.silent = True
    server.add_network()
    assert await store.network("web", "net1")
    assert live(server, "network-attachment-definitions") == 1


async def test_an_absent_network_is_asked_for_once_at_a_time(server, store):
    results = await asyncio.gather(*[store.network("web", "net1") for _ in range(20)], return_exceptions=True)
    assert {type(result) for result in results} == {NetworkNotFoundError}
    assert live(server, "network-attachment-definitions") == 1
    server.add_network()
    await eventually(lambda: store.networks.get(("web", "net1")))
    assert await store.network("web", "net1")
    for _ in range(2):
        with pytest.raises(NetworkNotFoundError):
            await store.network("web", "net2")
    assert live(server, "network-attachment-definitions/net2") == 2
    assert live(server, "network-attachment-definitions") == 3


async def test_network_asked_for_before_the_first_list(server, client, gates, monkeypatch):
    server.add_network()
    store = KubeStore(client, "node-a", gates)
    store._lookup._patience = 60
    task = asyncio.create_task(store.network("web", "net1"))
    await asyncio.sleep(0)
    async with running(store.run()):
        assert await task
    assert not live(server, "network-attachment-definitions/net1")


# --- the warm path ---


async def test_an_add_on_a_warm_cache_is_one_patch_and_one_event(server, store):
    uid = server.add_pod()["metadata"]["uid"]
    server.add_network()
    await eventually(lambda: store.pods.get(("web", "web-1")) and store.networks.get(("web", "net1")))
    before = len(server.requests)
    pod = await store.pod(*args(uid=uid))
    await store.network("web", "net1")
    await store.statuses.write(pod, "[]", keep_trying=True)
    for name in ("eth0", "net1", "net2"):
        store.events.event(pod, "Normal", "AddedInterface", f"Add {name} [10.1.0.2/24] from web/{name}")
    await eventually(lambda: server.objects["events"])
    await asyncio.sleep(0.2)
    assert [method for method, _ in server.requests[before:]] == ["PATCH", "POST"]


@pytest.mark.weak_spot(45)
async def test_writing_a_status_leaves_what_the_watch_told(server, store):
    """It is the watch alone that changes what is remembered of a pod."""
    uid = server.add_pod(annotations={"a/b": "c"})["metadata"]["uid"]
    await eventually(lambda: store.pods.get(("web", "web-1")))
    server.silent = True
    pod = await store.pod(*args(uid=uid))
    await store.statuses.write(pod, "[]", keep_trying=True)
    assert server.get("pods", "web", "web-1")["metadata"]["annotations"] == {"a/b": "c", ANNOTATION: "[]"}
    assert await store.pod(*args(uid=uid)) is pod
    assert pod.annotations == {"a/b": "c"}


async def test_drain(server, client, gates):
    store = KubeStore(client, "node-a", gates)
    pod = Pod(*args(uid=server.add_pod()["metadata"]["uid"]))
    store.events.event(pod, "Normal", "R", "m")
    await store.drain(5)
    assert server.objects["events"]
    await server.stop()
    store.events.event(pod, "Normal", "R", "n")
    began = time.monotonic()
    await store.drain(0.2)
    assert time.monotonic() - began < EVENT_KEEP_TRYING_SECONDS / 2


async def test_a_bug_in_one_task_ends_all(client, gates, monkeypatch):
    store = KubeStore(client, "node-a", gates)

    async def broken():
        raise TypeError("bug")

    monkeypatch.setattr(store.events, "run", broken)
    with pytest.raises(ExceptionGroup) as caught:
        await store.run()
    assert caught.group_contains(TypeError)


# --- the pods of the node ---


async def test_pods_of_the_node_are_told_while_changes_are_heard_of(server, store):
    server.add_pod()
    server.add_pod("web-2", node="node-b")
    await eventually(lambda: store.pods.get(("web", "web-1")))
    assert [str(pod) for pod in await store.node_pods()] == ["web/web-1"]
    await server.stop()
    await eventually(lambda: not store.pods.connected)
    with pytest.raises(StoreUnavailableError, match="pods of this node"):
        await store.node_pods()


async def test_pods_of_the_node_are_not_told_before_they_are_listed(client, gates):
    with pytest.raises(StoreUnavailableError, match="not started"):
        await KubeStore(client, "node-a", gates).node_pods()


async def test_the_phase_follows(server, store):
    pod = server.add_pod()
    await eventually(lambda: store.pods.get(("web", "web-1")))
    server.put("pods", pod | {"status": {"phase": "Running"}})
    await eventually(lambda: store.pods.get(("web", "web-1")).phase == "Running")


# --- running pods ---


async def test_the_labels_of_a_namespace_are_asked_for_once_a_minute(server, store):
    server.labels["web"] = {"multus.io/hotplug": "true"}
    for _ in range(3):
        assert await store.namespace_labels("web") == {"multus.io/hotplug": "true"}
        assert await store.namespace_labels("none") == {}
    assert [server.count("GET", f"/namespaces/{name}") for name in ("web", "none")] == [1, 1]
    server.labels["web"] = {}
    store._labels = Recent(10, seconds=0.0)
    assert await store.namespace_labels("web") == {}
    server.labels["web"] = {"a": "b"}
    assert await store.namespace_labels("web") == {"a": "b"}


@pytest.mark.parametrize(("status", "words"), [(403, "ClusterRole"), (503, "")])
async def test_labels_that_can_not_be_read(server, store, status, words):
    server.fail(status, times=1, method="GET", contains="/namespaces/web")
    with pytest.raises(StoreUnavailableError, match="namespace web") as caught:
        await store.namespace_labels("web")
    assert words in caught.value.advice
    # A failure is not remembered.
    server.add_pod()
    assert await store.namespace_labels("web") == {}


@pytest.mark.parametrize(("phase", "serves"), [("Pending", True), ("Running", True), ("Failed", False), ("", False)])
async def test_the_controller_of_upstream_is_seen(server, store, phase, serves):
    spec = {
        "nodeName": "node-a",
        "containers": [{"image": "quay.io/x/multus-dynamic-networks-controller@sha256:0"}],
        "volumes": [{"name": "s", "hostPath": {"path": "/run/multus/multus.sock"}}],
    }
    metadata = {"namespace": "kube-system", "name": "c-1"}
    server.put("pods", {"metadata": metadata, "spec": spec, "status": {"phase": phase}})
    await eventually(lambda: store.pods.get(("kube-system", "c-1")))
    assert store.hotplug_controller() == ("kube-system/c-1" if serves else "")
    reported = []
    store.watch_pods(lambda pod: reported.append(pod.name))
    server.delete("pods", "kube-system", "c-1")
    await eventually(lambda: reported == ["c-1", "c-1"])
    assert not store.hotplug_controller()


async def test_a_daemon_does_not_write_the_condition_that_an_earlier_one_wrote(server, store, client):
    server.add_pod()
    await eventually(lambda: store.pods.get(("web", "web-1")))
    pod = await store.pod(*args())
    store.conditions.put_condition(pod, ready=True, reason="NetworksAttached", message="")
    await eventually(lambda: store.pods.get(("web", "web-1")).networks_ready)
    patches = server.count("PATCH")
    assert patches == 1
    later = KubeStore(client, "node-a", Gates())
    async with running(later.run()):
        await eventually(lambda: later.pods.get(("web", "web-1")))
        later.conditions.put_condition(pod, ready=True, reason="NetworksAttached", message="")
        other = Pod(pod.namespace, pod.name, PodUid(OTHER))
        later.conditions.put_condition(other, ready=True, reason="NetworksAttached", message="")
        # The one of another incarnation is refused; both are done then.
        await eventually(lambda: server.count("PATCH") == 2)
        await eventually(lambda: not later.conditions._pending)
    assert server.count("PATCH") == 2
