"""`multus-probe`: the daemon's health, as the kubelet asks for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from multus_daemon import deadlines, probe


@contextmanager
def answering(path: Path, *parts: bytes) -> Iterator[list[bytes]]:
    """A peer that takes one request, which is in the list afterwards, and answers in parts."""
    asked: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(4096))
                for part in parts:
                    connection.sendall(part)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield asked
        thread.join(10)


def ended(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        probe.main(arguments)
    return caught.value.code


def test_a_ready_daemon(tmp_path: Path) -> None:
    with answering(tmp_path / "s", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"ok") as asked:
        probe.main(["readyz", str(tmp_path / "s")])
    assert asked[0].startswith(b"GET /readyz?gates HTTP/1.1\r\n")


def test_the_reason_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = b'{"closed": {"networks": "not listed yet"}}'
    with answering(tmp_path / "s", b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + reason):
        assert ended("readyz", str(tmp_path / "s")) == 1
    assert capsys.readouterr().err == f"503 {reason.decode()}\n"


@pytest.mark.parametrize("answer", [b"", b"220 mail.example ESMTP\r\n", b"HTTP/1.1\r\n\r\n"])
def test_what_is_no_http_is_no_health(tmp_path: Path, answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(tmp_path / "s", answer):
        assert ended("healthz", str(tmp_path / "s")) == 1
    assert "no answer from" in capsys.readouterr().err


def test_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("healthz", str(tmp_path / "s")) == 1
    assert capsys.readouterr().err.startswith(f"no answer from {tmp_path}/s: ")


def test_a_daemon_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "PROBE_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        assert ended("healthz", str(tmp_path / "s")) == 1


@pytest.mark.parametrize("arguments", [[], ["metrics"], ["healthz", "a", "b"]])
def test_usage(arguments: list[str]) -> None:
    assert ended(*arguments) == 2
