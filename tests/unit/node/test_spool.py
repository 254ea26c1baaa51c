"""The replay of spooled DELs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from multus_daemon import deadlines
from multus_daemon.metrics import Metrics
from multus_daemon.node import spool
from multus_daemon.node.spool import SpoolReplay, UndecodableEntryError
from multus_daemon.runtime import fs
from multus_daemon.runtime.gates import Reasons
from multus_daemon.spec.attachment import Pod
from tests.counted import counted


class World:
    """Requests, events and metrics; the body of an entry is `<container> <anything>`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.tries: list[float] = []
        self.times: list[float] = []
        self.failing: dict[bytes, Exception] = {}
        self.events: list[tuple[str, str]] = []
        self.metrics = Metrics()
        self.pause = 0.0
        self.running: set[str] = set()
        self.most_at_once = 0

    def container_of(self, body: bytes) -> str:
        if body.startswith(b"garbage"):
            raise UndecodableEntryError("not JSON")
        return body.split()[0].decode()

    async def serve(self, body: bytes, written: float) -> None:
        container = self.container_of(body)
        assert container not in self.running, "two entries of one container at once"
        self.running.add(container)
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            await asyncio.sleep(self.pause)
        finally:
            self.running.discard(container)
        self.bodies.append(body)
        self.tries.append(time.monotonic())
        self.times.append(written)
        if error := self.failing.get(body):
            raise error

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        raise AssertionError("an entry is about no pod")

    def node_event(self, kind: str, reason: str, message: str) -> None:
        self.events.append((reason, message))

    def replays(self) -> dict[str, float]:
        """Return the number of entries by outcome."""
        found = {outcome: counted(self.metrics.replays, outcome=outcome) for outcome in ("error", "refused", "success")}
        return {outcome: number for outcome, number in found.items() if number}


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def replay(tmp_path: Path, world: World) -> SpoolReplay:
    return SpoolReplay(tmp_path, world.container_of, world.serve, world, world.metrics)


def entry(directory: Path, name: str, body: bytes = b"c1") -> Path:
    path = directory / name
    path.write_bytes(body)
    return path


async def drained(replay: SpoolReplay) -> None:
    while await replay.replay():
        pass


async def test_entries_of_one_container_go_in_order_and_others_beside(
    tmp_path: Path, world: World, replay: SpoolReplay
) -> None:
    for number in range(30):
        entry(tmp_path, f"{number:020}-1.json", b"c%d %d" % (number % 10, number))
    world.pause = 0.02
    await drained(replay)
    for container in range(10):
        own = [body for body in world.bodies if body.startswith(b"c%d " % container)]
        assert own == [b"c%d %d" % (container, number) for number in (container, container + 10, container + 20)]
    assert world.most_at_once == spool.AT_ONCE


