"""Every implementation of `ports.ClusterStore` behind one harness, which declares things and reads what was written."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest
import yaml

from multus_daemon.base.gates import Gates
from multus_daemon.kube.client import ApiClient
from multus_daemon.kube.credentials import Kubeconfig
from multus_daemon.kube.store import KubeStore
from multus_daemon.nad import status
from multus_daemon.nad.definition import GROUP, KIND, VERSION, NetworkAttachmentDefinition
from multus_daemon.ports import ClusterStore, Pod
from multus_daemon.standalone import status_file
from multus_daemon.standalone.store import StandaloneStore
from tests.fakes.apiserver import NETWORKS, PODS, FakeApiServer
from tests.fakes.cluster import FakeClusterStore


class StoreHarness(Protocol):
    """A store, and the other side of it."""

    @property
    def store(self) -> ClusterStore:
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
        self.store = FakeClusterStore()

    async def put_pod(self, pod: Pod) -> Pod:
        self.store.put_pod(pod)
        return pod

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        self.store.put_network(network)

    async def remove_pod(self, pod: Pod) -> None:
        del self.store.pods[pod.namespace, pod.name]

    async def read_status(self, pod: Pod) -> str | None:
        return self.store.statuses.get(str(pod))


class StandaloneHarness:
    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self.store = StandaloneStore(directory)

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
        await self.store.refresh()
        return pod

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        self._write(KIND, f"{GROUP}/{VERSION}", network, spec={"config": network.config})
        await self.store.refresh()

    async def remove_pod(self, pod: Pod) -> None:
        self._path(pod).unlink()
        await self.store.refresh()

    async def read_status(self, pod: Pod) -> str | None:
        return status_file.read(self._directory, pod.namespace, pod.name)


class KubeHarness:
    """The store over HTTP, with an API server in this process."""

    def __init__(self, server: FakeApiServer, store: KubeStore) -> None:
        self._server = server
        self.store = store

    def _metadata(self, item: Pod | NetworkAttachmentDefinition) -> dict[str, Any]:
        return {"namespace": item.namespace, "name": item.name, "annotations": dict(item.annotations)}

    async def _until_known(self, informer: Any, item: Pod | NetworkAttachmentDefinition, expected: object) -> None:
        async with asyncio.timeout(30):
            while informer.get((item.namespace, item.name)) != expected:
                await asyncio.sleep(0.001)

    async def put_pod(self, pod: Pod) -> Pod:
        spec = {"nodeName": "node-a", "hostNetwork": pod.host_network}
        self._server.put(PODS, {"metadata": self._metadata(pod) | {"uid": pod.uid}, "spec": spec})
        await self._until_known(self.store.pods, pod, pod)
        return pod

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        self._server.put(NETWORKS, {"metadata": self._metadata(network), "spec": {"config": network.config}})
        await self._until_known(self.store.networks, network, network)

    async def remove_pod(self, pod: Pod) -> None:
        self._server.delete(PODS, pod.namespace, pod.name)
        await self._until_known(self.store.pods, pod, None)

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
