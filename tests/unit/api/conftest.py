"""A live server on a unix socket, over a fake of the verbs."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from multus_daemon import deadlines
from multus_daemon.api.app import UnixServer
from multus_daemon.api.cni import CniApi
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.gates import Gates
from tests.unit.api.harness import FakeVerbs, started


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
def api(
    verbs: FakeVerbs, metrics: Metrics, verb_seconds: float, body_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> CniApi:
    monkeypatch.setattr(deadlines, "BODY_SECONDS", body_seconds)
    monkeypatch.setattr(deadlines, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(deadlines, "VERB_SECONDS", dict.fromkeys(deadlines.VERB_SECONDS, verb_seconds))
    return CniApi(verbs, metrics)


@pytest.fixture
async def server(api: CniApi, gates: Gates, metrics: Metrics, tmp_path: Path) -> AsyncIterator[UnixServer]:
    async with started(UnixServer(api, gates, metrics, tmp_path / "run")) as server:
        yield server
