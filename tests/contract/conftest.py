"""Every implementation of `ports.ClusterStore` behind one harness, which declares things and reads what was written."""

from __future__ import annotations

import pathlib
from typing import Protocol

import pytest
import yaml

from multus_daemon.nad.definition import GROUP, KIND, VERSION, NetworkAttachmentDefinition
from multus_daemon.ports import ClusterStore, Pod
from multus_daemon.standalone import status_file
from multus_daemon.standalone.store import StandaloneStore
from tests.fakes.cluster import FakeClusterStore


class StoreHarness(Protocol):
    """A store, and the other side of it."""

    store: ClusterStore

    async def put_pod(self, pod: Pod) -> None:
        """Declare the pod, in place of one of the same name; the store knows when this returns."""

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        """Declare the network likewise."""

    async def remove_pod(self, pod: Pod) -> None:
        """Withdraw the pod; the store knows when this returns."""

    async def read_status(self, pod: Pod) -> str | None:
        """The network-status as others see it."""


class FakeHarness:
    def __init__(self) -> None:
        self.store = FakeClusterStore()

    async def put_pod(self, pod: Pod) -> None:
        self.store.put_pod(pod)

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

    async def put_pod(self, pod: Pod) -> None:
        self._write("Pod", "v1", pod, spec={"hostNetwork": pod.host_network})
        await self.store.refresh()

    async def put_network(self, network: NetworkAttachmentDefinition) -> None:
        self._write(KIND, f"{GROUP}/{VERSION}", network, spec={"config": network.config})
        await self.store.refresh()

    async def remove_pod(self, pod: Pod) -> None:
        self._path(pod).unlink()
        await self.store.refresh()

    async def read_status(self, pod: Pod) -> str | None:
        return status_file.read(self._directory, pod.namespace, pod.name)


@pytest.fixture(params=["fake", "standalone"])
def harness(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> StoreHarness:
    if request.param == "fake":
        return FakeHarness()
    return StandaloneHarness(tmp_path)
