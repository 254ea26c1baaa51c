"""Requests of every bad kind to the ports, in one process: the longest turn of the event loop, in processor time.

python -m tests.fuzz ports --seconds 600
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, Final

from multus_daemon.api.metrics_port import MetricsServer
from multus_daemon.metrics import Metrics
from multus_daemon.runtime import side_loop
from multus_daemon.runtime.gates import Gates
from multus_tools.webhook.server import WebhookServer

LONGEST_SECONDS: Final = 0.05
AT_ONCE: Final = 8
_BOMB: Final = zlib.compress(bytes(50_000_000), 9)
_LINES: Final = (
    b"GET /metrics HTTP/1.1", b"GET /readyz HTTP/1.0", b"HEAD /healthz HTTP/1.1", b"POST /validate HTTP/1.1",
    b"GET http://a:1/metrics?x=y HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET /metrics",
    b"PRI * HTTP/2.0",
)  # fmt: skip
_FIELDS: Final = (
    b"Host: a", b"Content-Length: 5", b"Content-Length: 60000", b"Content-Length: -1", b"Transfer-Encoding: chunked",
    b"Content-Encoding: deflate", b"Content-Encoding: gzip", b"Expect: 100-continue", b"Connection: Upgrade",
    b"Upgrade: h2c", b"Connection: keep-alive", b"Accept: \xff, */*;q=x",
    b"Accept: application/openmetrics-text; version=1.0.0",
    b"Authorization: Bearer a", b"A:" + b" " * 4000, b"A: " + b"b" * 9000, b"Cookie: " + b"a=b;" * 1500,
    b" folded", b"", b"\0",
)  # fmt: skip
_BODIES: Final = (
    b"", b"12345", b"{" * 5000, _BOMB[:60000], b"1\r\na\r\n" * 10_000, b"0\r\n\r\n", b"\xff" * 70_000,
    b"GET /metrics HTTP/1.1\r\n\r\n" * 500,
)  # fmt: skip
_ENDS: Final = (b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"")


def request(chance: random.Random) -> bytes:
    """Return the bytes of one connection."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.choice((1, 100, 20_000)))
    fields = [chance.choice(_FIELDS) for _ in range(chance.choice((0, 1, 2, 3, 5, 70)))]
    end = chance.choice(_ENDS)
    data = bytearray(end.join([chance.choice(_LINES), *fields]) + end * 2 + chance.choice(_BODIES))
    for _ in range(chance.choice((0, 0, 1, 5))):
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.choice((0, 1, 50))] = chance.randbytes(chance.choice((0, 1, 3)))
    return bytes(data)


async def _send(port: int, data: bytes, chance: random.Random) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                step = chance.choice((len(data), len(data), 1000, 1))
                for at in range(0, min(len(data), 200 * step), max(1, step)):
                    writer.write(data[at : at + step])
                    await asyncio.sleep(0)
                if chance.random() < 0.7:
                    await asyncio.wait_for(reader.read(100_000), 0.2)
            finally:
                writer.transport.abort()


def _servers() -> list[MetricsServer | WebhookServer]:
    metrics = Metrics()
    answers: dict[str, Callable[[bytes], Any]] = {"/validate": lambda review: (b"{}", "Pod", "success")}
    webhook = WebhookServer(answers, metrics, Gates(), lambda: None, 0, "127.0.0.1")  # type: ignore[arg-type,return-value]
    # Plain, and without the limit that would spare the parsers.
    webhook._tls = None
    servers: list[MetricsServer | WebhookServer] = [MetricsServer(metrics, Gates(), 0, "127.0.0.1"), webhook]
    for server in servers:
        server._per_second = 1_000_000
    return servers


async def fuzz(seconds: float, seed: int) -> tuple[int, float]:
    """Return the number of requests, and the longest turn of the ports' loop in seconds of processor time.

    Raises AssertionError if a port does not answer any more.
    """
    longest, count, end = 0.0, 0, time.monotonic() + seconds
    servers, run = _servers(), asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        nonlocal longest
        begun = time.thread_time()
        run(handle)
        if threading.current_thread().name == "ports":
            longest = max(longest, time.thread_time() - begun)

    async def serve() -> None:
        async with asyncio.TaskGroup() as serving:
            for server in servers:
                serving.create_task(server.run())

    async def one(chance: random.Random) -> None:
        nonlocal count
        while time.monotonic() < end:
            count += 1
            await _send(chance.choice(servers).port or 0, request(chance), chance)

    running = asyncio.create_task(side_loop.run(serve, side_loop.Share(1, 1), name="ports"))
    while any(server.port is None for server in servers):
        await asyncio.sleep(0.01)
    asyncio.events.Handle._run = timed  # type: ignore[method-assign,assignment]
    try:
        await asyncio.gather(*[one(random.Random(seed + number)) for number in range(AT_ONCE)])
        for server in servers:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            async with asyncio.timeout(30):
                assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
            writer.close()
    finally:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
        running.cancel()
        await asyncio.wait([running])
    return count, longest


def main(seconds: int) -> int:
    """Print what was found; return the exit status."""
    seed = random.randrange(1_000_000)
    count, longest = asyncio.run(fuzz(seconds, seed))
    print(f"seed {seed}: {count} requests, longest turn of the loop {longest * 1000:.1f} ms of processor time")
    return 0 if longest < LONGEST_SECONDS else 77