async def test_the_order_does_not_depend_on_how_fast_a_file_is_read(
    tmp_path: Path, world: World, replay: SpoolReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = spool._read

    def slow(path: Path) -> bytes:
        time.sleep(0.05 if path.name.startswith("1") else 0)
        return real(path)

    monkeypatch.setattr(spool, "_read", slow)
    entry(tmp_path, "1-1.json", b"c1 first")
    entry(tmp_path, "2-1.json", b"c1 second")
    await drained(replay)
    assert world.bodies == [b"c1 first", b"c1 second"]


async def test_what_is_being_written_and_what_is_no_entry_is_passed_over(
    tmp_path: Path, world: World, replay: SpoolReplay
) -> None:
    entry(tmp_path, ".00000000000000000001-9.json.tmp")
    entry(tmp_path, "notes.txt")
    (tmp_path / "folder.json").mkdir()
    await drained(replay)
    assert (world.bodies, world.replays()) == ([], {})
    assert len(list(tmp_path.iterdir())) == 3


async def test_what_a_shim_left_half_written_goes_after_a_while(tmp_path: Path, replay: SpoolReplay) -> None:
    old = entry(tmp_path, ".00000000000000000001-9.json.tmp")
    os.utime(old, (1.0, 1.0))
    await replay.replay()
    assert not old.exists()


async def test_a_failing_entry_waits_keeps_its_container_waiting_and_nobody_else(
    tmp_path: Path, world: World, replay: SpoolReplay
) -> None:
    entry(tmp_path, "1-1.json", b"c1 first")
    entry(tmp_path, "2-1.json", b"c1 second")
    entry(tmp_path, "3-1.json", b"c2")
    world.failing[b"c1 first"] = OSError("plugin away")
    await drained(replay)
    await drained(replay)
    assert world.bodies == [b"c1 first", b"c2"] or world.bodies == [b"c2", b"c1 first"]
    assert world.replays() == {"error": 1, "success": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-1.json", "2-1.json"]


async def test_a_served_entry_that_cannot_be_removed_is_not_served_again(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "SPOOL_RETRY_SECONDS", (0.0, 0.0))
    replay = SpoolReplay(tmp_path, world.container_of, world.serve, world, world.metrics)
    entry(tmp_path, "1-1.json")
    real = fs.remove
    monkeypatch.setattr(fs, "remove", lambda _path: (_ for _ in ()).throw(OSError("read-only file system")))
    await replay.replay()
    await replay.replay()
    monkeypatch.setattr(fs, "remove", real)
    await drained(replay)
    assert world.bodies == [b"c1"]
    assert list(tmp_path.iterdir()) == []


def _garbage(path: Path) -> None:
    path.write_bytes(b"garbage")


def _link(path: Path) -> None:
    path.symlink_to(path.parent / "secret")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(spool.ENTRY_MAX_BYTES + 1)


def _foreign(path: Path) -> None:
    path.write_bytes(b"c1")
    os.chown(path, 4711, 4711)


async def test_an_entry_that_cannot_be_read_is_read_again(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "SPOOL_RETRY_SECONDS", (0.01, 0.01))
    replay = SpoolReplay(tmp_path, world.container_of, world.serve, world, world.metrics)
    real = spool._read

    def failing(path: Path) -> bytes:
        if path.name == "1-1.json":
            raise OSError("input/output error")
        return real(path)

    monkeypatch.setattr(spool, "_read", failing)
    entry(tmp_path, "1-1.json", b"c1")
    entry(tmp_path, "2-1.json", b"c2")
    await drained(replay)
    assert world.bodies == [b"c2"]
    assert replay.failed == {"1-1.json": "input/output error"}
    monkeypatch.setattr(spool, "_read", real)
    async with asyncio.timeout(30):
        while len(world.bodies) < 2:
            await replay.replay()
            await asyncio.sleep(0.01)
    assert replay.failed == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.weak_spot(36)
@pytest.mark.parametrize("make", [_garbage, _link, _fifo, _huge, _foreign])
async def test_what_cannot_be_served_is_set_aside_once_and_told_of(
    tmp_path: Path, world: World, replay: SpoolReplay, make: Callable[[Path], None]
) -> None:
    if make is _foreign and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    entry(tmp_path, "secret", b"c1")
    make(tmp_path / "1-1.json")
    entry(tmp_path, "2-1.json", b"c2")
    await drained(replay)
    await drained(replay)
    assert world.bodies == [b"c2"]
    assert world.replays() == {"refused": 1, "success": 1}
    assert [path.name for path in (tmp_path / "rejected").iterdir()] == ["1-1.json"]
    assert (tmp_path / "secret").read_bytes() == b"c1"
    [(reason, message)] = world.events
    assert reason == "SpoolEntryRejected"
    assert "1-1.json" in message


async def test_the_rejected_are_bounded_in_number_and_age(
    tmp_path: Path, replay: SpoolReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "REJECTED_MAX", 3)
    for number in range(5):
        entry(tmp_path, f"{number}-1.json", b"garbage")
        await replay.replay()
        os.utime(tmp_path / "rejected" / f"{number}-1.json", (time.time() - 100 + number,) * 2)
    entry(tmp_path, "5-1.json", b"garbage")
    await replay.replay()
    folder = tmp_path / "rejected"
    assert sorted(path.name for path in folder.iterdir()) == ["3-1.json", "4-1.json", "5-1.json"]
    monkeypatch.setattr(spool, "REJECTED_SECONDS", 50.0)
    entry(tmp_path, "6-1.json", b"garbage")
    await replay.replay()
    assert sorted(path.name for path in folder.iterdir()) == ["5-1.json", "6-1.json"]


async def test_the_oldest_come_first_where_there_are_too_many(
    tmp_path: Path, world: World, replay: SpoolReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "ENTRIES_MAX", 10)
    for number in range(25):
        entry(tmp_path, f"{number:020}-1.json", b"c%d" % number)
    assert await replay.replay() == 10
    assert sorted(world.bodies) == sorted(b"c%d" % number for number in range(10))
    await drained(replay)
    assert len(world.bodies) == 25


async def test_no_spool_is_no_entry(tmp_path: Path, world: World) -> None:
    assert await SpoolReplay(tmp_path / "spool", world.container_of, world.serve, world, world.metrics).replay() == 0


async def test_it_looks_again_and_again(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "SPOOL_LOOK_SECONDS", 0.01)
    running = asyncio.create_task(SpoolReplay(tmp_path, world.container_of, world.serve, world, world.metrics).run())
    try:
        async with asyncio.timeout(30):
            for number in range(3):
                entry(tmp_path, f"{number}-1.json")
                while len(world.bodies) <= number:
                    await asyncio.sleep(0.001)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_spool_that_is_a_link_is_not_used(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    entry(tmp_path / "elsewhere", "1-1.json")
    (tmp_path / "spool").symlink_to(tmp_path / "elsewhere")
    degraded = Reasons()
    replay = SpoolReplay(tmp_path / "spool", world.container_of, world.serve, world, world.metrics, degraded)
    assert await replay.replay() == 0
    assert world.bodies == []
    assert "no link and no file" in caplog.text
    assert str(tmp_path / "spool") in degraded.closed["spool"]
    (tmp_path / "spool").unlink()
    assert await replay.replay() == 0
    assert degraded.closed == {}


async def test_the_mode_of_the_spool_is_put_right(tmp_path: Path, replay: SpoolReplay) -> None:
    tmp_path.chmod(0o777)
    assert await replay.replay() == 0
    assert tmp_path.stat().st_mode & 0o777 == 0o700
