"""Every implementation of `ports.ClusterStore` behind one harness, which declares things and reads what was written.

The tests are on an event loop, as the stores of the loop and their API server are. So each call of a `ClusterStore`,
which blocks, is in a thread of its own, as a request's is; and it comes back to the loop by a portal.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pathlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

import pytest
import yaml

from multus_daemon import deadlines
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.store import Cluster, KubeStore
from multus_daemon.cluster.standalone import status_file
from multus_daemon.cluster.standalone.store import StandaloneStore
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad import network_status, selection
from multus_daemon.spec.nad.selection import GROUP, KIND, VERSION, NetworkAttachmentDefinition
from multus_daemon.spec.ports import ClusterStore, Events
from tests.aside import running
from tests.fakes.apiserver import NETWORKS, PODS, FakeApiServer
from tests.fakes.cluster import FakeClusterStore
from tests.waiting import eventually

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Blocking `work` as a request's thread does it."""
    return await portal.run(Deadline(), functools.partial(work, *args, **kwargs))


Condition = tuple[bool, str, str]
"""Ready, reason, message."""


def condition_in(pod: Mapping[str, Any]) -> Condition | None:
    """The condition `multus.io/NetworksReady` of a pod of the API."""
    for item in pod.get("status", {}).get("conditions") or ():
        if item["type"] == selection.NETWORKS_READY:
            return item["status"] == "True", item["reason"], item.get("message", "")
    return None


class Store(Events, Protocol):
    """A `ports.ClusterStore` as the tests call it."""

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """See `ports.ClusterStore`, as for the others."""

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition: ...

    async def node_pods(self) -> list[Pod]: ...

    async def namespaces_with_network(self, name: str) -> list[str]: ...

    async def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None: ...

    async def namespace_labels(self, name: str) -> Mapping[str, str]: ...

    async def hotplug_controller(self) -> str: ...

    async def condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None: ...


class Blocking:
    """A `Store` over one that blocks."""

    def __init__(self, store: ClusterStore, events: Events) -> None:
        """`events`: who takes them in the end, asked at once, so that a failure is seen here."""
        self._store = store
        self._events = events

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        return await in_thread(self._store.pod, namespace, name, uid)

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        return await in_thread(self._store.network, namespace, name)

    async def node_pods(self) -> list[Pod]:
        return await in_thread(self._store.node_pods)

    async def namespaces_with_network(self, name: str) -> list[str]:
        return await in_thread(self._store.namespaces_with_network, name)

    async def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        await in_thread(functools.partial(self._store.write_network_status, keep_trying=keep_trying), pod, value)

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        return await in_thread(self._store.namespace_labels, name)

    async def hotplug_controller(self) -> str:
        return await in_thread(self._store.hotplug_controller)

    async def condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        put = functools.partial(self._store.condition, ready=ready, reason=reason, message=message)
        await in_thread(put, pod)

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        self._events.event(pod, kind, reason, message)

    def node_event(self, kind: str, reason: str, message: str) -> None:
        self._events.node_event(kind, reason, message)


def of_the_loop(store: KubeStore) -> Store:
    """The `Store` over that of the event loop, by the way that the engine goes."""
    return Blocking(Cluster(store, LoopPortal()), store.events)


class StoreHarness(Protocol):
    """A store, and the other side of it."""

    @property
    def store(self) -> Store:
        """The store itself."""

    async def put_pod(self, pod: Pod) -> Pod:
        """Declare the pod, in place of one of the same name; the store knows when this returns.

        What was declared: a real API server gives it a UID of its own choice.
        """

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        """Declare the network likewise."""

    async def remove_pod(self, pod: Pod) -> None:
        """Withdraw the pod; the store knows when this returns."""

    async def read_status(self, pod: Pod) -> str | None:
        """The network-status as others see it."""

    async def read_condition(self, pod: Pod) -> Condition | None:
        """The condition `multus.io/NetworksReady` as others see it."""

    async def put_labels(self, namespace: str, labels: Mapping[str, str]) -> None:
        """Give the namespace these labels; the store knows when this returns."""

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        """Have the store report changed pods."""


class FakeHarness:
    """`watch_pods` is not a part of the port, and the fake has none: what it would report is reported here."""

    def __init__(self) -> None:
        self._fake = FakeClusterStore()
        self._callback: Callable[[Pod], None] = lambda _: None
        self.store = Blocking(self._fake, self._fake)

    async def put_pod(self, pod: Pod) -> Pod:
        if self._fake.pods.get((pod.namespace, pod.name)) != pod:
            self._callback(pod)
        self._fake.put_pod(pod)
        return pod

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        self._fake.put_network(network)

    async def remove_pod(self, pod: Pod) -> None:
        del self._fake.pods[pod.namespace, pod.name]

    async def read_status(self, pod: Pod) -> str | None:
        return self._fake.statuses.get(str(pod))

    async def read_condition(self, pod: Pod) -> Condition | None:
        return self._fake.conditions.get(str(pod))

    async def put_labels(self, namespace: str, labels: Mapping[str, str]) -> None:
        self._fake.labels[namespace] = dict(labels)

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        self._callback = callback
        for pod in self._fake.pods.values():
            callback(pod)


