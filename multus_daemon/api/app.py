"""The HTTP server of the unix socket: its routes and its access check."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from multus_daemon import deadlines
from multus_daemon.api import wire
from multus_daemon.api.admin import PATH as ADMIN_PATH
from multus_daemon.api.admin import ROOT as ADMIN_ROOT
from multus_daemon.api.admin import AdminApi
from multus_daemon.api.callers import peer
from multus_daemon.api.cni import CniApi
from multus_daemon.metrics import Metrics
from multus_daemon.node import allowances
from multus_daemon.runtime import fs
from multus_daemon.runtime.aio import Acceptor, StartError
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InternalError, Origin

SOCKET_NAME: Final = "multus.sock"
BODY_LIMIT: Final = 24 * 1024 * 1024
"""Maximum bytes of a body: the shim's 16 MiB of stdin in base64, and its variables."""
BACKLOG: Final = 1024
_METHODS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("/cni", "/delegate"), ("POST",)),
    **dict.fromkeys(("/healthz", "/readyz"), ("GET", "POST")),
}
# sockaddr_un has 108 bytes, the last one a NUL.
_MAX_SOCKET_PATH = 107
_TURNS_TO_A_REQUEST: Final = 10
"""Turns of the event loop that suffice from accept to the handler; measured: four."""
# Shared directories: making one of these private would break the host.
_SHARED: Final = frozenset({"/", "/run", "/var/run", "/tmp", "/var/tmp", "/host/run", "/host/var/run"})  # noqa: S108

log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")


def application(
    api: CniApi,
    gates: Gates,
    metrics: Metrics,
    *,
    admin: AdminApi | None = None,
    allowed_uids: frozenset[int] | None = None,
) -> web.Application:
    """Return the application with the socket's paths. `allowed_uids`: users that may call; None: all, for tests."""
    app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_edge(metrics, allowed_uids)])
    routes: dict[str, Handler] = {
        "/cni": api.handle,
        "/delegate": api.handle_delegate,
        "/healthz": functools.partial(_healthz, api),
        "/readyz": functools.partial(_readyz, api, gates),
        **({ADMIN_PATH: admin.handle} if admin is not None else {}),
    }
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    app.on_response_prepare.append(_hide_server)
    return app


async def _healthz(api: CniApi, _request: web.Request) -> web.Response:
    """Answer an empty 200. Upstream's shim asks this before a request; since v4.3.1 not before an ADD."""
    api.announce()
    return web.Response()


async def _readyz(api: CniApi, gates: Gates, request: web.Request) -> web.Response:
    """Answer like upstream: an empty 200, or an empty 500 once the daemon stops. With `?gates`: see `_gates`.

    Upstream's shim polls this before each ADD until it is 200. It is 200 also with a closed gate: the ADD itself then
    waits, or says why it fails.
    """
    if "gates" in request.query:
        return _gates(gates)
    if api.is_stopping:
        return web.Response(status=500, content_type="application/json")
    api.announce()
    return web.Response(content_type="application/json")


def _gates(gates: Gates) -> web.Response:
    """Answer 200 `ok`, or 503 and `{"closed": {"<gate>": "<reason>"}}`. Both have `degraded`, in the form of `closed`.

    If not all pods get their networks, `podsGetNetworks` is the first key: `no`, or `in part`.
    """
    found = {"closed": gates.closed, "degraded": gates.degraded.closed}
    found = {key: reasons for key, reasons in found.items() if reasons}
    if not found:
        return web.Response(text="ok")
    answer = {"podsGetNetworks": "no" if "closed" in found else "in part", **found}
    status = 503 if "closed" in found else 200
    return web.Response(status=status, body=gojson.dumps(answer, sort_keys=False), content_type="application/json")


