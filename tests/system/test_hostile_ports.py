"""Strangers at the open ports of a real daemon and a real webhook: neither requests nor other clients wait for them."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.server_process import free_port
from tests.real_daemon import RealDaemon
from tests.system.test_webhook import Webhook, judged, processor_seconds, review, webhook

__all__ = ["webhook"]

BOMB: Final = zlib.compress(bytes(1_000_000_000), 9)
"""1 MB that becomes 1 GB."""
LONGEST_SECONDS: Final = 5.0
"""Longest wait for an answer beside a stranger, on a busy machine."""
SHARE: Final = 0.25
"""Processor time of the daemon in a storm, as a share of a core. The bomb takes all of one."""
STORM_SECONDS: Final = 4.0
ADDRESS: Final = "127.0.0.1"
OTHER: Final = "127.0.0.2"
"""Address of a client beside the strangers."""
SMALL: Final = review('{"cniVersion":"1.0.0","type":"ptp","ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}')


def head(line: str, *fields: str) -> bytes:
    return "\r\n".join([line, "Host: a", *fields, "", ""]).encode()


def exchange(port: int, data: bytes, *, source: str = ADDRESS, seconds: float = 20) -> bytes:
    """The answer to these bytes; what has arrived of it where the connection is reset."""
    answer = b""
    with (
        socket.create_connection((ADDRESS, port), seconds, (source, 0)) as client,
        contextlib.suppress(ConnectionError),
    ):
        client.sendall(data)
        while part := client.recv(65536):
            answer += part
    return answer


class Stranger:
    """Calls a function again and again in a thread, until the end of the block."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._do, self._ended, self.calls = do, threading.Event(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError):
                self._do()
            self.calls += 1

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30)
        assert self.calls


def served_beside(process: int, work: Callable[[], object], seconds: float = STORM_SECONDS) -> None:
    """Call `work` for a while: no call takes long, and the process takes little processor time."""
    begun, before = time.monotonic(), processor_seconds(process)
    while (at := time.monotonic()) < begun + seconds:
        work()
        assert time.monotonic() - at < LONGEST_SECONDS
        time.sleep(0.2)
    assert processor_seconds(process) - before < SHARE * (time.monotonic() - begun)


class Opened(RealDaemon):
    """A daemon with a metrics port."""

    def __init__(self, root: Path) -> None:
        self.port = free_port()
        super().__init__(root, {"metricsPort": self.port, "metricsAddress": ADDRESS})

    def is_well(self) -> None:
        """It answers at its socket."""
        assert self.get("/healthz")[0] == 200

    def scrape(self, source: str = ADDRESS) -> bool:
        """Whether a scrape succeeds."""
        return exchange(self.port, head("GET /metrics HTTP/1.1"), source=source).startswith(b"HTTP/1.1 200 ")


def allowed(webhook: Webhook) -> bool:
    """Whether another client's review is answered."""
    connection = http.client.HTTPSConnection(
        ADDRESS, webhook.port, timeout=20, context=webhook.tls, source_address=(OTHER, 0)
    )
    with contextlib.closing(connection):
        connection.request("POST", "/validate", SMALL)
        found: bool = json.loads(connection.getresponse().read())["response"]["allowed"]
        return found


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    with Opened(tmp_path) as daemon:
        daemon.until(lambda: _answers(daemon.port), "the port is open")
        yield daemon


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return exchange(port, head("GET /healthz HTTP/1.1")).startswith(b"HTTP/1.1 200 ")
    return False


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize("path", ["/metrics", "/nope"])
def test_a_packed_body_is_refused_unread(opened: Opened, method: str, path: str) -> None:
    request = head(f"{method} {path} HTTP/1.1", "Content-Encoding: deflate", f"Content-Length: {len(BOMB)}") + BOMB
    with Stranger(lambda: exchange(opened.port, request)):
        served_beside(opened.pid, opened.is_well)
    answer = exchange(opened.port, request[: request.index(b"\r\n\r\n") + 4], source=OTHER)
    assert answer.split()[1] in (b"405", b"413", b"415")
    assert opened.scrape(OTHER)


def test_a_packed_body_at_the_socket_is_not_unpacked(opened: Opened) -> None:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(opened.socket))
    connection.request("POST", "/cni", BOMB, {"Content-Encoding": "deflate"})
    with contextlib.closing(connection):
        served_beside(opened.pid, opened.is_well)
        assert connection.getresponse().status == 400


def test_a_packed_review_is_refused_unread(webhook: Webhook) -> None:
    assert judged(webhook, SMALL)["allowed"]
    request = head("POST /validate HTTP/1.1", "Content-Encoding: deflate", f"Content-Length: {len(BOMB)}") + BOMB

    def send() -> bytes:
        answer = b""
        # Wrapped before it connects: `wrap_socket` leaves a connection open that is reset before the handshake.
        with (
            webhook.tls.wrap_socket(socket.socket(), server_hostname=ADDRESS) as client,
            contextlib.suppress(ConnectionError),
        ):
            client.settimeout(20)
            client.connect((ADDRESS, webhook.port))
            client.sendall(request)
            while part := client.recv(65536):
                answer += part
        return answer

    with Stranger(send):
        assert [allowed(webhook) for _ in range(50)] == [True] * 50


