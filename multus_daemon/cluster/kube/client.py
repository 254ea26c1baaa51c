"""The API client: requests and watches in raw bytes, with deadlines, limits and errors of our own.

kubernetes_asyncio says how the API server is reached (`credentials`); its models are never built. Its own transport is
not used: for each request it looks for `~/.netrc` in a thread, and it closes a connection that is idle for 15 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
import urllib.parse
import urllib.request
from asyncio import sslproto
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from multus_daemon import __version__, deadlines
from multus_daemon.cluster.kube.credentials import Access, Source
from multus_daemon.cluster.kube.errors import (
    ApiError,
    ApiUnavailableError,
    ConfigurationError,
    KubeError,
    NoAnswerError,
    from_answer,
)
from multus_daemon.cluster.kube.library import aiohttp
from multus_daemon.runtime import timeline

log = logging.getLogger(__name__)

CONCURRENT_REQUESTS: Final = 16
WATCHES: Final = 4
KEPT_SECONDS: Final = 60.0
"""How long an idle connection stays open for the next request: less than the 90 s of kube-apiserver, so that it is not
closed there while a request is on its way."""
READ_BUFFER_BYTES: Final = 2 * 1024 * 1024
"""Of a connection; an event of a watch comes in few pieces."""
TLS_BUFFER_BYTES: Final = 32 * 1024
"""Of a connection, for what comes encrypted: two records of TLS. asyncio takes 256 KiB and touches all of it, and in a
burst of pods there are up to CONCURRENT_REQUESTS connections."""
LINE_MAX_BYTES: Final = 8 * 1024 * 1024
"""Of a watch. An object has at most 1.5 MiB (etcd's limit)."""
ANSWER_MAX_BYTES: Final = 128 * 1024 * 1024
"""Of any other answer: the pods of a node come in one, some 5 MiB for 250 of them."""
RELOAD_SECONDS: Final = 5.0
"""Credentials that the server refused, or that could not be read, are read again after this at the earliest."""
CLOSE_SECONDS: Final = 1.0
"""A websocket waits so long for the other side to say goodbye."""
CREDENTIALS_MAX: Final = 3
"""So many may be refused in one request, where they are replaced while it is under way."""

_TRANSPORT_ERRORS: Final = (
    OSError,
    TimeoutError,
    # They have no base among the above.
    aiohttp.ClientError,
    aiohttp.http_exceptions.HttpProcessingError,
)


class _Transport:
    """Connections with one set of credentials; closed when it is retired and nobody uses it any more."""

    def __init__(self, access: Access, tls: ssl.SSLContext, websockets: int) -> None:
        self.access = access
        configuration = access.configuration
        # Of all connections of the process: asyncio has no parameter for it.
        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
        self._host = str(configuration.host).rstrip("/")
        self._options: dict[str, Any] = {}
        if configuration.proxy:
            self._options |= {"proxy": configuration.proxy, "proxy_headers": configuration.proxy_headers}
        if configuration.tls_server_name:
            self._options["server_hostname"] = configuration.tls_server_name
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONCURRENT_REQUESTS + WATCHES + websockets, ssl=tls, keepalive_timeout=KEPT_SECONDS
            ),
            # Of websockets: `ws_connect` drops the body of a refusal, which says why.
            raise_for_status=_refuse_upgrade,
            # No deadlines of its own.
            timeout=aiohttp.ClientTimeout(),
            # It looks for proxies, and for passwords in `~/.netrc`, in threads and with each request.
            trust_env=not configuration.proxy and _is_proxied_by_environment(self._host),
            read_bufsize=READ_BUFFER_BYTES,
        )
        self._users = 0
        self._retired = False

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """The transport stays open for the block."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            await self._close_if_done()

    async def retire(self) -> None:
        """Close it, at once or after its last user."""
        self._retired = True
        await self._close_if_done()

    async def close(self) -> None:
        """Close it now, whoever uses it."""
        await self._session.close()

    async def _close_if_done(self) -> None:
        if self._retired and not self._users:
            await self._session.close()

    async def send(
        self, method: str, path: str, query: Mapping[str, str], body: bytes | None, headers: Mapping[str, str]
    ) -> Any:
        """The response, its body not read yet."""
        url = f"{self._host}{path}?{urllib.parse.urlencode(query)}" if query else self._host + path
        return await self._session.request(
            method, url, data=body, headers=headers, raise_for_status=False, **self._options
        )

    async def upgrade(
        self,
        path: str,
        query: Sequence[tuple[str, str]],
        headers: Mapping[str, str],
        protocols: Sequence[str],
        message_max: int,
    ) -> Any:
        """The open websocket."""
        return await self._session.ws_connect(
            f"{self._host}{path}?{urllib.parse.urlencode(query)}",
            headers=headers,
            protocols=protocols,
            max_msg_size=message_max,
            **self._options,
        )


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
        self._transport: _Transport | None = None
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
            with _as_unavailable(f"{method} {path}", timeout):
                answer = self._answer(method, path, query or {}, body, content_type)
                async with asyncio.timeout(timeout), self._slots, answer as response:
                    found = await _whole(response, f"{method} {path}")
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
        with _as_unavailable(what, inactivity):
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

    async def stream(self, path: str, *, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """`lines`, as the certificate approver knows it."""
        async with contextlib.aclosing(self.lines(path, query)) as lines:
            async for line in lines:
                yield line

    @contextlib.asynccontextmanager
    async def websocket(
        self, path: str, query: Sequence[tuple[str, str]], *, protocols: Sequence[str], message_max: int
    ) -> AsyncIterator[Any]:
        """An open websocket, aiohttp's, for the block. `protocols`: one of them is chosen by the server, or none.

        `message_max`: bytes of one message. Deadlines are the caller's. Raises as `request` does; credentials that are
        refused are not replaced.
        """
        with _as_unavailable(f"GET {path}", deadlines.API_REQUEST_SECONDS):
            transport = await self._current()
            async with transport.used():
                headers = {"User-Agent": f"multus-daemon/{__version__}"}
                if authorization := transport.access.header():
                    headers["Authorization"] = authorization
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
                headers = {"User-Agent": f"multus-daemon/{__version__}", "Accept": "application/json"}
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
                    _let_go(response)

    def _can_refresh(self, transport: _Transport) -> bool:
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
        body = await _whole(response, request)
        return from_answer(response.status, response.reason or "", body, response.headers, request=request)

    async def _current(self) -> _Transport:
        """The transport for a new request. Raises ConfigurationError where there is none."""
        if self._transport and not self._stale:
            return self._transport
        async with self._loading:
            if self._transport and (not self._stale or _now() - self._loaded_at < RELOAD_SECONDS):
                return self._transport
            old, self._loaded_at = self._transport, _now()
            self._stale = False
            try:
                new = _Transport(*await asyncio.to_thread(_read, self._source), self._websockets)
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


def _read(source: Source) -> tuple[Access, ssl.SSLContext]:
    """What the source says, and TLS as it asks for it. Blocks. Raises ConfigurationError, OSError."""
    access = source.load()
    configuration = access.configuration
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.disable_strict_ssl_verification:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return access, context


def _is_proxied_by_environment(host: str) -> bool:
    """Whether `HTTPS_PROXY` and the like name a proxy for this URL, and `NO_PROXY` does not except it."""
    url = urllib.parse.urlsplit(host)
    return url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or "")


def _let_go(response: Any) -> None:
    """Put the connection back where the body was read to its end; end it otherwise, without a word to the server."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        # Closing it in good order waits 30 s for a server that may be gone to say goodbye in TLS, and nobody waits
        # for that: the connection would outlive the client.
        connection.transport.abort()
    response.release()


async def _refuse_upgrade(response: Any) -> None:
    """Raise what the answer to a request for a websocket says where it is none."""
    if response.status == 101:
        return
    request = f"{response.method} {response.url.path}"
    try:
        body = await _whole(response, request)
    finally:
        _let_go(response)
    raise from_answer(response.status, response.reason or "", body, response.headers, request=request)


async def _whole(response: Any, what: str) -> bytes:
    """The body of an answer, of any length up to the limit. Raises ApiUnavailableError."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ANSWER_MAX_BYTES:
            raise ApiUnavailableError(f"{what}: the answer is longer than {ANSWER_MAX_BYTES} bytes")
    return bytes(body)


@contextlib.contextmanager
def _as_unavailable(what: str, seconds: float) -> Iterator[None]:
    """The edge at which errors of the transport become ours."""
    try:
        yield
    except KubeError:
        raise
    except _TRANSPORT_ERRORS as error:
        plain = isinstance(error, TimeoutError) and not str(error)
        reason = f"nothing heard within {seconds:g} s" if plain else str(error) or type(error).__name__
        raise NoAnswerError(f"{what}: {reason}") from error


def _now() -> float:
    return asyncio.get_running_loop().time()
