"""The watch reports relevant changes. Directories and watches are real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from multus_daemon.node.primary.conf_watch import watch
from multus_daemon.runtime import inotify


class Told:
    """A running watch and its last report."""

    def __init__(self, *directories: Path, indicator: Path | None = None) -> None:
        self.event = asyncio.Event()
        self.watch = watch(directories, indicator, self.event.set, in_haste=lambda: True, poll_seconds=0.02)

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
    task = asyncio.create_task(told.watch)
    # Wait until the watch is established.
    await asyncio.sleep(0.2)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


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


async def test_a_directory_that_comes_late(tmp_path: Path) -> None:
    late = tmp_path / "net.d"
    told = Told(late)
    async with running(told):
        late.mkdir()
        await asyncio.sleep(0.2)
        assert await told.of((late / "10-net.conf").touch)


async def test_a_directory_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path / "net.d")
    (tmp_path / "net.d").mkdir()
    # inotify does not report it: the next look at everything finds it.
    monkeypatch.setattr(inotify, "LOOK_SECONDS", 0.3)
    async with running(told):
        assert await told.of(lambda: (tmp_path / "net.d").rename(tmp_path / "old"))
        monkeypatch.undo()
        (tmp_path / "net.d").mkdir()
        await asyncio.sleep(0.2)
        assert await told.of((tmp_path / "net.d" / "10-net.conf").touch)


async def test_what_is_written_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "10-net.conf"
    path.touch()
    told = Told(tmp_path)
    async with running(told):
        assert await told.of(lambda: path.write_text("{}"))
        await asyncio.sleep(0.1)
        assert await told.of(path.unlink)
