"""The shim's own log: which calls have a line, where, and that a log which can't be written changes nothing."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import typing
from concurrent.futures import ThreadPoolExecutor

import pytest

if typing.TYPE_CHECKING:
    from tests.shim.conftest import Shim, Stub

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \[(error|verbose|debug)\] multus-shim\[\d+\]: ([^\x00-\x1f\x7f]*)"
)
FAILED = b"HTTP/1.1 400 Bad\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s"
STDOUT = b"application/vnd.multus.cni-stdout"


@pytest.fixture
def log(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "shim.log"


def fails(daemon: Stub, body: bytes = b'{"code":7,"msg":"no\\nlan","details":"d"}') -> bytes:
    daemon.answer(FAILED % (STDOUT, len(body), body))
    return body


def lines(text: bytes) -> list[tuple[str, str]]:
    """Level and message of each line; fails the test for anything that is none."""
    found = [LINE.fullmatch(line) for line in text.decode("ascii").splitlines()]
    assert all(found), text
    assert not text or text.endswith(b"\n")
    return [(match[1], match[2]) for match in found if match]


def test_errors_only_by_default(shim: Shim, daemon: Stub, log: pathlib.Path) -> None:
    assert shim(conf={"logFile": str(log)}).code == 0
    assert not log.exists()
    body = fails(daemon)
    done = shim(conf={"logFile": str(log)})
    assert (done.code, done.out, done.err) == (1, body, b"")
    message = "ADD of container c0ffee interface eth0: failed with code 7: no\\nlan; d"
    assert lines(log.read_bytes()) == [("error", message)]
    assert log.stat().st_mode & 0o777 == 0o600


def test_an_error_of_the_shim_itself(shim: Shim, log: pathlib.Path) -> None:
    done = shim.hasty(
        "GC",
        conf={"logFile": str(log)},
        env=shim.environment("GC", CNI_IFNAME=None, CNI_CONTAINERID=None),
    )
    ((level, message),) = lines(log.read_bytes())
    assert (level, message) == ("error", f"GC: failed with code 11: {done.error['msg']}")


def test_a_del_that_is_kept_for_later(shim: Shim, log: pathlib.Path) -> None:
    done = shim.hasty("DEL", conf={"logFile": str(log)})
    assert done.code == 0
    ((level, message),) = lines(log.read_bytes())
    assert level == "error"
    assert message.startswith("DEL of container c0ffee interface eth0: ")
    assert f"kept for it in {shim.spool}/" in message
    assert done.err.decode().rstrip("\n") in message


@pytest.mark.parametrize(
    ("level", "succeeded", "failed"),
    [
        ("panic", 0, 0),
        ("error", 0, 1),
        ("ERROR", 0, 1),
        ("verbose", 1, 1),
        ("Debug", 1, 1),
        ("louder", 0, 1),
        (5, 0, 1),
        (None, 0, 1),
    ],
)
def test_levels(shim: Shim, daemon: Stub, log: pathlib.Path, level: object, succeeded: int, failed: int) -> None:
    conf = {"logFile": str(log), "logLevel": level}
    assert shim(conf=conf).code == 0
    written = lines(log.read_bytes()) if log.exists() else []
    assert written == [("verbose", "ADD of container c0ffee interface eth0: done")] * succeeded
    fails(daemon)
    assert shim(conf=conf).code == 1
    written = lines(log.read_bytes()) if log.exists() else []
    assert len(written) == succeeded + failed


def test_debug_tells_of_each_attempt(shim: Shim, daemon: Stub, log: pathlib.Path) -> None:
    def cuts_off_once(conn: typing.Any, request: object) -> None:
        if len(daemon.requests) > 1:
            conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: 2\r\n\r\n{}" % STDOUT)

    daemon.behaviour = cuts_off_once
    assert shim(conf={"logFile": str(log), "logLevel": "debug"}).code == 0
    assert [level for level, _ in lines(log.read_bytes())] == ["debug", "verbose"]
    assert "asked again" in log.read_text()


def test_stderr(shim: Shim, daemon: Stub, log: pathlib.Path) -> None:
    conf = {"logToStderr": True, "logLevel": "verbose"}
    done = shim(conf=conf)
    assert (done.code, done.out) == (0, b"{}")
    assert [level for level, _ in lines(done.err)] == ["verbose"]
    body = fails(daemon)
    done = shim(conf=conf | {"logFile": str(log)})
    assert (done.code, done.out) == (1, body)
    assert done.err == log.read_bytes()
    assert [level for level, _ in lines(done.err)] == ["error"]


def test_a_kept_del_is_told_once_on_stderr(shim: Shim) -> None:
    done = shim.hasty("DEL", conf={"logToStderr": True})
    assert [level for level, _ in lines(done.err)] == ["error"]


@pytest.mark.parametrize("stderr", ["closed", "/dev/full", "a pipe that nobody reads"])
def test_stderr_that_takes_nothing(shim: Shim, daemon: Stub, stderr: str) -> None:
    daemon.behaviour = lambda conn, request: None
    body = fails(daemon)
    config = shim.config(logToStderr=True)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open("/dev/full", "wb") as full:
        if stderr.startswith("a pipe"):
            while True:
                try:
                    os.write(writing, b"x" * 4096)
                except BlockingIOError:
                    break
            os.set_blocking(writing, True)
        target = {"closed": subprocess.DEVNULL, "/dev/full": full.fileno()}.get(stderr, writing)
        command = ["sh", "-c", 'exec "$0" 2>&-', str(shim.binary)] if stderr == "closed" else [str(shim.binary)]
        done = subprocess.run(
            command,
            input=config,
            env=shim.environment("ADD"),
            stdout=subprocess.PIPE,
            stderr=target,
            timeout=20,
            check=False,
        )
    os.close(reading)
    os.close(writing)
    assert (done.returncode, done.stdout) == (1, body)


UNUSABLE = ["a directory", "a FIFO", "missing/below", "/dev/full", "no\0name", "", "a socket's"]


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_file_that_cannot_be_written_changes_nothing(
    shim: Shim, daemon: Stub, tmp_path: pathlib.Path, kind: str
) -> None:
    path = str(tmp_path / kind) if kind and not kind.startswith("/") else kind
    if kind == "a directory":
        os.mkdir(path)
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket's":
        path = str(shim.socket_dir / "multus.sock")
    body = fails(daemon)
    done = shim(conf={"logFile": path})
    assert (done.code, done.out) == (1, body)
    assert b"\n" not in done.err[:-1]
    if kind in ("a directory", "a FIFO", "missing/below", "a socket's"):
        assert f"logFile {path} cannot be opened: E".encode() in done.err


def test_the_message_of_a_plugin_is_one_line_and_cut(shim: Shim, daemon: Stub, log: pathlib.Path) -> None:
    body = b'{"code":7,"msg":"%s"}' % (b"\\u001b[2J\\r\\n" + "\u2028é".encode() + b"\xff" + b"x" * 100_000)
    fails(daemon, body)
    assert shim(conf={"logFile": str(log)}).out == body
    text = log.read_text("utf-8")
    assert text.count("\n") == 1
    assert "\\x1b[2J\\r\\n\\u2028é" in text
    assert "bytes)" in text
    assert len(text) < 5000


def test_what_is_no_cni_error_is_shown(shim: Shim, daemon: Stub, log: pathlib.Path) -> None:
    fails(daemon, b"not json\n")
    assert shim(conf={"logFile": str(log)}).code == 1
    assert lines(log.read_bytes()) == [("error", "ADD of container c0ffee interface eth0: failed: not json\\n")]


def test_the_file_does_not_grow_without_bounds(shim: Shim, daemon: Stub, log: pathlib.Path) -> None:
    fails(daemon)
    conf: dict[str, object] = {"logFile": str(log), "logOptions": {"maxSize": 1, "maxBackups": 3}}
    aside = log.with_name("shim.log.1")
    for fill in (b"old\n", b"new\n"):
        log.write_bytes(fill * (1024 * 1024 // 4 - 8))
        assert shim(conf=conf).code == 1
        assert log.stat().st_size < 1000
        assert len(lines(log.read_bytes())) == 1
        assert aside.read_bytes().startswith(fill)
    assert shim(conf=conf).code == 1
    assert len(lines(log.read_bytes())) == 2
    assert sorted(path.name for path in log.parent.iterdir()) == ["shim.log", "shim.log.1"]


@pytest.mark.parametrize(
    "options", [None, {}, {"maxSize": 0}, {"maxSize": -1}, {"maxSize": "1"}, {"maxSize": 1e300}, []]
)
def test_without_a_size_it_is_that_of_the_daemons_log(
    shim: Shim, daemon: Stub, log: pathlib.Path, options: object
) -> None:
    fails(daemon)
    for size, is_put_aside in ((100 * 1024 * 1024 - 4096, False), (100 * 1024 * 1024, True)):
        with log.open("wb") as file:
            file.truncate(size)
        assert shim(conf={"logFile": str(log), "logOptions": options}).code == 1
        assert log.with_name("shim.log.1").exists() is is_put_aside


def test_many_at_once_lose_no_line(shim: Shim, daemon: Stub, log: pathlib.Path) -> None:
    fails(daemon)
    log.write_bytes(b"x" * (1024 * 1024))
    conf: dict[str, object] = {"logFile": str(log), "logOptions": {"maxSize": 1}}
    with ThreadPoolExecutor(16) as threads:
        assert [done.code for done in threads.map(lambda _: shim(conf=conf), range(64))] == [1] * 64
    aside = log.with_name("shim.log.1").read_bytes()
    assert aside.startswith(b"x" * (1024 * 1024))
    assert len(lines(log.read_bytes())) + len(lines(aside[1024 * 1024 :])) == 64


def test_nothing_without_a_file_or_stderr(shim: Shim, daemon: Stub) -> None:
    fails(daemon)
    assert shim(conf={"logLevel": "debug"}).err == b""
