"""STATUS calls with the same configuration share one run: a plugin that hangs does so once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from multus_daemon import deadlines
from multus_daemon.api.cni import CniApi, DeadlineExceededError
from tests.unit.api.harness import FakeVerbs, body, netconf
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def verbs(verbs: FakeVerbs) -> Iterator[FakeVerbs]:
    """They wait in their threads."""
    verbs.gate.clear()
    yield verbs
    # No thread stays behind, whatever became of the test.
    verbs.gate.set()


async def begun(api: CniApi, verbs: FakeVerbs, number: int, content: bytes) -> list[asyncio.Task[object]]:
    """So many calls, all of which are waited for, and the verb has begun."""
    tasks: list[asyncio.Task[object]] = [asyncio.create_task(api.call(content)) for _ in range(number)]
    await eventually(lambda: len(api._requests) == number and verbs.calls)
    return tasks


async def test_calls_at_the_same_time_share_one_run(api: CniApi, verbs: FakeVerbs) -> None:
    tasks = await begun(api, verbs, 5, body("STATUS"))
    verbs.gate.set()
    await asyncio.gather(*tasks)
    assert len(verbs.calls) == 1
    await api.call(body("STATUS"))
    assert len(verbs.calls) == 2, "what comes later is asked anew"


async def test_other_configurations_and_other_verbs_have_their_own_run(api: CniApi, verbs: FakeVerbs) -> None:
    contents = [
        body("STATUS"), body("STATUS", netconf("1.1.0")), body("STATUS", netconf(name="other")), body("GC"), body("GC"),
    ]  # fmt: skip
    tasks = [asyncio.create_task(api.call(content)) for content in contents]
    await eventually(lambda: len(verbs.calls) >= 5)
    verbs.gate.set()
    await asyncio.gather(*tasks)
    assert len(verbs.calls) == 5


async def test_a_run_that_outlasts_the_verbs_time_is_interrupted_and_told(
    api: CniApi, verbs: FakeVerbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(deadlines.VERB_SECONDS, "STATUS", 0.05)
    with pytest.raises(DeadlineExceededError, match="^STATUS took longer than 0.05 s"):
        await api.call(body("STATUS"))
    await eventually(lambda: verbs.cancelled == 1)


async def test_a_client_that_hangs_up_takes_the_run_from_nobody(api: CniApi, verbs: FakeVerbs) -> None:
    first, second = await begun(api, verbs, 2, body("STATUS"))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.sleep(0.02)
    assert (verbs.finished, verbs.cancelled) == (0, 0)
    verbs.gate.set()
    await second
    assert (len(verbs.calls), verbs.cancelled) == (1, 0)
