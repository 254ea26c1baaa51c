"""An API server in this process, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.cluster.kube import client as module
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.store import KubeStore
from multus_daemon.metrics import ClusterMetrics
from multus_daemon.runtime.gates import Gates
from tests.fakes.apiserver import FakeApiServer

Running = Callable[[Coroutine[Any, Any, object]], AbstractAsyncContextManager[asyncio.Task[object]]]


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
def metrics() -> ClusterMetrics:
    return ClusterMetrics()


@pytest.fixture
def gates() -> Gates:
    return Gates("pods", "networks")


@pytest.fixture
def running() -> Running:
    """A function that runs a coroutine for the block."""

    @contextlib.asynccontextmanager
    async def run(work: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Task[object]]:
        task = asyncio.create_task(work)
        try:
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    return run


@pytest.fixture
async def store(client: ApiClient, gates: Gates, metrics: ClusterMetrics, running: Running) -> AsyncIterator[KubeStore]:
    store = KubeStore(client, "node-a", gates, metrics=metrics)
    async with running(store.run()), asyncio.timeout(30):
        await store.pods.synced.wait()
        await store.networks.synced.wait()
        yield store
