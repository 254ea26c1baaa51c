"""TCP ports for any client, with bounded number and lifetime of connections: the metrics port, and the webhook's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web

from multus_daemon import deadlines
from multus_daemon.api import certificate
from multus_daemon.api.app import healthz, hide_server, http_runner, readyz
from multus_daemon.metrics import Metrics
from multus_daemon.metrics.exposition import wants_openmetrics
from multus_daemon.runtime.aio import Acceptor, SharedCalls
from multus_daemon.runtime.deadline import backoff
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings import MetricsSettings

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.access import Verdict

    Access = Callable[[str], Awaitable[Verdict]]
    """Judges a bearer token: `cluster.kube.access.TokenAccess`."""

METRICS_CONNECTIONS: Final = 16
"""Maximum number of concurrent connections to an address of the metrics port."""
NODE_IPS: Final = "MULTUS_NODE_IPS"
"""Variable with the addresses of the node, comma separated: `status.hostIPs` of the daemon's pod."""
ALL: Final = "::"
"""All addresses of both families, as `metricsAddress` names them."""

_TOKEN: Final = re.compile(r"(?i:bearer) +([A-Za-z0-9._~+/-]+=*)")
"""RFC 6750, section 2.1."""
_REFUSALS: Final = {
    "missing": (401, "a bearer token is needed"),
    "unauthenticated": (401, "the API server does not accept the token"),
    "forbidden": (403, "the user of the token may not get /metrics: grant the non-resource URL, verb get"),
    "unavailable": (503, "the API server can't review the token now; the daemon's log says why"),
}

log = logging.getLogger(__name__)


