"""The metrics port: what it answers, to whom, and over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

from multus_daemon.api.metrics_port import MetricsServer, serve_metrics
from multus_daemon.api.tls import Certificate
from multus_daemon.metrics import Metrics
from multus_daemon.runtime import aio
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings.keys import MetricsSettings, MetricsTls
from tests.e2e.server_process import free_port
from tests.unit.api.certificates import Pair
from tests.unit.api.harness import listening
from tests.waiting import eventually

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.access import Verdict

    Access = Callable[[str], Coroutine[Any, Any, Verdict]]


@contextlib.asynccontextmanager
async def serving(
    gates: Gates | None = None,
    access: Access | None = None,
    alive: Callable[[], Awaitable[object]] | None = None,
) -> AsyncIterator[int]:
    server = MetricsServer(Metrics(), gates or Gates(), 0, "127.0.0.1", access=access, alive=alive)
    async with listening(server) as port:
        yield port


async def ask(
    port: int, path: str, *headers: str, method: str = "GET", tls: ssl.SSLContext | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in lower case) and body of the answer."""
    name = "localhost" if tls else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name)
    with contextlib.closing(writer):
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
        writer.write("\r\n".join(lines).encode("utf-8", "surrogateescape"))
        async with asyncio.timeout(30):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    status, *rest = head.decode().split("\r\n")
    found = {key.lower(): value for key, _, value in (line.partition(": ") for line in rest)}
    assert "server" not in found
    return int(status.split()[1]), found, body


async def test_it_tells_whether_the_daemon_lives_and_is_ready() -> None:
    gates = Gates("networks")
    async with serving(gates) as port:
        assert (await ask(port, "/healthz"))[::2] == (200, b"")
        status, headers, body = await ask(port, "/readyz")
        assert (status, headers["content-type"]) == (503, "application/json")
        assert json.loads(body) == {"closed": {"networks": "not started"}}
        gates.open("networks")
        assert (await ask(port, "/readyz"))[::2] == (200, b"ok")
        gates.close("networks", "it is gone")
        assert (await ask(port, "/readyz"))[0] == 503


@pytest.mark.parametrize("path", ["/", "/cni", "/delegate", "/admin/status", "/metrics/", "/debug/pprof"])
async def test_it_answers_nothing_else(path: str) -> None:
    async with serving() as port:
        assert (await ask(port, path))[0] == 404
        assert (await ask(port, "/metrics", method="POST"))[0] == 405


class Judge:
    """Gives the verdict that a test sets."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict, self.tokens = verdict, list[str]()

    async def __call__(self, token: str) -> Verdict:
        self.tokens.append(token)
        return self.verdict


@pytest.mark.parametrize(
    ("verdict", "status", "text"),
    [
        ("allowed", 200, b"multus_build_info"),
        ("unauthenticated", 401, b"does not accept the token\n"),
        ("forbidden", 403, b"grant the non-resource URL"),
        ("unavailable", 503, b"can't review the token now"),
    ],
)
async def test_the_verdict_decides(verdict: Verdict, status: int, text: bytes) -> None:
    judge = Judge(verdict)
    async with serving(access=judge) as port:
        answered, headers, body = await ask(port, "/metrics", "Authorization: Bearer a.b-c_d~e+f/g==")
        assert (answered, text in body) == (status, True)
        assert headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
        assert judge.tokens == ["a.b-c_d~e+f/g=="]


@pytest.mark.parametrize(
    "header",
    ["X: y", "Authorization: ", "Authorization: Bearer", "Authorization: Bearer a b", "Authorization: Basic YTpi",
     "Authorization: Bearer \udcff", "Authorization: Bearer é"],
)  # fmt: skip
async def test_what_is_no_token_is_refused_unseen(header: str) -> None:
    judge = Judge("allowed")
    async with serving(access=judge) as port:
        status, headers, body = await ask(port, "/metrics", header)
    assert (status, headers["www-authenticate"], body) == (401, "Bearer", b"a bearer token is needed\n")
    assert judge.tokens == []


async def test_health_and_readiness_need_no_token() -> None:
    judge = Judge("unauthenticated")
    async with serving(Gates("pods"), judge) as port:
        assert [(await ask(port, path))[0] for path in ("/healthz", "/readyz", "/metrics")] == [200, 503, 401]
    assert judge.tokens == []


async def test_what_follows_a_request_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    may_answer = asyncio.Event()
    async with serving(alive=may_answer.wait) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /more HTTP/1.1\r\n\r\n")
            for _ in range(3):
                await asyncio.sleep(0.01)
                writer.write(b"x" * 1000)
            # The client may end its side, too.
            writer.write_eof()
            await asyncio.sleep(0.01)
            may_answer.set()
            async with asyncio.timeout(30):
                answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert caplog.records == []


@pytest.mark.parametrize("fault", [OSError(107, "Transport endpoint is not connected"), RuntimeError("a fault")])
async def test_a_fault_of_one_connection_ends_no_other(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that resets its connection between a refusal and the end of it is such a fault."""
    async with serving() as port:
        with monkeypatch.context() as patched:
            patched.setattr(MetricsServer, "_exchange", AsyncMock(side_effect=fault))
            with pytest.raises((ConnectionError, ValueError, IndexError)):
                await ask(port, "/healthz")
        assert (await ask(port, "/healthz"))[0] == 200
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == (
        [] if isinstance(fault, OSError) else [True]
    )