def _edge(metrics: Metrics, allowed_uids: frozenset[int] | None) -> Any:
    """Return the middleware that checks who calls, turns exceptions into answers, counts, and closes connections."""

    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response: web.StreamResponse | None = _refusal(request, metrics, allowed_uids)
            if response is None:
                methods = _METHODS.get(request.path, ())
                if not methods or request.method in methods:
                    response = await handler(request)
                else:
                    # Upstream's answer, before the body is read.
                    headers = {"X-Content-Type-Options": "nosniff", "Allow": ", ".join(methods)}
                    response = web.Response(status=405, text="Method not allowed\n", headers=headers)
        except web.HTTPException as error:
            # Upstream's 404 has no body.
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
    if caller is not None and caller[1] in allowed_uids:
        return None
    metrics.refused_peers.inc()
    who = f"user {caller[1]} (process {caller[0]})" if caller else "an unknown user"
    log.error("%s %s refused: called by %s", request.method, request.path, who)
    error = InternalError(
        f"{who} may not call the multus daemon", remedy="only root and the daemon's own user may", origin=Origin.CLIENT
    )
    stdout = wire.wants_stdout(request.headers.getall("Accept", ()))
    return wire.encode_error(error, stdout=stdout, status=403)


async def _hide_server(_request: web.Request, response: web.StreamResponse) -> None:
    """Remove the header `Server`, which names the libraries."""
    response.headers.pop("Server", None)


