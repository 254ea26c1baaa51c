"""The webhook's port: TLS, its certificate, what it bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from multus_daemon.api.tls import Certificate
from multus_daemon.metrics import Metrics
from multus_daemon.runtime import deadline
from multus_daemon.runtime.gates import Gates
from multus_tools import deadlines
from multus_tools.webhook import server
from multus_tools.webhook.server import WebhookServer
from tests.aside import Aside
from tests.unit.api.certificates import Pair
from tests.unit.api.harness import listening
from tests.waiting import eventually


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def echo(review: bytes) -> tuple[bytes, str, str]:
    if review == b"bad":
        raise ValueError("it is bad")
    if review == b"fault":
        raise RuntimeError("a fault of ours")
    return b'{"got": %d}' % len(review), "Pod", "success"


@contextlib.asynccontextmanager
async def serving(pair: Pair, answer=echo, metrics=None, **options) -> AsyncIterator[int]:
    tls = await asyncio.to_thread(Certificate, pair.certificate, pair.key)
    answers = {"/validate": answer, "/other": lambda review: (b"{}", "Pod", "success")}
    gates = options.pop("gates", None) or Gates()
    server = WebhookServer(answers, metrics or Metrics(), gates, lambda: tls.context, 0, "127.0.0.1", **options)
    async with listening(server, tls.run(pause=0.01)) as port:
        yield port


async def connect(port: int, pair: Pair):
    certificate = await asyncio.to_thread(pair.certificate.read_text)
    context = await asyncio.to_thread(ssl.create_default_context, cadata=certificate)
    return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake on a busy machine may take more than the product gives it."""
    monkeypatch.setattr(deadlines, "WEBHOOK_HANDSHAKE_SECONDS", 30.0)