class StandaloneHarness:
    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._standalone = StandaloneStore(directory)
        self.store = Blocking(self._standalone, self._standalone)

    def _write(self, kind: str, version: str, item: Pod | NetworkAttachmentDefinition, **fields: object) -> None:
        metadata = {"namespace": item.namespace, "name": item.name, "annotations": dict(item.annotations)}
        if isinstance(item, Pod):
            metadata["uid"] = item.uid
        self._path(item).write_text(
            yaml.safe_dump({"apiVersion": version, "kind": kind, "metadata": metadata, **fields})
        )

    def _path(self, item: Pod | NetworkAttachmentDefinition) -> pathlib.Path:
        return self._directory / f"{type(item).__name__}-{item.namespace}-{item.name}.yaml"

    async def put_pod(self, pod: Pod) -> Pod:
        self._write("Pod", "v1", pod, spec={"hostNetwork": pod.host_network})
        await in_thread(self._standalone.refresh)
        return pod

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        self._write(KIND, f"{GROUP}/{VERSION}", network, spec={"config": network.config})
        await in_thread(self._standalone.refresh)

    async def remove_pod(self, pod: Pod) -> None:
        self._path(pod).unlink()
        await in_thread(self._standalone.refresh)

    async def read_status(self, pod: Pod) -> str | None:
        return status_file.read(self._directory, pod.namespace, pod.name)

    async def read_condition(self, pod: Pod) -> Condition | None:
        # Others see it in the log.
        found = self._standalone.conditions.get((pod.namespace, pod.name))
        return found[1:] if found else None

    async def put_labels(self, namespace: str, labels: Mapping[str, str]) -> None:
        metadata = {"name": namespace, "labels": dict(labels)}
        item = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        (self._directory / f"namespace-{namespace}.yaml").write_text(yaml.safe_dump(item))
        await in_thread(self._standalone.refresh)

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        self._standalone.watch_pods(callback)


class KubeHarness:
    """The store over HTTP, with an API server in this process."""

    def __init__(self, server: FakeApiServer, store: KubeStore) -> None:
        self._server = server
        self._kube = store
        self.store = of_the_loop(store)

    def _metadata(self, item: Pod | NetworkAttachmentDefinition) -> dict[str, Any]:
        return {"namespace": item.namespace, "name": item.name, "annotations": dict(item.annotations)}

    async def _until_known(self, informer: Any, item: Pod | NetworkAttachmentDefinition, expected: object) -> None:
        await eventually(lambda: informer.get((item.namespace, item.name)) == expected)

    async def put_pod(self, pod: Pod) -> Pod:
        spec = {"nodeName": "node-a", "hostNetwork": pod.host_network}
        self._server.put(PODS, {"metadata": self._metadata(pod) | {"uid": pod.uid}, "spec": spec})
        await self._until_known(self._kube.pods, pod, pod)
        return pod

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        self._server.put(NETWORKS, {"metadata": self._metadata(network), "spec": {"config": network.config}})
        await self._until_known(self._kube.networks, network, network)

    async def remove_pod(self, pod: Pod) -> None:
        self._server.delete(PODS, pod.namespace, pod.name)
        await self._until_known(self._kube.pods, pod, None)

    async def read_status(self, pod: Pod) -> str | None:
        value: str | None = self._server.get(PODS, pod.namespace, pod.name)["metadata"]["annotations"].get(
            network_status.ANNOTATION
        )
        return value

    async def read_condition(self, pod: Pod) -> Condition | None:
        found = self._server.objects[PODS].get((pod.namespace, pod.name), {})
        return condition_in(found)

    async def put_labels(self, namespace: str, labels: Mapping[str, str]) -> None:
        self._server.labels[namespace] = dict(labels)

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        self._kube.watch_pods(callback)


@contextlib.asynccontextmanager
async def kube_harness(directory: pathlib.Path) -> AsyncIterator[StoreHarness]:
    server = FakeApiServer()
    await server.start()
    async with ApiClient(Kubeconfig(server.kubeconfig(directory / "kubeconfig"))) as client:
        store = KubeStore(client, "node-a", Gates("pods", "networks"))
        # Waiting for events that never come is tested elsewhere.
        store._pod_patience = store._unsynced_patience = store._lookup._patience = 0.05
        async with running(store.run()):
            async with asyncio.timeout(30):
                await store.pods.synced.wait()
                await store.networks.synced.wait()
            yield KubeHarness(server, store)
        await server.stop()


@pytest.fixture(params=["fake", "standalone", "kube"])
async def harness(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StoreHarness]:
    # The server is slow on a busy machine.
    monkeypatch.setattr(deadlines, "NETWORK_STATUS_PATIENCE_SECONDS", 20.0)
    if request.param == "kube":
        async with kube_harness(tmp_path) as harness:
            yield harness
    else:
        yield FakeHarness() if request.param == "fake" else StandaloneHarness(tmp_path)
