"""The metrics port: who may read what, and its loop beside that of the daemon."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from multus_daemon import deadlines
from multus_daemon.api import tls
from multus_daemon.api.tcp import ALL, Head, Reply, TcpListener
from multus_daemon.metrics import Metrics, wants_openmetrics
from multus_daemon.runtime import side_loop
from multus_daemon.runtime.aio import SharedCalls
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings import MetricsSettings
from multus_daemon.spec.cni import gojson

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.access import Verdict

    Access = Callable[[str], Awaitable[Verdict]]
    """Judges a bearer token: `cluster.kube.access.TokenAccess`."""

METRICS_CONNECTIONS: Final = 16
"""Maximum number of concurrent connections to an address of the metrics port."""
METRICS_PER_SECOND: Final = 20
"""Maximum number of new ones in a second. They have a few scrapers, and probes."""
METRICS_SHARE: Final = 0.1
METRICS_RESERVE_SECONDS: Final = 0.25
"""Connections may use this share of a core, renderings as much, and this processor time at once."""
NODE_IPS: Final = "MULTUS_NODE_IPS"
"""Variable with the addresses of the node, comma separated: `status.hostIPs` of the daemon's pod."""

_TOKEN: Final = re.compile(r"(?i:bearer) +([A-Za-z0-9._~+/-]+=*)")
"""RFC 6750, section 2.1."""
_REFUSALS: Final = {
    "missing": (401, "a bearer token is needed"),
    "unauthenticated": (401, "the API server does not accept the token"),
    "forbidden": (403, "the user of the token may not get /metrics: grant the non-resource URL, verb get"),
    "unavailable": (503, "the API server can't review the token now; the daemon's log says why"),
}

T = TypeVar("T")

log = logging.getLogger(__name__)


class MetricsServer(TcpListener):
    """`/metrics`, `/healthz` and `/readyz` on a TCP port for any client; the daemon works without it."""

    def __init__(
        self,
        metrics: Metrics,
        gates: Gates,
        port: int,
        address: str = "",
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        access: Access | None = None,
        alive: Callable[[], Awaitable[object]] | None = None,
        retry: tuple[float, float] = (1, 60),
        seconds: float = deadlines.METRICS_SECONDS,
    ) -> None:
        """`address`: empty for all. `retry`: first and longest pause in seconds. `seconds`: life of a connection.

        `tls`: returns the context of a connection. `access`: who may read `/metrics`; None: any client. `alive`:
        returns if the daemon's event loop runs.
        """
        super().__init__(
            "metrics",
            port,
            address,
            connections=METRICS_CONNECTIONS,
            per_second=METRICS_PER_SECOND,
            seconds=seconds,
            handshake_seconds=deadlines.METRICS_HANDSHAKE_SECONDS,
            methods={"GET": False, "HEAD": False},
            retry=retry,
            tls=tls,
        )
        self._metrics = metrics
        self._gates = gates
        self._access = access
        self._alive = alive
        self._rendering = SharedCalls()
        self._share = side_loop.Share(METRICS_SHARE, METRICS_RESERVE_SECONDS)
        self._last: dict[bool, tuple[bytes, str]] = {}
        """The last rendering by format, while the share of processor time is used up."""

    async def run(self) -> None:
        """Serve until cancelled."""
        await self.serve(lambda asked: _Answer(asked, self._answer))

    async def _answer(self, asked: Head) -> Reply:
        if asked.path == "/metrics":
            return await self._scrape(asked)
        if asked.path not in ("/healthz", "/readyz"):
            return Reply(404, b"404: Not Found")
        if self._alive is not None:
            await self._alive()
        if asked.path == "/healthz":
            return Reply(200)
        closed = self._gates.closed
        return Reply(503, gojson.dumps({"closed": closed}), "application/json") if closed else Reply(200, b"ok")

    async def _scrape(self, asked: Head) -> Reply:
        if self._access is not None:
            token = _TOKEN.fullmatch(asked.fields.get("authorization", ""))
            verdict = await self._access(token[1]) if token else "missing"
            if verdict != "allowed":
                status, text = _REFUSALS[verdict]
                return Reply(status, f"{text}\n".encode(), more={"WWW-Authenticate": "Bearer"} if status == 401 else {})
        return Reply(200, *await self._text(asked.fields.get("accept", "")))

    async def _text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics. Concurrent scrapes share one rendering, and more than a few scrapers an earlier one."""
        wanted = wants_openmetrics(accept)
        if wanted in self._last and self._share.spend(0):
            return self._last[wanted]
        self._last.pop(wanted, None)
        return await self._rendering.of(wanted, functools.partial(self._render, wanted, accept))

    async def _render(self, wanted: bool, accept: str) -> tuple[bytes, str]:
        (text, kind), seconds = await asyncio.to_thread(_timed, functools.partial(self._metrics.render, accept))
        if self._share.spend(seconds):
            self._last[wanted] = text, kind
        return text, kind


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work` and the processor time that it takes."""
    begun = time.thread_time()
    return work(), time.thread_time() - begun


