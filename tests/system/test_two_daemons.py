"""Two daemons of one node, as in a roll-out with `maxSurge`: one of them always has the socket."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.real_daemon import RealDaemon


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_the_older_daemon_takes_the_socket_back(tmp_path: Path, way: str) -> None:
    roots = [tmp_path / "older", tmp_path / "newer"]
    for root in roots:
        root.mkdir()
    with RealDaemon(roots[0]) as older:
        shared = {key: older.settings[key] for key in ("socketDir", "cniDir")}
        first = older.socket.stat().st_ino
        newer = RealDaemon(roots[1], shared)
        newer.socket = older.socket
        with newer:
            newer.until(lambda: older.socket.stat().st_ino != first, "the newer one has the socket")
            # Until then it has no handler for SIGTERM.
            newer.until(lambda: newer.get("/readyz?gates")[0] == 200, "the newer one is ready")
            # Else it may look, and have the socket back, before the question below.
            assert older.process is not None
            older.process.send_signal(signal.SIGSTOP)
            if way == "stopped":
                assert newer.stop() == 0
        assert older.get("/healthz") == (0, b"")
        older.process.send_signal(signal.SIGCONT)
        older.until(lambda: older.get("/healthz")[0] == 200, "the older one has it again", seconds=60)
        older.stop()
        assert not older.socket.exists()
