"""Reviews of the tokens of scrapers: what is asked, what is kept, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube import access
from multus_daemon.cluster.kube.access import TokenAccess
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from tests.fakes.apiserver import FakeApiServer
from tests.waiting import eventually

USER = {"username": "prometheus", "uid": "7", "groups": ["scrapers"], "extra": {"node": ["a"]}}
TOKEN = "good-token"


class Clock:
    """Seconds that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def judge(server: FakeApiServer, tmp_path: Path, clock: Clock) -> AsyncIterator[TokenAccess]:
    server.scrapers[TOKEN] = USER
    server.granted.add(("prometheus", "/metrics", "get"))
    async with ApiClient(Kubeconfig(server.kubeconfig(tmp_path / "kubeconfig"))) as client:
        yield TokenAccess(client, clock=clock)


async def test_the_user_of_the_token_is_reviewed_with_all_that_it_is(server: FakeApiServer, judge: TokenAccess) -> None:
    assert await judge(TOKEN) == "allowed"
    assert server.reviews == [
        {"token": TOKEN},
        {
            "user": "prometheus",
            "uid": "7",
            "groups": ["scrapers"],
            "extra": {"node": ["a"]},
            "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        },
    ]


async def test_an_unknown_token_and_a_user_without_the_right(server: FakeApiServer, judge: TokenAccess) -> None:
    assert await judge("unknown") == "unauthenticated"
    server.scrapers["poor"] = {"username": "nobody"}
    assert await judge("poor") == "forbidden"
    assert [len(spec) for spec in server.reviews] == [1, 1, 5]


async def test_a_yes_is_kept_for_a_minute(server: FakeApiServer, judge: TokenAccess, clock: Clock) -> None:
    assert await judge(TOKEN) == "allowed"
    server.granted.clear()
    clock.now += 59
    assert await judge(TOKEN) == "allowed"
    clock.now += 2
    assert await judge(TOKEN) == "forbidden"


async def test_a_no_is_kept_for_ten_seconds(server: FakeApiServer, judge: TokenAccess, clock: Clock) -> None:
    granted = server.granted.copy()
    server.granted.clear()
    assert await judge(TOKEN) == "forbidden"
    server.granted |= granted
    clock.now += 9
    assert await judge(TOKEN) == "forbidden"
    clock.now += 2
    assert await judge(TOKEN) == "allowed"


async def test_without_the_api_server_only_what_is_kept_counts(
    server: FakeApiServer, judge: TokenAccess, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert await judge(TOKEN) == "allowed"
    await server.stop()
    assert await judge(TOKEN) == "allowed"
    for _ in range(3):
        assert await judge("unknown") == "unavailable"
    clock.now += 61
    assert await judge(TOKEN) == "unavailable"
    # Not kept: the next one is asked again.
    await server.start()
    assert await judge(TOKEN) == "allowed"
    said = [record.getMessage() for record in caplog.records if record.name == access.log.name]
    assert [line.partition(": ")[2][:25] for line in said] == ["a token can't be reviewed", "tokens can be reviewed ag"]


async def test_a_missing_right_of_the_daemon_is_said_with_what_to_do(
    server: FakeApiServer, judge: TokenAccess, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail(403, contains="tokenreviews")
    assert await judge(TOKEN) == "unavailable"
    assert "grant the rights of manifests/metrics-authorization" in caplog.text


async def test_no_token_is_logged(server: FakeApiServer, judge: TokenAccess, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    await judge(TOKEN)
    await judge("other-token")
    server.fail(500, times=9)
    await judge("third-token")
    assert "500" in caplog.text
    assert "token" not in caplog.text.replace("a token can't", "").replace("tokenreviews", "")
    assert not [
        kept for kept in vars(judge).values() if "-token" in repr(vars(kept) if hasattr(kept, "__dict__") else kept)
    ]


async def test_an_answer_that_is_late_or_no_review(
    server: FakeApiServer, judge: TokenAccess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server.scrapers[TOKEN] = {"username": 7}
    assert await judge(TOKEN) == "unavailable"
    assert "the answer is not a review" in caplog.text
    monkeypatch.setattr(deadlines, "METRICS_REVIEW_SECONDS", 0.05)
    server.delay = 30
    assert await judge(TOKEN) == "unavailable"
    assert "no answer within 0.05 s" in caplog.text


async def test_who_asks_at_once_with_one_token_shares_one_review(server: FakeApiServer, judge: TokenAccess) -> None:
    server.delay = 0.05
    assert await asyncio.gather(*(judge(TOKEN) for _ in range(10))) == ["allowed"] * 10
    assert len(server.reviews) == 2


async def test_few_reviews_run_at_once(server: FakeApiServer, judge: TokenAccess) -> None:
    server.delay = 30
    asking = [asyncio.create_task(judge(f"unknown{number}")) for number in range(10)]
    await eventually(lambda: server.requests, 10)
    await asyncio.sleep(0.1)
    assert len(server.requests) == access.AT_ONCE
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


async def test_strangers_have_few_tokens_reviewed(server: FakeApiServer, judge: TokenAccess) -> None:
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(judge(f"unknown{number}") for number in range(10)))
    took = asyncio.get_running_loop().time() - began
    assert took >= (10 / access.AT_ONCE - 1) * access.PAUSE_SECONDS
    assert len(server.reviews) == 10


async def test_unknown_tokens_push_no_good_one_out(
    server: FakeApiServer, judge: TokenAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "METRICS_REVIEW_SECONDS", 60.0)
    monkeypatch.setattr(access, "PAUSE_SECONDS", 0.0)
    assert await judge(TOKEN) == "allowed"
    verdicts = await asyncio.gather(*(judge(f"unknown{number}") for number in range(access.KEPT_MAX + 50)))
    assert set(verdicts) == {"unauthenticated"}
    asked = len(server.reviews)
    assert await judge(TOKEN) == "allowed"
    # The newest are kept, the oldest are not.
    assert await judge(f"unknown{access.KEPT_MAX + 49}") == "unauthenticated"
    assert len(server.reviews) == asked
    assert await judge("unknown0") == "unauthenticated"
    assert len(server.reviews) == asked + 1