async def get(port: int, pair: Pair, path: str) -> tuple[int, bytes]:
    return await exchange(port, pair, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


async def post(port: int, pair: Pair, body: bytes, *, path: str = "/validate") -> tuple[int, bytes]:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return await exchange(port, pair, head.encode() + body)


async def exchange(port: int, pair: Pair, request: bytes) -> tuple[int, bytes]:
    reader, writer = await connect(port, pair)
    try:
        writer.write(request)
        async with asyncio.timeout(30):
            answer = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    start, _, content = answer.partition(b"\r\n\r\n")
    assert b"Server:" not in start
    return int(start.split()[1]), content


async def test_a_review_is_answered_over_tls(pair: Pair) -> None:
    metrics = Metrics()
    async with serving(pair, metrics=metrics) as port:
        assert await post(port, pair, b"x" * 3_000_000) == (200, b'{"got": 3000000}')
        assert (await post(port, pair, b"bad"))[0] == 400
        assert (await post(port, pair, b"fault"))[0] == 500
        assert await post(port, pair, b"", path="/other") == (200, b"{}")
        assert (await post(port, pair, b"", path="/another"))[0] == 404
    shown = (await asyncio.to_thread(metrics.render))[0].decode()
    assert 'multus_webhook_reviews_total{kind="Pod",outcome="success"} 2.0' in shown
    assert 'multus_webhook_reviews_total{kind="other",outcome="error"} 2.0' in shown
    assert 'multus_webhook_reviews_total{kind="CronJob",outcome="refused"} 0.0' in shown


async def test_it_is_ready_once_it_knows_the_networks(pair: Pair) -> None:
    gates = Gates("networks")
    async with serving(pair, gates=gates) as port:
        status, body = await get(port, pair, "/readyz")
        assert (status, json.loads(body)) == (503, {"closed": {"networks": "not started"}})
        assert (await get(port, pair, "/healthz"))[0] == 200
        gates.open("networks")
        assert (await get(port, pair, "/readyz"))[0] == 200


async def test_a_body_has_a_limit(pair: Pair) -> None:
    async with serving(pair) as port:
        reader, writer = await connect(port, pair)
        writer.write(f"POST /validate HTTP/1.1\r\nHost: a\r\nContent-Length: {server.BODY_LIMIT + 1}\r\n\r\n".encode())
        sent = asyncio.create_task(_send(writer, server.BODY_LIMIT + 1))
        async with asyncio.timeout(30):
            assert b" 413 " in await reader.readline()
        sent.cancel()
        await asyncio.wait([sent])
        writer.close()


async def _send(writer: asyncio.StreamWriter, size: int) -> None:
    with contextlib.suppress(OSError):
        for _ in range(0, size, 65536):
            writer.write(b"x" * 65536)
            await writer.drain()


async def test_a_review_has_a_deadline_and_does_not_hold_up_others_for_ever(pair: Pair) -> None:
    leave, entered = threading.Event(), list[bytes]()

    def wait(review: bytes) -> tuple[bytes, str, str]:
        if review == b"slow":
            entered.append(review)
            leave.wait(30)
        return b"{}", "Pod", "success"

    async with serving(pair, wait, seconds=2.0) as port:
        slow = [asyncio.create_task(post(port, pair, b"slow")) for _ in range(server.AT_ONCE)]
        await eventually(lambda: len(entered) >= server.AT_ONCE)
        # All turns are taken.
        assert (await post(port, pair, b"quick"))[0] == 504
        leave.set()
        assert {status for status, _ in await asyncio.gather(*slow)} == {504}
        assert (await post(port, pair, b"quick"))[0] == 200


async def test_the_work_of_a_review_that_timed_out_stops(pair: Pair) -> None:
    stopped = threading.Event()

    def work(review: bytes) -> tuple[bytes, str, str]:
        try:
            while True:
                deadline.pause(0.01)
        finally:
            stopped.set()

    async with serving(pair, work, seconds=0.2) as port:
        assert (await post(port, pair, b"x"))[0] == 504
        assert await asyncio.to_thread(stopped.wait, 10)


async def test_large_reviews_are_judged_one_at_a_time_and_small_ones_meanwhile(pair: Pair) -> None:
    leave, lock, running = threading.Event(), threading.Lock(), []

    def work(review: bytes) -> tuple[bytes, str, str]:
        if len(review) > server.SMALL_BYTES:
            with lock:
                running.append(review)
                assert len(running) == 1
            leave.wait(10)
            with lock:
                running.clear()
        return b"{}", "Pod", "success"

    async with serving(pair, work, seconds=30) as port:
        large = [asyncio.create_task(post(port, pair, b"x" * (server.SMALL_BYTES + 1))) for _ in range(3)]
        await eventually(lambda: running)
        assert (await post(port, pair, b"x"))[0] == 200
        leave.set()
        assert {status for status, _ in await asyncio.gather(*large)} == {200}


async def test_a_review_that_is_too_large_is_answered_by_its_beginning(pair: Pair, monkeypatch) -> None:
    monkeypatch.setattr(server, "BODY_LIMIT", 100)
    metrics = Metrics()
    beginning = b'{"request": {"uid": "a-1", "kind": {"kind": "Pod"}}'
    async with serving(pair, metrics=metrics) as port:
        status, answered = await post(port, pair, beginning + b"x" * 100)
        assert (status, b"the review is larger than 100 bytes" in answered) == (200, True)
        assert (await post(port, pair, b"x" * 101))[0] == 413
    shown = (await asyncio.to_thread(metrics.render))[0].decode()
    assert 'multus_webhook_reviews_total{kind="Pod",outcome="warned"} 1.0' in shown
    assert 'multus_webhook_reviews_total{kind="other",outcome="error"} 1.0' in shown


async def test_a_new_certificate_is_shown_and_a_broken_one_is_not(pair: Pair, caplog) -> None:
    async with serving(pair) as port:
        await post(port, pair, b"x")
        before = await asyncio.to_thread(pair.certificate.read_text)
        await asyncio.to_thread(pair.renew, 2)
        after = await asyncio.to_thread(pair.certificate.read_text)
        assert before != after
        await _until_it_shows(port, after)
        assert (await post(port, pair, b"x"))[0] == 200
        # A pair that does not fit.
        await asyncio.to_thread(pair.certificate.write_text, before)
        await eventually(lambda: "the old one stays" in caplog.text)
        await _until_it_shows(port, after)
        await asyncio.to_thread(pair.renew, 3)
        await _until_it_shows(port, await asyncio.to_thread(pair.certificate.read_text))


def test_no_handshake_fails_while_a_new_certificate_is_taken(pair: Pair) -> None:
    tls = Certificate(pair.certificate, pair.key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    def renew() -> None:
        for serial in range(2, 40):
            pair.renew(serial)
            assert tls._renew()

    renewing = Aside(renew)
    count = 0
    while not renewing.done:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = tls.context.wrap_bio(to_server, to_client, server_side=True)
        ends = [server, client.wrap_bio(to_client, to_server)]
        while ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                ends[-1].do_handshake()
                ends.pop()
            ends.reverse()
        count += 1
    renewing.result()
    assert count > 10


async def _until_it_shows(port: int, certificate: str) -> None:
    async with asyncio.timeout(30):
        while await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port)) != certificate:
            await asyncio.sleep(0.01)


async def test_who_does_not_speak_tls_holds_no_place(pair: Pair, monkeypatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    async with serving(pair) as port:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(30):
                with contextlib.suppress(OSError):
                    await reader.read()
            writer.close()
        assert (await post(port, pair, b"x"))[0] == 200


async def test_who_says_nothing_holds_a_place_for_a_while_only(pair: Pair, monkeypatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    monkeypatch.setattr(deadlines, "WEBHOOK_HANDSHAKE_SECONDS", 1.0)
    async with serving(pair) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert (await post(port, pair, b"x"))[0] == 200
        for _, writer in silent:
            writer.close()


async def test_a_connection_without_a_handshake_ends(pair: Pair, monkeypatch) -> None:
    monkeypatch.setattr(deadlines, "WEBHOOK_HANDSHAKE_SECONDS", 0.1)
    monkeypatch.setattr(deadlines, "WEBHOOK_SECONDS", 60.0)
    async with serving(pair) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(30):
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
        writer.close()


def test_a_certificate_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="tls.crt"):
        Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")


def test_a_key_of_another_certificate(pair: Pair, tmp_path: Path) -> None:
    os.makedirs(tmp_path / "other")
    with pytest.raises(ssl.SSLError):
        Certificate(pair.certificate, Pair(tmp_path / "other").key)
