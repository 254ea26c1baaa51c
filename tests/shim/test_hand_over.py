"""A daemon that stops while the request is on its way: the next one gets it, once it is there."""

from __future__ import annotations

import json
import socket
import threading
import time
import typing

import pytest

from tests.shim.conftest import http

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shim.conftest import Request, Shim, Stub

VERBS = ["ADD", "DEL", "CHECK", "GC", "STATUS"]
MOST = 7
"""How often a request is sent at most."""


def close(conn: socket.socket) -> None:
    """The end of the stream, the request having been read."""


def refuse(conn: socket.socket) -> None:
    """Answer like our own daemon when it stops."""
    conn.sendall(http(b'{"code":11,"msg":"shutting down"}', "503 Service Unavailable"))


def cut(sent: bytes) -> Callable[[socket.socket], None]:
    """The daemon was killed while it wrote its answer."""
    return lambda conn: conn.sendall(sent)


ENDS: dict[str, Callable[[socket.socket], None]] = {
    "closed": close,
    "503": refuse,
    "cut in the status line": cut(b"H"),
    "cut after an interim reply": cut(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "cut in the head": cut(http(b"x")[:40]),
    "cut before the body": cut(http(b"x" * 100)[:-100]),
    "cut in the body": cut(http(b"x" * 100)[:-1]),
    "cut in a chunk": cut(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"),
    "cut between chunks": cut(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"),
}


def first_ends(daemon: Stub, how: Callable[[socket.socket], None], times: int) -> None:
    """The first `times` requests end so, the others are answered."""

    def behave(conn: socket.socket, request: Request) -> None:
        if len(daemon.requests) <= times:
            how(conn)
        else:
            conn.sendall(http(b"done"))

    daemon.behaviour = behave


@pytest.mark.waits
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("verb", VERBS)
def test_the_request_is_sent_again(shim: Shim, daemon: Stub, verb: str, how: str) -> None:
    first_ends(daemon, ENDS[how], 2)
    result = shim(verb)
    assert (result.code, result.out) == (0, b"done")
    assert len(daemon.requests) == 3
    assert len({request.body for request in daemon.requests}) == 1
    assert not shim.cni_dir.exists()


@pytest.mark.waits
@pytest.mark.parametrize("verb", VERBS)
def test_not_for_ever(shim: Shim, daemon: Stub, verb: str) -> None:
    first_ends(daemon, close, 1000)
    result = shim(verb)
    assert len(daemon.requests) == MOST
    assert result.seconds < 10
    if verb == "DEL":
        assert result.code == 0
        assert len(list(shim.spool.iterdir())) == 1
    else:
        assert result.error["code"] == 999
        assert "closed the connection without a reply" in result.error["msg"]


@pytest.mark.waits
def test_a_daemon_that_says_503_for_ever_is_quoted(shim: Shim, daemon: Stub) -> None:
    first_ends(daemon, refuse, 1000)
    result = shim()
    assert len(daemon.requests) == MOST
    assert (result.code, json.loads(result.out)["msg"]) == (1, "shutting down")


@pytest.mark.parametrize("status", ["500 Internal Server Error", "400 Bad Request"])
def test_an_answer_is_an_answer(shim: Shim, daemon: Stub, status: str) -> None:
    daemon.answer(http(b'{"code":7,"msg":"no"}', status))
    assert shim().error["code"] == 7
    assert len(daemon.requests) == 1


@pytest.mark.parametrize("sent", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n\r\nno length"])
def test_what_is_no_answer_is_not_asked_for_again(shim: Shim, daemon: Stub, sent: bytes) -> None:
    daemon.answer(sent)
    assert shim().error["code"] == 999
    assert len(daemon.requests) == 1


@pytest.mark.waits
def test_a_del_whose_answer_was_cut_off_waits_for_the_successor(shim: Shim, daemon: Stub) -> None:
    """The shim waits as long as for a missing daemon, and spools nothing."""

    def behave(conn: socket.socket, request: Request) -> None:
        if len(daemon.requests) > 1:
            conn.sendall(http())
            return
        away = daemon.path.with_name("away")
        daemon.path.rename(away)
        threading.Timer(2.0, away.rename, [daemon.path]).start()
        conn.sendall(http(b"{}")[:-1])

    daemon.behaviour = behave
    result = shim("DEL")
    assert (result.code, result.out, len(daemon.requests)) == (0, b"", 2)
    assert 1.9 < result.seconds < 8
    assert not shim.cni_dir.exists()


@pytest.mark.waits
def test_the_deadline_is_one_for_all_attempts(shim: Shim, daemon: Stub) -> None:
    def behave(conn: socket.socket, request: Request) -> None:
        daemon.stopped.wait(0.4)

    daemon.behaviour = behave
    result = shim.hasty()
    assert result.error["code"] == 11
    assert 0.9 < result.seconds < 8
    assert len(daemon.requests) < MOST


@pytest.mark.waits
def test_connections_that_nobody_accepted(shim: Shim) -> None:
    """They wait in the backlog of a listener that closes, and are reset; the successor comes a little later."""
    path = shim.socket_dir / "multus.sock"
    old = socket.socket(socket.AF_UNIX)
    old.bind(str(path))
    old.listen(16)
    results: list[tuple[int, bytes]] = []

    def call(verb: str) -> None:
        result = shim(verb)
        results.append((result.code, result.out))

    threads = [threading.Thread(target=call, args=(verb,)) for verb in ("ADD", "ADD", "DEL", "DEL")]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    path.unlink()
    old.close()
    time.sleep(0.5)
    with socket.socket(socket.AF_UNIX) as new:
        new.bind(str(path))
        new.listen(16)
        new.settimeout(20)
        for _ in threads:
            conn, _ = new.accept()
            with conn:
                while not conn.recv(65536).endswith(b'"}'):
                    pass
                conn.sendall(http(b"done"))
        for thread in threads:
            thread.join()
    assert results == [(0, b"done")] * 4
    assert not shim.cni_dir.exists()


@pytest.mark.waits
@pytest.mark.parametrize("verb", ["ADD", "DEL"])
def test_a_successor_that_does_not_come(shim: Shim, daemon: Stub, verb: str) -> None:
    def behave(conn: socket.socket, request: Request) -> None:
        daemon.path.unlink()

    daemon.behaviour = behave
    result = shim.hasty(verb)
    assert 0.4 < result.seconds < 8
    if verb == "DEL":
        assert (result.code, len(list(shim.spool.iterdir()))) == (0, 1)
    else:
        assert result.error["code"] == 11
        assert "ENOENT" in result.error["msg"]