class TcpListener:
    """Pass connections to a port to a server of aiohttp.

    Binding is retried until it succeeds. The number of connections and the lifetime of each are bounded, and none is
    accepted while only the last quarter of the descriptors is free, which is for pods. Others wait in the kernel.
    """

    def __init__(
        self,
        name: str,
        port: int,
        address: str,
        *,
        connections: int,
        seconds: float,
        handshake_seconds: float,
        retry: tuple[float, float] = (1, 60),
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`name`: for the log. `address`: empty for all. `connections`: maximum number of concurrent connections.

        `seconds`: lifetime of one connection after its TLS handshake, which has `handshake_seconds`.
        `retry`: first and longest pause in seconds. `tls`: returns the context of a connection.
        """
        self._name = name
        self._asked_port = port
        self._address = address
        self._backlog = connections
        self._places = connections
        self.seconds = seconds
        self._handshake_seconds = handshake_seconds
        self._retry = retry
        self._acceptor: Acceptor
        self._tls = tls
        self.port: int | None = None
        """The bound port; None while there is none."""

    async def serve(self, runner: web.AppRunner) -> None:
        """Pass connections to `runner` until cancelled, then clean it up."""
        await runner.setup()
        try:
            listener = await self._bind()
            async with asyncio.TaskGroup() as connecting:
                take = functools.partial(self._take, runner, connecting)
                with contextlib.closing(Acceptor(listener, self._name, take, spares=True)) as self._acceptor:
                    await asyncio.get_running_loop().create_future()
        finally:
            self.port = None
            await runner.cleanup()

    async def _bind(self) -> socket.socket:
        where = self._address or "any address"
        for pause in backoff(*self._retry, jitter=0.1):
            try:
                listener = await asyncio.to_thread(_listen, self._address, self._asked_port, self._backlog)
            except OSError as error:
                log.error(
                    "no %s: can't listen on %s port %d: %s; next attempt in %.0f s",
                    self._name, where, self._asked_port, error.strerror or error, pause,
                )  # fmt: skip
                await asyncio.sleep(pause)
                continue
            self.port = listener.getsockname()[1]
            log.info("%s on %s port %d", self._name, where, self.port)
            return listener
        raise AssertionError  # pauses do not end

    def _take(self, runner: web.AppRunner, connecting: asyncio.TaskGroup, connection: socket.socket) -> None:
        self._places -= 1
        if not self._places:
            self._acceptor.pause()
        # A task, since a handshake waits for the other side.
        connecting.create_task(self._connect(connection, runner), name=f"{self._name} connection")

    def _release(self) -> None:
        self._places += 1
        self._acceptor.resume()

    async def _connect(self, connection: socket.socket, runner: web.AppRunner) -> None:
        protocol = _Connection(runner, self.seconds, self._release)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: cast(asyncio.Protocol, protocol),
                connection,
                ssl=self._tls() if self._tls else None,
                ssl_handshake_timeout=self._handshake_seconds if self._tls else None,
                ssl_shutdown_timeout=self.seconds if self._tls else None,
            )
        except OSError as error:
            log.debug("%s: no connection: %s", self._name, error)
        finally:
            # Otherwise the connection keeps the place until its end.
            if not protocol.is_made:
                self._release()
                connection.close()


class _Connection:
    """A connection that holds a place for a limited time. It passes all events to aiohttp's server."""

    def __init__(self, runner: web.AppRunner, seconds: float, release: Callable[[], None]) -> None:
        assert runner.server is not None
        self._server = runner.server()
        self._seconds = seconds
        self._release = release
        self._end: asyncio.TimerHandle | None = None
        self.is_made = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.is_made = True
        self._end = asyncio.get_running_loop().call_later(self._seconds, transport.abort)
        self._server.connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._release()
        if self._end is not None:
            self._end.cancel()
        self._server.connection_lost(exc)


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


def _listen(address: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket, for both families without an address or with ALL. Raises OSError."""
    if address not in ("", ALL):
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family, backlog=backlog)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=backlog)
    listener.setblocking(False)
    return listener


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
        retry: tuple[float, float] = (1, 60),
        seconds: float = deadlines.METRICS_SECONDS,
    ) -> None:
        """`address`: empty for all. `retry`: first and longest pause in seconds. `seconds`: life of a connection.

        `tls`: returns the context of a connection. `access`: who may read `/metrics`; None: any client.
        """
        super().__init__(
            "metrics",
            port,
            address,
            connections=METRICS_CONNECTIONS,
            seconds=seconds,
            handshake_seconds=deadlines.METRICS_HANDSHAKE_SECONDS,
            retry=retry,
            tls=tls,
        )
        self._metrics = metrics
        self._gates = gates
        self._access = access
        self._rendering = SharedCalls()

    async def run(self) -> None:
        """Serve until cancelled."""
        app = web.Application()
        app.router.add_get("/metrics", self._scrape)
        app.router.add_get("/healthz", healthz)
        app.router.add_get("/readyz", functools.partial(readyz, self._gates))
        app.on_response_prepare.append(hide_server)
        await self.serve(http_runner(app, head_timeout=self.seconds))

    async def _render(self, request: web.Request) -> web.Response:
        # Concurrent scrapes share one rendering, which takes processor time and a thread.
        accept = request.headers.get("Accept", "")
        render = functools.partial(asyncio.to_thread, self._metrics.render, accept)
        body, content_type = await self._rendering.of(wants_openmetrics(accept), render)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _scrape(self, request: web.Request) -> web.Response:
        if self._access is not None:
            token = _TOKEN.fullmatch(request.headers.get("Authorization", ""))
            verdict = await self._access(token[1]) if token else "missing"
            if verdict != "allowed":
                status, text = _REFUSALS[verdict]
                headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
                return web.Response(status=status, text=f"{text}\n", headers=headers)
        return await self._render(request)


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

    `access`: reviews tokens; needed with `settings.authorization`.
    """
    assert settings.port is not None
    if not settings.authorization:
        access = None
    else:
        assert access is not None
    async with asyncio.TaskGroup() as serving:
        tls = None
        if (files := settings.tls) is not None:
            pair = await certificate.usable(Path(files.cert_file), Path(files.key_file), "metrics")
            serving.create_task(pair.run(), name="metrics certificate")
            tls = functools.partial(getattr, pair, "context")
        for address in addresses:
            server = MetricsServer(metrics, gates, settings.port, address, tls=tls, access=access)
            serving.create_task(server.run(), name=f"metrics {address}")
