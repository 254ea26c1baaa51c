"""An API server in this process, and clients of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from multus_daemon.cluster.kube import client as module
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.store import KubeStore
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.gates import Gates
from tests.aside import running
from tests.fakes.apiserver import FakeApiServer


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that repeats a failed one has no pause but its sender's."""
    monkeypatch.setattr(module, "REPEAT_SECONDS", 0.0)


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    server = FakeApiServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: FakeApiServer, tmp_path: Path) -> AsyncIterator[ApiClient]:
    async with ApiClient(Kubeconfig(server.kubeconfig(tmp_path / "kubeconfig"))) as client:
        yield client


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def gates() -> Gates:
    return Gates("pods", "networks")


@pytest.fixture
async def store(client: ApiClient, gates: Gates, metrics: Metrics) -> AsyncIterator[KubeStore]:
    store = KubeStore(client, "node-a", gates, metrics=metrics)
    async with running(store.run()), asyncio.timeout(30):
        await store.pods.synced.wait()
        await store.networks.synced.wait()
        yield store
