"""Every implementation of `ports.ClusterStore` behind one harness, which declares things and reads what was written.

The tests are on an event loop, as the stores of the loop and their API server are. So each call of a `ClusterStore`,
which blocks, is in a thread of its own, as a request's is; and it comes back to the loop by `portals`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import pytest
import yaml

from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.store import KubeStore
from multus_daemon.cluster.standalone import status_file
from multus_daemon.cluster.standalone.store import StandaloneStore
from multus_daemon.pod import portals
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad import status
from multus_daemon.spec.nad.selection import GROUP, KIND, VERSION, NetworkAttachmentDefinition
from multus_daemon.spec.ports import ClusterStore, Events
from tests.fakes.apiserver import NETWORKS, PODS, FakeApiServer
from tests.fakes.cluster import FakeClusterStore

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Blocking `work` as a request's thread does it."""
    return await portal.run(Deadline(), functools.partial(work, *args, **kwargs))


class Store(Events, Protocol):
    """A `ports.ClusterStore` as the tests call it."""

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """See `ports.ClusterStore`, as for the others."""

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition: ...

    async def node_pods(self) -> list[Pod]: ...

    async def namespaces_with_network(self, name: str) -> list[str]: ...

    async def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None: ...


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

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        self._events.event(pod, kind, reason, message)

    def node_event(self, kind: str, reason: str, message: str) -> None:
        self._events.node_event(kind, reason, message)


def of_the_loop(store: portals.LoopStore) -> Store:
    """The `Store` over one of the event loop's, by the way that the engine goes."""
    return Blocking(portals.Cluster(store, LoopPortal()), store)


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


class FakeHarness:
    def __init__(self) -> None:
        self._fake = FakeClusterStore()
        self.store = Blocking(self._fake, self._fake)

    async def put_pod(self, pod: Pod) -> Pod:
        self._fake.put_pod(pod)
        return pod

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        self._fake.put_network(network)

    async def remove_pod(self, pod: Pod) -> None:
        del self._fake.pods[pod.namespace, pod.name]

    async def read_status(self, pod: Pod) -> str | None:
        return self._fake.statuses.get(str(pod))


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


class KubeHarness:
    """The store over HTTP, with an API server in this process."""

    def __init__(self, server: FakeApiServer, store: KubeStore) -> None:
        self._server = server
        self._kube = store
        self.store = of_the_loop(store)

    def _metadata(self, item: Pod | NetworkAttachmentDefinition) -> dict[str, Any]:
        return {"namespace": item.namespace, "name": item.name, "annotations": dict(item.annotations)}

    async def _until_known(self, informer: Any, item: Pod | NetworkAttachmentDefinition, expected: object) -> None:
        async with asyncio.timeout(30):
            while informer.get((item.namespace, item.name)) != expected:
                await asyncio.sleep(0.001)

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
            status.ANNOTATION
        )
        return value


@contextlib.asynccontextmanager
async def kube_harness(directory: pathlib.Path) -> AsyncIterator[StoreHarness]:
    server = FakeApiServer()
    await server.start()
    async with ApiClient(Kubeconfig(server.kubeconfig(directory / "kubeconfig"))) as client:
        # Waiting for events that never come is tested elsewhere.
        store = KubeStore(client, "node-a", Gates("pods", "networks"), pod_patience=0.05)
        running = asyncio.create_task(store.run())
        try:
            async with asyncio.timeout(30):
                await store.pods.synced.wait()
                await store.networks.synced.wait()
            yield KubeHarness(server, store)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await server.stop()


@pytest.fixture(params=["fake", "standalone", "kube"])
async def harness(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> AsyncIterator[StoreHarness]:
    if request.param == "kube":
        async with kube_harness(tmp_path) as harness:
            yield harness
    else:
        yield FakeHarness() if request.param == "fake" else StandaloneHarness(tmp_path)
