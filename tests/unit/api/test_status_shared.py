"""STATUS calls with the same configuration share one run: a plugin that hangs does so once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from multus_daemon.api.cni import CniApi, DeadlineExceededError
from multus_daemon.api.wire import StoppedError
from multus_daemon.metrics import Metrics
from multus_daemon.runtime import deadline
from multus_daemon.runtime.deadline import Interrupted
from multus_daemon.spec.cni.errors import PluginNotAvailableError
from tests.unit.api.harness import FakeVerbs, body, netconf

LIMITS = dict.fromkeys(("ADD", "DEL", "CHECK", "STATUS", "GC"), 30.0)


class BlockingVerbs(FakeVerbs):
    """STATUS and GC wait in their threads for `gate`; then STATUS raises `error`, if there is one."""

    def __init__(self) -> None:
        super().__init__(gate=threading.Event())
        self.asked: list[bytes] = []
        self.interrupted = 0
        self.ended = 0

    def _wait(self, stdin: bytes) -> None:
        self.asked.append(stdin)
        try:
            while not self.gate.is_set():
                deadline.pause(0.002)
        except Interrupted:
            self.interrupted += 1
            raise
        finally:
            self.ended += 1

    def status(self, stdin: bytes) -> None:
        self._wait(stdin)
        if self.error:
            raise self.error

    def gc(self, stdin: bytes) -> None:
        self._wait(stdin)


@pytest.fixture
async def verbs() -> AsyncIterator[BlockingVerbs]:
    verbs = BlockingVerbs()
    yield verbs
    # No thread stays behind, whatever became of the test.
    verbs.gate.set()


@pytest.fixture
def api(verbs: BlockingVerbs) -> CniApi:
    return CniApi(verbs, Metrics(), verb_seconds=LIMITS)


async def begun(api: CniApi, verbs: BlockingVerbs, number: int, content: bytes) -> list[asyncio.Task[object]]:
    """So many calls, all of which are waited for, and the verb has begun."""
    tasks: list[asyncio.Task[object]] = [asyncio.create_task(api.call(content)) for _ in range(number)]
    async with asyncio.timeout(30):
        while api.running < number or not verbs.asked:
            await asyncio.sleep(0.002)
    return tasks


async def test_calls_at_the_same_time_share_one_run(api: CniApi, verbs: BlockingVerbs) -> None:
    tasks = await begun(api, verbs, 5, body("STATUS"))
    verbs.gate.set()
    await asyncio.gather(*tasks)
    assert len(verbs.asked) == 1
    await api.call(body("STATUS"))
    assert len(verbs.asked) == 2, "what comes later is asked anew"


async def test_all_get_the_error_of_the_one_run(api: CniApi, verbs: BlockingVerbs) -> None:
    verbs.error = PluginNotAvailableError("STATUS of the cluster network did not end within 0.02 s")
    tasks = await begun(api, verbs, 3, body("STATUS"))
    verbs.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results == [verbs.error] * 3
    assert len(verbs.asked) == 1


async def test_other_configurations_and_other_verbs_have_their_own_run(api: CniApi, verbs: BlockingVerbs) -> None:
    contents = [
        body("STATUS"), body("STATUS", netconf("1.1.0")), body("STATUS", netconf(name="other")), body("GC"), body("GC"),
    ]  # fmt: skip
    tasks = [asyncio.create_task(api.call(content)) for content in contents]
    async with asyncio.timeout(30):
        while len(verbs.asked) < 5:
            await asyncio.sleep(0.002)
    verbs.gate.set()
    await asyncio.gather(*tasks)
    assert len(verbs.asked) == 5


async def test_the_last_who_waits_ends_it(api: CniApi, verbs: BlockingVerbs) -> None:
    """A daemon that stops: the run's thread has ended when the drain returns."""
    tasks = await begun(api, verbs, 3, body("STATUS"))
    await api.drain(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [StoppedError] * 3
    assert (len(verbs.asked), verbs.interrupted, verbs.ended) == (1, 1, 1)


async def test_a_run_that_outlasts_the_verbs_time_is_interrupted_and_told(verbs: BlockingVerbs) -> None:
    api = CniApi(verbs, Metrics(), verb_seconds=LIMITS | {"STATUS": 0.05})
    with pytest.raises(DeadlineExceededError, match="^STATUS took longer than 0.05 s"):
        await api.call(body("STATUS"))
    async with asyncio.timeout(30):
        while not verbs.ended:
            await asyncio.sleep(0.002)
    assert verbs.interrupted == 1


async def test_a_client_that_hangs_up_takes_the_run_from_nobody(api: CniApi, verbs: BlockingVerbs) -> None:
    first, second = await begun(api, verbs, 2, body("STATUS"))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.sleep(0.02)
    assert verbs.ended == 0
    verbs.gate.set()
    await second
    assert (len(verbs.asked), verbs.interrupted) == (1, 0)
