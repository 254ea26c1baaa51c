"""The HTTP edge: which path goes where, who may call, the unix socket, the metrics port."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from multus_daemon import deadlines
from multus_daemon.api import wire
from multus_daemon.api.admin import PATH as ADMIN_PATH
from multus_daemon.api.admin import ROOT as ADMIN_ROOT
from multus_daemon.api.admin import AdminApi
from multus_daemon.api.callers import peer
from multus_daemon.api.cni import CniApi, to_response
from multus_daemon.api.health import Readiness, healthz
from multus_daemon.api.tcp import TcpListener
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.aio import SharedCalls
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.cni.errors import InternalError

SOCKET_NAME: Final = "multus.sock"
BODY_LIMIT: Final = 24 * 1024 * 1024
"""Bytes of a request's body: the 16 MiB of stdin that the shim takes, in base64, and its variables."""
BACKLOG: Final = 1024
METRICS_CONNECTIONS: Final = 16
"""That are accepted at once on the port of the metrics."""
# sockaddr_un has 108 bytes, the last one a NUL.
_MAX_SOCKET_PATH = 107
_TURNS_TO_A_REQUEST: Final = 10
"""Of the event loop: accept, make the transport, read and parse, start the handler. Four were enough."""
# Directories of many owners: making one of these private would break the host.
_SHARED: Final = frozenset({"/", "/run", "/var/run", "/tmp", "/var/tmp", "/host/run", "/host/var/run"})  # noqa: S108

log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")


class ListenError(Exception):
    """The socket can't be made; the message names the path and what to do."""


# --- the application -------------------------------------------------------------------------------------------------


def application(
    api: CniApi,
    gates: Gates,
    metrics: Metrics,
    *,
    admin: AdminApi | None = None,
    allowed_uids: frozenset[int] | None = None,
) -> web.Application:
    """Everything that is served on the socket. `allowed_uids`: who may call, None for everybody (tests over TCP)."""
    app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_edge(metrics, allowed_uids)])
    for path, handler, methods in (
        ("/cni", api.handle, ("POST",)),
        ("/delegate", api.handle_delegate, ("POST",)),
        ("/healthz", healthz, ("GET", "POST")),
        ("/readyz", Readiness(gates).readyz, ("GET", "POST")),
    ):
        app.router.add_route("*", path, _only(methods, handler), expect_handler=_expected)
    if admin is not None:
        app.router.add_route("*", ADMIN_PATH, admin.handle, expect_handler=_expected)
    # So that what is nowhere goes through the same.
    app.router.add_route("*", "/{path:.*}", _nowhere, expect_handler=_expected)
    app.on_response_prepare.append(hide_server)
    return app