async def test_the_daemon_is_healthy_as_long_as_its_own_loop_runs() -> None:
    going = asyncio.Event()
    async with serving(alive=going.wait) as port:
        asked = [asyncio.create_task(ask(port, path)) for path in ("/healthz", "/readyz")]
        # Meanwhile the port itself is well.
        assert (await ask(port, "/metrics"))[0] == 200
        assert not any(task.done() for task in asked)
        going.set()
        assert [(await task)[0] for task in asked] == [200, 200]


# --- TLS -------------------------------------------------------------------------------------------------------------


async def trusting(pair: Pair) -> ssl.SSLContext:
    text = await asyncio.to_thread(pair.certificate.read_text)
    return await asyncio.to_thread(ssl.create_default_context, cadata=text)


@contextlib.asynccontextmanager
async def over_tls(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(Certificate.run, "__kwdefaults__", {"pause": 0.01})
    monkeypatch.setattr(aio.once_possible, "__kwdefaults__", {"retry": (0.01, 0.02)})
    settings = MetricsSettings(free_port(), tls=MetricsTls(str(pair.certificate), str(pair.key)))
    assert settings.port is not None
    task = asyncio.create_task(serve_metrics(Metrics(), Gates(), settings, ["127.0.0.1"]))
    try:
        yield settings.port
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_it_answers(port: int, pair: Pair) -> bytes:
    context = await trusting(pair)
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(ConnectionRefusedError, ssl.SSLCertVerificationError):
                return (await ask(port, "/metrics", tls=context))[2]
            await asyncio.sleep(0.01)


async def test_scrapes_go_on_while_the_certificate_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await asyncio.to_thread(Pair, tmp_path)
    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    async with over_tls(pair, monkeypatch) as port:
        assert b"multus_build_info" in await until_it_answers(port, pair)
        statuses: list[int] = []

        async def scrape() -> None:
            while True:
                statuses.append((await ask(port, "/metrics", tls=unchecked))[0])

        scraping = asyncio.create_task(scrape())
        for serial in (2, 3, 4):
            await asyncio.to_thread(pair.renew, serial)
            await until_it_answers(port, pair)
        scraping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scraping
    assert set(statuses) == {200}


async def test_it_opens_when_there_is_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = await asyncio.to_thread(Pair, tmp_path)
    key = await asyncio.to_thread(pair.key.read_bytes)
    await asyncio.to_thread(pair.key.unlink)
    async with over_tls(pair, monkeypatch) as port:
        await eventually(lambda: "no metrics: certificate" in caplog.text)
        with pytest.raises(ConnectionRefusedError):
            await ask(port, "/metrics")
        await asyncio.to_thread(pair.key.write_bytes, key)
        assert b"multus_build_info" in await until_it_answers(port, pair)
        # Not in plain text beside it.
        with pytest.raises((ConnectionError, IndexError)):
            await ask(port, "/metrics")
