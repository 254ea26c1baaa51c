"""The API client: requests and watches in raw bytes, with deadlines, limits and errors of our own.

kubernetes_asyncio says how the API server is reached (`credentials`); its models are never built.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.cluster.kube.credentials import Source
from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError, ConfigurationError, from_answer
from multus_daemon.cluster.kube.transport import CONCURRENT_REQUESTS, Transport, as_unavailable, let_go, read, whole
from multus_daemon.runtime import timeline

log = logging.getLogger(__name__)

LINE_MAX_BYTES: Final = 8 * 1024 * 1024
"""Of a watch. An object has at most 1.5 MiB (etcd's limit)."""
RELOAD_SECONDS: Final = 5.0
"""Credentials that the server refused, or that could not be read, are read again after this at the earliest."""
CLOSE_SECONDS: Final = 1.0
"""A websocket waits so long for the other side to say goodbye."""
CREDENTIALS_MAX: Final = 3
"""So many may be refused in one request, where they are replaced while it is under way."""


class ApiClient:
    """Requests to the API server. An asynchronous context manager, or `close` it.

    Making one touches nothing; what the source says is read with the first request.
    """

    def __init__(
        self, source: Source, *, on_unauthorized: Callable[[], None] | None = None, websockets: int = 0
    ) -> None:
        """`on_unauthorized`: called where the server answers 401 to the newest credentials too; must not block.

        `websockets`: so many may be open at a time, beside requests and watches.
        """
        self._source = source
        self._websockets = websockets
        self._on_unauthorized = on_unauthorized
        self._transport: Transport | None = None
        self._stale = False
        self._loaded_at = float("-inf")
        self._loading = asyncio.Lock()
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)

    async def __aenter__(self) -> ApiClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, also those in use."""
        transport, self._transport = self._transport, None
        if transport:
            await transport.close()

    async def load(self) -> None:
        """Read what the source says, so that what is wrong with it shows now. Raises ConfigurationError."""
        await self._current()

    def reload(self) -> None:
        """Certificates or credentials have been replaced: new requests take new connections with the new ones."""
        self._stale = True
        self._loaded_at = float("-inf")

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout: float = deadlines.API_REQUEST_SECONDS,
    ) -> bytes:
        """One request; the body of the answer. `body` is JSON; `timeout` in seconds is for everything.

        Names in `path` are the caller's to escape. Raises ApiError, ApiUnavailableError, ConfigurationError.
        """
        began, outcome = time.monotonic(), "failed"
        try:
            with as_unavailable(f"{method} {path}", timeout):
                answer = self._answer(method, path, query or {}, body, content_type)
                async with asyncio.timeout(timeout), self._slots, answer as response:
                    found = await whole(response, f"{method} {path}")
            outcome = "done"
            return found
        finally:
            timeline.note(f"API server: {method} {path} {outcome}", time.monotonic() - began)

    async def lines(
        self,
        path: str,
        query: Mapping[str, str],
        *,
        inactivity: float = deadlines.WATCH_INACTIVITY_SECONDS,
        on_open: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[bytes, None]:
        """The lines of a watch, without their ends, until the server ends it. Use with `contextlib.aclosing`.

        `inactivity`: seconds without a byte after which the connection counts as dead; `on_open` is called when the
        server has accepted the watch. Raises as `request` does, also where the end comes within a line.
        """
        what = f"watch of {path}"
        with as_unavailable(what, inactivity):
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(deadlines.API_REQUEST_SECONDS):
                    response = await stack.enter_async_context(self._answer("GET", path, query, None, ""))
                on_open()
                rest_of_line = bytearray()
                while True:
                    async with asyncio.timeout(inactivity):
                        chunk = await response.content.readany()
                    if not chunk:
                        break
                    first, *others = chunk.split(b"\n")
                    rest_of_line += first
                    for other in others:
                        if rest_of_line:
                            yield bytes(rest_of_line)
                        rest_of_line = bytearray(other)
                    if len(rest_of_line) > LINE_MAX_BYTES:
                        raise ApiUnavailableError(f"{what}: a line is longer than {LINE_MAX_BYTES} bytes")
                if rest_of_line:
                    raise ApiUnavailableError(f"{what}: the connection ended within a line")

    @contextlib.asynccontextmanager
    async def websocket(
        self, path: str, query: Sequence[tuple[str, str]], *, protocols: Sequence[str], message_max: int
    ) -> AsyncIterator[Any]:
        """An open websocket, aiohttp's, for the block. `protocols`: one of them is chosen by the server, or none.

        `message_max`: bytes of one message. Deadlines are the caller's. Raises as `request` does; credentials that are
        refused are not replaced.
        """
        with as_unavailable(f"GET {path}", deadlines.API_REQUEST_SECONDS):
            transport = await self._current()
            async with transport.used():
                authorization = transport.access.header()
                headers = {"Authorization": authorization} if authorization else {}
                opened = await transport.upgrade(path, query, headers, protocols, message_max)
                patience = 0.0
                try:
                    yield opened
                    patience = CLOSE_SECONDS
                finally:
                    # aiohttp reads on to the goodbye of a peer that may send for ever. Cancelled, it hangs up.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(patience):
                            await opened.close()

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, query: Mapping[str, str], body: bytes | None, content_type: str
    ) -> AsyncIterator[Any]:
        """The response to a request, a successful one; once more with fresh credentials after a 401."""
        refused: list[str] = []
        while True:
            transport = await self._current()
            async with transport.used():
                headers = {"Accept": "application/json"}
                if content_type:
                    headers["Content-Type"] = content_type
                authorization = transport.access.header(fresh=bool(refused))
                if authorization:
                    headers["Authorization"] = authorization
                # Once with what was refused, too: an API server that is starting refuses everybody.
                again = not refused or (authorization not in refused and len(refused) < CREDENTIALS_MAX)
                response = await transport.send(method, path, query, body, headers)
                try:
                    if response.status == 401 and again and self._can_refresh(transport):
                        refused.append(authorization)
                        continue
                    if not 200 <= response.status < 300:
                        raise await self._refusal(response, f"{method} {path}")
                    yield response
                    return
                finally:
                    let_go(response)

    def _can_refresh(self, transport: Transport) -> bool:
        """Whether there may be better credentials than those which the server has just refused."""
        if transport.access.token_file or transport is not self._transport:
            return True
        # Whatever the kubeconfig has may have been replaced; but a server that refuses everything is not to make
        # every request read files and run plugins.
        if _now() - self._loaded_at > RELOAD_SECONDS:
            self._stale = True
        return self._stale

    async def _refusal(self, response: Any, request: str) -> ApiError | ApiUnavailableError:
        if response.status == 401 and self._on_unauthorized:
            self._on_unauthorized()
        body = await whole(response, request)
        return from_answer(response.status, response.reason or "", body, response.headers, request=request)

    async def _current(self) -> Transport:
        """The transport for a new request. Raises ConfigurationError where there is none."""
        if self._transport and not self._stale:
            return self._transport
        async with self._loading:
            if self._transport and (not self._stale or _now() - self._loaded_at < RELOAD_SECONDS):
                return self._transport
            old, self._loaded_at = self._transport, _now()
            self._stale = False
            try:
                new = Transport(*await asyncio.to_thread(read, self._source), self._websockets)
            except BaseException as error:
                self._stale = True
                if not isinstance(error, ConfigurationError | OSError):
                    raise
                problem = error if isinstance(error, ConfigurationError) else ConfigurationError(str(error))
                if old is None:
                    raise problem from error
                log.warning("credentials for the API server stay as they were: %s", problem)
                return old
            self._transport = new
        if old:
            await old.retire()
        return new


def _now() -> float:
    return asyncio.get_running_loop().time()