def _only(
    methods: tuple[str, ...], handler: Callable[[web.Request], Awaitable[web.Response]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """`handler` for `methods`; any other gets upstream's 405, before its body is read."""

    async def checked(request: web.Request) -> web.Response:
        if request.method in methods:
            return await handler(request)
        return web.Response(
            status=405,
            text="Method not allowed\n",
            headers={"X-Content-Type-Options": "nosniff", "Allow": ", ".join(methods)},
        )

    return checked


async def _nowhere(_request: web.Request) -> web.Response:
    raise web.HTTPNotFound


async def _expected(request: web.Request) -> None:
    """Before the middleware: what a client expects that can't be had is refused behind it, as anything else is."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The head of the answer is still to come.
        request.writer.output_size = 0


def _require_known_expectation(request: web.Request) -> None:
    expected = request.headers.get("Expect", "100-continue").lower()
    if request.version >= HttpVersion11 and expected != "100-continue":
        raise web.HTTPExpectationFailed


def _edge(metrics: Metrics, allowed_uids: frozenset[int] | None) -> Any:
    """The middleware around everything: who calls, what goes wrong, what is counted; one request per connection."""

    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        response: web.StreamResponse
        try:
            refused = _refusal(request, metrics, allowed_uids)
            if refused is None:
                _require_known_expectation(request)
            response = refused or await handler(request)
        except web.HTTPException as error:
            # 404 above all; upstream's has no body.
            log.warning("%s %s: %d %s", request.method, request.path, error.status, error.reason)
            response = web.Response(status=error.status)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            response = web.Response(status=500)
        response.force_close()
        path = ADMIN_ROOT if request.path.startswith(ADMIN_ROOT + "/") else request.path
        metrics.request(path, response.status, request.method)
        return response

    return edge


def _refusal(request: web.Request, metrics: Metrics, allowed_uids: frozenset[int] | None) -> web.Response | None:
    if allowed_uids is None:
        return None
    caller = peer(request)
    if caller is not None and caller.uid in allowed_uids:
        return None
    metrics.refused_peer()
    who = f"user {caller.uid} (process {caller.pid})" if caller else "an unknown user"
    log.error("%s %s refused: called by %s", request.method, request.path, who)
    error = InternalError(f"{who} may not call the multus daemon", "only root and the daemon's own user may")
    stdout = wire.wants_stdout(",".join(request.headers.getall("Accept", ())))
    return to_response(wire.encode_error(error, stdout=stdout, status=403))


async def hide_server(_request: web.Request, response: web.StreamResponse) -> None:
    """Say nothing of the libraries: for `on_response_prepare`."""
    response.headers.pop("Server", None)


class _ClientFaults(logging.Filter):
    """What is no HTTP is the client's fault: a debug line, where aiohttp would log an error with a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        record.msg, record.args, record.exc_info = "not a valid HTTP request: %s", (error.message,), None
        return _http_log.isEnabledFor(logging.DEBUG)


_client_faults = _ClientFaults()


def http_runner(app: web.Application, *, head_timeout: float) -> web.AppRunner:
    """What serves `app`. `head_timeout`: seconds for a request's head to arrive."""
    _http_log.addFilter(_client_faults)
    return web.AppRunner(
        app,
        access_log=None,
        logger=_http_log,
        keepalive_timeout=head_timeout,
        lingering_time=deadlines.LINGER_SECONDS,
        tcp_keepalive=False,
        # By then the requests have been drained.
        shutdown_timeout=deadlines.CONNECTIONS_SECONDS,
    )


# --- the unix socket -------------------------------------------------------------------------------------------------


class UnixServer:
    """`<directory>/multus.sock`, for root and the daemon's own user."""

    def __init__(
        self,
        api: CniApi,
        gates: Gates,
        metrics: Metrics,
        directory: Path,
        *,
        admin: AdminApi | None = None,
        allowed_uids: frozenset[int] | None = None,
        head_timeout: float = deadlines.HEAD_SECONDS,
    ) -> None:
        """`allowed_uids`: root and our own user where None."""
        self.path = directory / SOCKET_NAME
        self._api = api
        uids = frozenset({0, os.getuid()}) if allowed_uids is None else allowed_uids
        self._app = application(api, gates, metrics, admin=admin, allowed_uids=uids)
        self._head_timeout = head_timeout
        self._runner: web.AppRunner | None = None
        self._site: web.BaseSite | None = None
        self._inode: tuple[int, int] | None = None

    async def start(self) -> None:
        """Listen. The socket appears under its name when it accepts, in place of a predecessor's.

        Raises ListenError; nothing is left behind then.
        """
        try:
            temporary, listener = await asyncio.to_thread(_bind, self.path)
        except OSError as error:
            raise ListenError(f"can't listen on {self.path}: {error.strerror or error}; check socketDir") from error
        runner = http_runner(self._app, head_timeout=self._head_timeout)
        try:
            await runner.setup()
            self._site = web.SockSite(runner, listener, backlog=BACKLOG)
            await self._site.start()
            self._inode = await asyncio.to_thread(_publish, temporary, self.path)
        except BaseException as error:
            await runner.cleanup()
            listener.close()
            with contextlib.suppress(OSError):
                temporary.unlink()
            if isinstance(error, OSError):
                raise ListenError(f"can't listen on {self.path}: {error}") from error
            raise
        self._runner = runner
        log.info("listening on %s", self.path)

    async def stop(self, timeout: float) -> int:
        """Accept nothing more, wait up to `timeout` seconds for what runs; the number of verbs that were cut.

        What was accepted is served, or told that it was not; what was not accepted sees its connection end without a
        byte. The native shim asks the successor in both cases.
        """
        if self._runner is None or self._site is None:
            return 0
        await asyncio.to_thread(_withdraw, self.path, self._inode)
        # Who connected before the name was gone may still be in the backlog, or not have been read yet. From there to a
        # request it takes turns of the loop, which on a busy machine are not through when the time is.
        await asyncio.sleep(0.01)
        for _ in range(_TURNS_TO_A_REQUEST):
            await asyncio.sleep(0)
        await self._site.stop()
        cut = await self._api.drain(timeout)
        await self._runner.cleanup()
        self._runner = self._site = self._inode = None
        if cut:
            log.error("stopped with %d CNI requests cut off after %g s", cut, timeout)
        return cut


def _bind(path: Path) -> tuple[Path, socket.socket]:
    """A listening socket of mode 0600 beside `path`, under another name. Blocks. Raises ListenError and OSError."""
    length = len(os.fsencode(path))
    if length > _MAX_SOCKET_PATH:
        raise ListenError(f"{path} is too long: {length} bytes, and a socket's path may have {_MAX_SOCKET_PATH}")
    _refuse_foreign(path)
    _prepare_directory(path.parent)
    # Not longer than `path`, so within the limit; a dot name, which scanners pass over.
    temporary = path.parent / f".m{secrets.token_hex(4)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(temporary))
        # Between bind and listen nobody can connect, so the mode is right from the first moment.
        temporary.chmod(0o600)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return temporary, listener


def _prepare_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ListenError(f"{directory} is no directory; check socketDir") from error
    status = directory.stat()
    if str(directory.resolve()) in _SHARED or status.st_mode & stat.S_ISVTX:
        log.warning("%s is shared with others and keeps its mode; give the socket a directory of its own", directory)
    elif stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)


def _refuse_foreign(path: Path) -> None:
    """Raise ListenError where `path` is something else than a socket: it is not ours to remove."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} exists and is no socket; remove it, or give socketDir another value")


def _publish(temporary: Path, path: Path) -> tuple[int, int]:
    """Give the socket its name, atomically; what tells it from another. Blocks. Raises ListenError and OSError."""
    _refuse_foreign(path)
    status = temporary.lstat()
    temporary.rename(path)
    return status.st_dev, status.st_ino


def _withdraw(path: Path, inode: tuple[int, int] | None) -> None:
    """Remove the socket file if it is still that of `inode`: a successor may have put its own there. Blocks."""
    try:
        status = path.lstat()
        if (status.st_dev, status.st_ino) == inode:
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("can't remove %s: %s", path, error)


# --- the metrics port ------------------------------------------------------------------------------------------------


class MetricsServer:
    """`/metrics` on a TCP port, to which anybody may connect; the daemon works without."""

    def __init__(
        self,
        metrics: Metrics,
        port: int,
        address: str = "",
        *,
        retry: tuple[float, float] = (1, 60),
        seconds: float = deadlines.METRICS_SECONDS,
    ) -> None:
        """`address`: empty for all, as upstream. `retry`: the first and the longest pause in seconds.

        `seconds`: for one connection, from its beginning to its end.
        """
        self._metrics = metrics
        self._seconds = seconds
        self._listener = TcpListener(
            "metrics", port, address, connections=METRICS_CONNECTIONS, seconds=seconds, retry=retry
        )
        self._rendering = SharedCalls()

    @property
    def port(self) -> int | None:
        """The port that is listened on; None while there is none."""
        return self._listener.port

    async def run(self) -> None:
        """Serve until cancelled."""
        app = web.Application()
        app.router.add_get("/metrics", self._render)
        app.on_response_prepare.append(hide_server)
        # Prometheus keeps its connection between scrapes only if they are close together; neither is needed.
        await self._listener.serve(http_runner(app, head_timeout=self._seconds))

    async def _render(self, _request: web.Request) -> web.Response:
        # Of several who ask at once all get the same: it takes processor time, and a thread.
        render = functools.partial(asyncio.to_thread, self._metrics.render)
        body, content_type = await self._rendering.of("metrics", render)
        return web.Response(body=body, headers={"Content-Type": content_type})
