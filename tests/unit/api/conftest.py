"""A live server on a unix socket, over a fake of the verbs."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from multus_daemon import deadlines
from multus_daemon.api.app import UnixServer
from multus_daemon.api.cni import CniApi
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.gates import Gates
from tests.unit.api.harness import FakeVerbs


@pytest.fixture
def verbs() -> FakeVerbs:
    return FakeVerbs()


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="0.0-test")


@pytest.fixture
def verb_seconds() -> float:
    """Deadline of every verb: more than a busy machine needs. A test of deadlines has fewer."""
    return 30.0


@pytest.fixture
def body_seconds() -> float:
    """How long a body may take. A test of slow ones has less."""
    return 30.0


@pytest.fixture
def little_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a client that never sends the rest: the server reads on for less than two seconds after its answer."""
    monkeypatch.setattr(deadlines, "LINGER_SECONDS", 0.1)


@pytest.fixture
def api(verbs: FakeVerbs, metrics: Metrics, verb_seconds: float, body_seconds: float) -> CniApi:
    limits = dict.fromkeys(("ADD", "DEL", "CHECK", "STATUS", "GC"), verb_seconds)
    return CniApi(verbs, metrics, verb_seconds=limits, body_timeout=body_seconds)


@pytest.fixture
async def server(api: CniApi, gates: Gates, metrics: Metrics, tmp_path: Path) -> AsyncIterator[UnixServer]:
    server = UnixServer(api, gates, metrics, tmp_path / "run", head_timeout=0.5)
    await server.start()
    yield server
    await server.stop(1)