class _Answer(asyncio.Protocol):
    """Answers one request, whatever else the client sends."""

    def __init__(self, asked: Head, handler: Callable[[Head], Awaitable[Reply]]) -> None:
        self._asked, self._handler = asked, handler

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._work = asyncio.get_running_loop().create_task(self._answer(transport))

    async def _answer(self, transport: asyncio.Transport) -> None:
        try:
            reply = await self._handler(self._asked)
        except Exception:
            log.exception("%s failed", self._asked.path)
            reply = Reply(500)
        transport.write(reply.encode(with_body=self._asked.method != "HEAD"))
        transport.close()

    def eof_received(self) -> bool:
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        self._work.cancel()


def metrics_addresses(setting: str, environ: Mapping[str, str]) -> list[str]:
    """Return the addresses of the metrics port: the `setting`, else the node's, else all of them, as upstream."""
    if setting:
        return [setting]
    if addresses := environ.get(NODE_IPS, "").replace(" ", ""):
        return list(filter(None, addresses.split(",")))
    log.warning(
        "metricsPort is open on all addresses: set metricsAddress, or the variable %s as manifests do", NODE_IPS
    )
    return [ALL]


def metrics_tasks(
    metrics: Metrics, gates: Gates, settings: MetricsSettings, environ: Mapping[str, str], access: Access | None = None
) -> dict[str, Coroutine[Any, Any, None]]:
    """Return the daemon's root task of the metrics port; none without `metricsPort`. `access`: see `serve_metrics`."""
    if settings.port is None:
        return {}
    addresses = metrics_addresses(settings.address, environ)
    return {"metrics": serve_metrics(metrics, gates, settings, addresses, access)}


async def serve_metrics(
    metrics: Metrics, gates: Gates, settings: MetricsSettings, addresses: Iterable[str], access: Access | None = None
) -> None:
    """Serve the metrics port at these addresses until cancelled. With TLS, it opens when the certificate is usable.

    It has an event loop and a thread of its own: what strangers send takes no turn of the loop that serves pods.
    `access`: reviews tokens, in the caller's loop; needed with `settings.authorization`.
    """
    loop = asyncio.get_running_loop()
    share = side_loop.Share(METRICS_SHARE, METRICS_RESERVE_SECONDS)
    options: dict[str, Any] = {
        "alive": lambda: side_loop.ask(loop, functools.partial(asyncio.sleep, 0)),
    }
    if settings.authorization:
        assert access is not None
        options["access"] = lambda token: side_loop.ask(loop, functools.partial(access, token))

    async def serve() -> None:
        assert settings.port is not None
        async with asyncio.TaskGroup() as serving:
            if (files := settings.tls) is not None:
                pair = await tls.usable(Path(files.cert_file), Path(files.key_file), "metrics")
                serving.create_task(pair.run(), name="metrics certificate")
                options["tls"] = functools.partial(getattr, pair, "context")
            for address in addresses:
                server = MetricsServer(metrics, gates, settings.port, address, **options)
                serving.create_task(server.run(), name=f"metrics {address}")

    await side_loop.run(serve, share, name="metrics")
