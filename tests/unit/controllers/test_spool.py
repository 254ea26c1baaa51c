"""The replay of spooled DELs."""

from __future__ import annotations

from pathlib import Path

import pytest

from multus_daemon.controllers import spool
from multus_daemon.controllers.spool import SpoolReplay, UndecodableEntryError


class Serve:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.error: Exception | None = None

    async def __call__(self, body: bytes) -> None:
        self.bodies.append(body)
        if self.error:
            raise self.error


@pytest.fixture
def serve() -> Serve:
    return Serve()


def entry(directory: Path, name: str, body: bytes = b"{}") -> Path:
    path = directory / name
    path.write_bytes(body)
    return path


async def test_entries_are_served_oldest_first_and_removed(tmp_path: Path, serve: Serve) -> None:
    entry(tmp_path, "00000000000000000002-1.json", b"two")
    entry(tmp_path, "00000000000000000001-9.json", b"one")
    assert await SpoolReplay(tmp_path, serve).replay() == 2
    assert serve.bodies == [b"one", b"two"]
    assert list(tmp_path.iterdir()) == []


async def test_files_that_are_being_written_are_passed_over(tmp_path: Path, serve: Serve) -> None:
    entry(tmp_path, ".00000000000000000001-9.json")
    entry(tmp_path, "notes.txt")
    assert await SpoolReplay(tmp_path, serve).replay() == 0
    assert serve.bodies == []


async def test_a_failing_entry_stays_waits_and_does_not_stop_the_others(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "RETRY_FIRST_SECONDS", 0.0)
    entry(tmp_path, "1-1.json", b"one")
    entry(tmp_path, "2-1.json", b"two")
    replay = SpoolReplay(tmp_path, serve)
    serve.error = OSError("plugin away")
    assert await replay.replay() == 0
    assert serve.bodies == [b"one", b"two"]
    serve.error = None
    assert await replay.replay() == 2
    assert list(tmp_path.iterdir()) == []


async def test_a_failing_entry_is_not_tried_before_its_delay(tmp_path: Path, serve: Serve) -> None:
    entry(tmp_path, "1-1.json", b"one")
    replay = SpoolReplay(tmp_path, serve)
    serve.error = OSError("plugin away")
    await replay.replay()
    await replay.replay()
    assert serve.bodies == [b"one"]


async def test_what_is_no_request_is_set_aside(tmp_path: Path, serve: Serve) -> None:
    entry(tmp_path, "1-1.json", b"garbage")
    serve.error = UndecodableEntryError("not JSON")
    assert await SpoolReplay(tmp_path, serve).replay() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["1-1.rejected"]


async def test_a_symbolic_link_is_not_followed(tmp_path: Path, serve: Serve) -> None:
    secret = entry(tmp_path, "secret", b"secret")
    (tmp_path / "1-1.json").symlink_to(secret)
    assert await SpoolReplay(tmp_path, serve).replay() == 0
    assert serve.bodies == []


async def test_no_spool_is_no_entry(tmp_path: Path, serve: Serve) -> None:
    assert await SpoolReplay(tmp_path / "spool", serve).replay() == 0
