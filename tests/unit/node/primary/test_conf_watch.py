"""The watch reports relevant changes. Directories and watches are real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from multus_daemon import settings
from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.metrics import Metrics
from multus_daemon.node.primary.config import PrimaryConfig
from multus_daemon.runtime.gates import Gates
from tests import aside
from tests.fakes.cluster import FakeClusterStore


class Told:
    """A running watch and its last report."""

    def __init__(self, directory: Path, indicator: Path | None = None) -> None:
        keys = {"cniConfigDir": str(directory), "multusAutoconfigDir": str(directory)}
        keys |= {"readinessindicatorfile": str(indicator)} if indicator else {}
        found = settings.from_object(keys, "test")
        config = PrimaryConfig(
            found, NodeConfFiles(), Gates("socket"), FakeClusterStore(), Metrics(), poll_seconds=0.02
        )
        self.event = config._wake
        self.watch = config._watch()

    async def of(self, change: Callable[[], object], seconds: float = 30) -> bool:
        """Return whether it reports `change` within `seconds`."""
        self.event.clear()
        change()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.event.wait()
        return self.event.is_set()


@contextlib.asynccontextmanager
async def running(told: Told) -> AsyncIterator[None]:
    async with aside.running(told.watch):
        # Wait until the watch is established.
        await asyncio.sleep(0.2)
        yield


@pytest.mark.parametrize(("name", "is_told"), [("10-net.conf", True), ("..data", True), (".10-net.conf.tmp", False)])
async def test_temporary_files_are_passed_over(tmp_path: Path, name: str, is_told: bool) -> None:
    told = Told(tmp_path)
    async with running(told):
        assert await told.of((tmp_path / name).touch, 30 if is_told else 0.3) is is_told


async def test_of_a_busy_directory_the_indicator_only(tmp_path: Path) -> None:
    busy = tmp_path / "run"
    busy.mkdir()
    told = Told(tmp_path, indicator=busy / "ready")
    async with running(told):
        assert not await told.of((busy / "other").touch, 0.3)
        assert await told.of((busy / "ready").touch)


async def test_an_indicator_beside_the_configurations(tmp_path: Path) -> None:
    told = Told(tmp_path, indicator=tmp_path / ".ready")
    async with running(told):
        assert not await told.of((tmp_path / ".10-net.conf.tmp").touch, 0.3)
        assert await told.of((tmp_path / "10-net.conf").touch)
        assert await told.of((tmp_path / ".ready").touch)