def _client_faults(record: logging.LogRecord) -> bool:
    """Filter for aiohttp's log: an error with a traceback about a client's malformed HTTP becomes a debug line."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    record.msg, record.args, record.exc_info = "not a valid HTTP request: %s", (error.message,), None
    return _http_log.isEnabledFor(logging.DEBUG)


_http_log.addFilter(_client_faults)


class UnixServer:
    """The server of `<directory>/multus.sock`, for root and the daemon's own user."""

    def __init__(
        self,
        api: CniApi,
        gates: Gates,
        metrics: Metrics,
        directory: Path,
        *,
        admin: AdminApi | None = None,
        allowed_uids: frozenset[int] | None = None,
        connections: int = allowances.CONNECTIONS_MAX,
    ) -> None:
        """`allowed_uids`: None for root and the daemon's own user. `connections`: maximum number of concurrent ones."""
        self.path = directory / SOCKET_NAME
        self._api = api
        self._gates = gates
        uids = frozenset({0, os.getuid()}) if allowed_uids is None else allowed_uids
        self._app = application(api, gates, metrics, admin=admin, allowed_uids=uids)
        self._runner: web.AppRunner | None = None
        self._changing = asyncio.Lock()
        self._acceptor: Acceptor | None = None
        self._connecting: set[asyncio.Task[Any]] = set()
        self._connections = connections
        self._bound: os.stat_result

    async def start(self) -> None:
        """Listen, and replace the socket of an earlier daemon. If it raises StartError, it leaves nothing behind."""
        runner = web.AppRunner(
            self._app,
            # A megabyte could become a gigabyte, on the event loop.
            auto_decompress=False,
            access_log=None,
            logger=_http_log,
            keepalive_timeout=deadlines.HEAD_SECONDS,
            lingering_time=deadlines.LINGER_SECONDS,
            tcp_keepalive=False,
            # The requests are drained before.
            shutdown_timeout=deadlines.CONNECTIONS_SECONDS,
        )
        await runner.setup()
        try:
            await self._open(runner)
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner

    async def _open(self, runner: web.AppRunner) -> None:
        assert runner.server is not None
        try:
            listener, self._bound = await asyncio.to_thread(_bind, self.path)
        except OSError as error:
            raise StartError(f"can't listen on {self.path}: {error.strerror or error}; check socketDir") from error
        if self._acceptor:
            self._acceptor.close()
        self._acceptor = Acceptor(listener, "socket", functools.partial(self._connect, runner.server))
        log.info("listening on %s", self.path)

    def _connect(self, server: web.Server, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(server, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        self._pause_while_full(server)

    def _pause_while_full(self, server: web.Server) -> None:
        assert self._acceptor is not None
        if len(server.connections) + len(self._connecting) < self._connections:
            self._acceptor.resume()
        else:
            self._acceptor.pause()
            asyncio.get_running_loop().call_later(deadlines.ROOM_LOOK_SECONDS, self._pause_while_full, server)

    async def keep_published(self) -> None:
        """For ever: make the socket's file again if it is gone, or if the daemon that replaced it has died."""
        problem = ""
        while True:
            await asyncio.sleep(deadlines.SOCKET_LOOK_SECONDS)
            async with self._changing:
                try:
                    if self._runner and not await asyncio.to_thread(_is_served, self.path, self._bound):
                        await self._open(self._runner)
                        log.warning(
                            "socket %s is made again: its file, or the daemon that had replaced it, was gone", self.path
                        )
                        if problem:
                            self._gates.open("socket")
                        problem = ""
                except (OSError, StartError) as error:
                    if str(error) != problem:
                        problem = str(error)
                        log.error("the socket can't be published again: %s", problem)
                        self._gates.close("socket", problem)

    async def stop(self, timeout: float) -> int:
        """Wait up to `timeout` seconds until no verb runs, stop accepting, and return the number of cancelled verbs.

        The socket stays until then, so that DELs are served. An accepted request is served or refused; other
        connections end without an answer. In both cases our shim asks the next daemon.
        """
        end = time.monotonic() + timeout
        await self._api.settle(timeout)
        async with self._changing:
            runner, self._runner = self._runner, None
        if runner is None:
            return 0
        await asyncio.to_thread(_withdraw, self.path, self._bound)
        # Earlier connections may still be in the backlog or unread. They need turns of the loop to become requests,
        # which take longer than the sleep on a busy machine.
        await asyncio.sleep(0.01)
        assert self._acceptor is not None
        while self._acceptor.accept():
            pass
        for _ in range(_TURNS_TO_A_REQUEST):
            await asyncio.sleep(0)
        self._acceptor.close()
        cut = await self._api.drain(end - time.monotonic())
        await runner.cleanup()
        if cut:
            log.error("the daemon stops: %d CNI requests were cancelled after %g s", cut, timeout)
        return cut


def _is_served(path: Path, bound: os.stat_result) -> bool:
    """Return True if the file at `path` is the socket `bound`, or that of another living daemon. Raises OSError."""
    try:
        return os.path.samestat(path.lstat(), bound) or fs.is_listening(path)
    except FileNotFoundError:
        return False


def _bind(path: Path) -> tuple[socket.socket, os.stat_result]:
    """Return a socket that listens at `path`, and the status of its file. Raises StartError, OSError."""
    length = len(os.fsencode(path))
    if length > _MAX_SOCKET_PATH:
        raise StartError(f"{path} is too long: {length} bytes, and a socket's path may have {_MAX_SOCKET_PATH}")
    _refuse_foreign(path)
    _prepare_directory(path.parent)
    # Not longer than `path`, so within the limit; scanners skip dot names.
    temporary = path.parent / f".m{secrets.token_hex(4)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(temporary))
        # No client can connect between bind and listen, so the mode is right from the first moment.
        temporary.chmod(0o600)
        listener.listen(BACKLOG)
        _refuse_foreign(path)
        bound = temporary.lstat()
        temporary.rename(path)
    except BaseException:
        listener.close()
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return listener, bound


def _prepare_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise StartError(f"{directory} is not a directory; check socketDir") from error
    status = directory.stat()
    if str(directory.resolve()) in _SHARED or status.st_mode & stat.S_ISVTX:
        log.warning(
            "directory %s has other files, so its mode is not changed; give the socket a directory of its own",
            directory,
        )
    elif stat.S_IMODE(status.st_mode) != 0o700:
        directory.chmod(0o700)


def _refuse_foreign(path: Path) -> None:
    """Raise StartError if there is a file at `path` that is not a socket."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"{path} exists and is not a socket; remove it, or give socketDir another value")


def _withdraw(path: Path, bound: os.stat_result) -> None:
    """Remove the socket file unless a successor has replaced it."""
    try:
        if os.path.samestat(path.lstat(), bound):
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("can't remove %s: %s", path, error)
