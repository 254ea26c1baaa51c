"""The metrics port: its paths, who may read them, and its event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multus_daemon import deadlines
from multus_daemon.api.tcp import ALL, Head, Reply, TcpListener
from multus_daemon.api.tls import Certificate
from multus_daemon.metrics import Metrics, wants_openmetrics
from multus_daemon.runtime import side_loop
from multus_daemon.runtime.aio import SharedCalls, once_possible
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings.keys import MetricsSettings
from multus_daemon.spec.cni import gojson

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.access import Verdict

    Access = Callable[[str], Coroutine[Any, Any, Verdict]]
    """Judges a bearer token: `cluster.kube.access.TokenAccess`."""

METRICS_CONNECTIONS: Final = 16
"""Maximum number of concurrent connections to an address of the metrics port."""
METRICS_PER_SECOND: Final = 20
"""Maximum number of new connections to an address in a second; a few scrapers and probes need less."""
METRICS_SHARE: Final = 0.1
METRICS_RESERVE_SECONDS: Final = 0.25
"""Seconds of processor time that connections, or renderings, may use at once, beyond their share of a core."""
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
    ) -> None:
        """`address`: to bind to; empty for all addresses.

        `tls`: returns the TLS context of a connection; None: plain HTTP. `access`: decides who may read `/metrics`;
        None: any client. `alive`: returns as soon as the daemon's event loop has a turn.
        """
        super().__init__(
            "metrics",
            port,
            address,
            connections=METRICS_CONNECTIONS,
            per_second=METRICS_PER_SECOND,
            seconds=deadlines.METRICS_SECONDS,
            handshake_seconds=deadlines.METRICS_HANDSHAKE_SECONDS,
            methods={"GET": False, "HEAD": False},
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

    async def answer(self, head: Head, body: asyncio.StreamReader) -> Reply:
        """Answer with the metrics, if the client may read them, or with the daemon's health."""
        if head.path != "/metrics":
            if self._alive is not None:
                await self._alive()
            return health(self._gates, head.path)
        if self._access is not None:
            token = _TOKEN.fullmatch(head.fields.get("authorization", ""))
            verdict = await self._access(token[1]) if token else "missing"
            if verdict != "allowed":
                status, text = _REFUSALS[verdict]
                return Reply(status, f"{text}\n".encode(), more={"WWW-Authenticate": "Bearer"} if status == 401 else {})
        return Reply(200, *await self._text(head.fields.get("accept", "")))

    async def _text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics. Concurrent scrapes share one rendering; too many scrapes get an earlier one."""
        wanted = wants_openmetrics(accept)
        if wanted in self._last and self._share.spend(0):
            return self._last[wanted]
        self._last.pop(wanted, None)
        return await self._rendering.of(wanted, functools.partial(self._render, wanted, accept))

    async def _render(self, wanted: bool, accept: str) -> tuple[bytes, str]:
        def render() -> tuple[tuple[bytes, str], float]:
            begun = time.thread_time()
            return self._metrics.render(accept), time.thread_time() - begun

        rendered, seconds = await asyncio.to_thread(render)
        if self._share.spend(seconds):
            self._last[wanted] = rendered
        return rendered


def health(gates: Gates, path: str) -> Reply:
    """Return the answer to `/healthz` and `/readyz`; 404 for other paths."""
    if path not in ("/healthz", "/readyz"):
        return Reply(404, b"404: Not Found")
    if path == "/healthz":
        return Reply(200)
    closed = gates.closed
    return Reply(503, gojson.dumps({"closed": closed}), "application/json") if closed else Reply(200, b"ok")


def metrics_tasks(
    metrics: Metrics, gates: Gates, settings: MetricsSettings, environ: Mapping[str, str], access: Access | None = None
) -> dict[str, Coroutine[Any, Any, None]]:
    """Return the root task of the metrics port, by name; empty without `metricsPort`. `access`: see `serve_metrics`.

    It binds to `metricsAddress`, else to the node's addresses, else to all, as upstream.
    """
    if settings.port is None:
        return {}
    of_node = filter(None, environ.get(NODE_IPS, "").replace(" ", "").split(","))
    addresses = [settings.address] if settings.address else list(of_node)
    if not addresses:
        log.warning(
            "metricsPort is open on all addresses: set metricsAddress, or the variable %s as manifests do", NODE_IPS
        )
    return {"metrics": serve_metrics(metrics, gates, settings, addresses or [ALL], access)}


async def serve_metrics(
    metrics: Metrics, gates: Gates, settings: MetricsSettings, addresses: Iterable[str], access: Access | None = None
) -> None:
    """Serve the metrics port at these addresses until cancelled. With TLS, listen once the certificate is usable.

    It has an event loop and a thread of its own, so that its clients take no turn of the loop that serves pods.
    `access` reviews tokens, in the caller's loop; needed with `settings.authorization`.
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
                load = functools.partial(Certificate, Path(files.cert_file), Path(files.key_file))
                missing = f"no metrics: certificate {files.cert_file}, key {files.key_file}"
                pair = await once_possible(load, missing)
                serving.create_task(pair.run(), name="metrics certificate")
                options["tls"] = functools.partial(getattr, pair, "context")
            for address in addresses:
                server = MetricsServer(metrics, gates, settings.port, address, **options)
                serving.create_task(server.run(), name=f"metrics {address}")

    await side_loop.run(serve, share, name="metrics")