@contextlib.contextmanager
def _crowd(port: int, size: int) -> Iterator[list[socket.socket]]:
    """Connections that are opened at once."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(size)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex((ADDRESS, port))
        time.sleep(0.2)
        yield clients


def _slow(port: int) -> None:
    """Connections that each send a byte from time to time."""
    with _crowd(port, 40) as clients:
        for _ in range(20):
            for client in clients:
                with contextlib.suppress(OSError):
                    client.send(b"G")
            time.sleep(0.01)


def _idle(port: int) -> None:
    with _crowd(port, 200):
        time.sleep(0.2)


def _never_reads(port: int) -> None:
    with socket.create_connection((ADDRESS, port), 5) as client:
        client.sendall(head("GET /metrics HTTP/1.1") * 20)
        time.sleep(0.02)


def _chunks(port: int) -> None:
    exchange(port, head("GET /metrics HTTP/1.1", "Transfer-Encoding: chunked") + b"1\r\na\r\n" * 50_000)


def _noise(port: int) -> None:
    exchange(port, random.randbytes(100_000))


def _fields(port: int) -> None:
    exchange(port, head("GET /metrics HTTP/1.1", *[f"A{number}: {'b' * 8000}" for number in range(120)]))


STRANGERS: Final = {
    "slow": _slow,
    "idle": _idle,
    "never reads": _never_reads,
    "chunks": _chunks,
    "noise": _noise,
    "fields": _fields,
    "scrapes": lambda port: exchange(port, head("GET /metrics HTTP/1.1")),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_another_client_reads_the_metrics_beside_strangers(opened: Opened, kind: str) -> None:
    """The strangers have one address, the client another one."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(Stranger(lambda: STRANGERS[kind](opened.port)))
        time.sleep(0.5)

        def scrape() -> None:
            assert opened.scrape(OTHER)
            opened.is_well()

        served_beside(opened.pid, scrape)


REQUESTS: Final[dict[str, tuple[bytes, bytes]]] = {
    "absolute URI": (head("GET http://node:9059/metrics HTTP/1.1"), b"200"),
    "query": (head("GET /metrics?name[]=a HTTP/1.1"), b"200"),
    "1.0": (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
    "no body": (head("GET /metrics HTTP/1.1", "Content-Length: 0"), b"200"),
    "upgrade": (head("GET /metrics HTTP/1.1", "Connection: Upgrade", "Upgrade: h2c"), b"200"),
    "pipeline": (head("GET /metrics HTTP/1.1") * 50, b"200"),
    "body": (head("GET /metrics HTTP/1.1", "Content-Length: 5") + b"12345", b"413"),
    "half a body": (head("GET /metrics HTTP/1.1", "Content-Length: 5") + b"12", b"413"),
    "lengths": (head("GET /metrics HTTP/1.1", "Content-Length: 0", "Content-Length: 5"), b"400"),
    "negative": (head("GET /metrics HTTP/1.1", "Content-Length: -1"), b"400"),
    "chunked": (head("GET /metrics HTTP/1.1", "Transfer-Encoding: chunked") + b"0\r\n\r\n", b"411"),
    "encoded": (head("GET /metrics HTTP/1.1", "Content-Encoding: gzip"), b"415"),
    "expect": (head("GET /metrics HTTP/1.1", "Expect: 100-continue"), b"417"),
    "0.9": (b"GET /metrics\r\n\r\n", b"400"),
    "2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
    "connect": (head("CONNECT node:9059 HTTP/1.1"), b"400"),
    "folded": (head("GET /metrics HTTP/1.1", "A: b", " c"), b"400"),
    "zeros": (head("GET /metrics HTTP/1.1", "A: \0"), b"400"),
    "long path": (head(f"GET /{'a' * 9000} HTTP/1.1"), b"431"),
    "long head": (head("GET /metrics HTTP/1.1", f"A: {'b' * 65536}"), b"431"),
    "many fields": (head("GET /metrics HTTP/1.1", *["A: b"] * 200), b"431"),
    "post": (head("POST /metrics HTTP/1.1", "Content-Length: 0"), b"405"),
    "options": (head("OPTIONS /metrics HTTP/1.1"), b"405"),
    "elsewhere": (head("GET /admin/status HTTP/1.1"), b"404"),
}


def test_each_request_has_its_answer_and_the_connection_ends(opened: Opened) -> None:
    for name, (data, status) in REQUESTS.items():
        answer = exchange(opened.port, data)
        assert answer.split()[1:2] == [status], (name, answer[:200])
        assert answer.count(b"HTTP/1.1 ") == 1, name
        # Not sooner than strangers may ask.
        time.sleep(0.06)
    answer = exchange(opened.port, head("HEAD /metrics HTTP/1.1"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\n")


def test_half_handshakes_keep_no_review_waiting(webhook: Webhook) -> None:
    assert judged(webhook, SMALL)["allowed"]
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="a").do_handshake()
    half = hello.read()[:-20]

    def send() -> None:
        with _crowd(webhook.port, 70) as clients:
            for client in clients:
                with contextlib.suppress(OSError):
                    client.send(half)
            time.sleep(0.2)

    with Stranger(send):
        assert [allowed(webhook) for _ in range(50)] == [True] * 50
