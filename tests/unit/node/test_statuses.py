"""When network-statuses are compared with the records, and how many are written at once."""

from __future__ import annotations

import asyncio

import pytest

from multus_daemon import deadlines
from multus_daemon.node.statuses import StatusesAtStart
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import StatusWriteError, StoreUnavailableError


class Statuses:
    """So many are outdated, once `blind` looks have failed; writing those in `failing` fails."""

    def __init__(self, outdated: int, blind: int = 0, failing: frozenset[str] = frozenset()) -> None:
        self.left = [ContainerId(f"c{number}") for number in range(outdated)]
        self.blind = blind
        self.failing = failing
        self.looks = 0
        self.written: list[str] = []
        self.at_once = self.most = 0

    async def outdated(self) -> list[ContainerId]:
        self.looks += 1
        if self.looks <= self.blind:
            raise StoreUnavailableError("pods are not listed yet")
        return self.left

    async def bring_up_to_date(self, container_id: ContainerId) -> bool:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        if container_id in self.failing:
            raise StatusWriteError("away")
        self.written.append(container_id)
        return True


async def test_once_the_pods_are_known_each_is_written_and_some_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "STATUSES_BLIND_SECONDS", 0.001)
    statuses = Statuses(50, blind=3)
    await StatusesAtStart(statuses).bring_up_to_date()
    assert statuses.looks == 4
    assert sorted(statuses.written) == sorted(statuses.left)
    assert 1 < statuses.most <= 4


async def test_one_that_fails_is_told_of_and_keeps_no_other(caplog: pytest.LogCaptureFixture) -> None:
    statuses = Statuses(5, failing=frozenset({"c1"}))
    await StatusesAtStart(statuses).bring_up_to_date()
    assert sorted(statuses.written) == ["c0", "c2", "c3", "c4"]
    assert "container c1 is not up to date: away" in caplog.text


async def test_the_root_task_goes_on_whatever_the_look_comes_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> list[ContainerId]:
        raise OSError("the disk")

    statuses = Statuses(0)
    monkeypatch.setattr(statuses, "outdated", broken)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(StatusesAtStart(statuses).run(), 0.05)
    assert "can't be compared with the records: the disk" in caplog.text
