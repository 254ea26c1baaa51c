"""The API client: requests and watches in raw bytes, with our own deadlines, limits and errors.

kubernetes_asyncio only reads the configuration (`credentials`). Its transport is not used: for each request it looks
for `~/.netrc` in a thread, and it closes a connection after 15 s of idleness.
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

import aiohttp

from multus_daemon import __version__, deadlines
from multus_daemon.cluster.kube import errors
from multus_daemon.cluster.kube.credentials import Access, Source
from multus_daemon.cluster.kube.errors import (
    AnswerTooLongError,
    ApiUnavailableError,
    ConfigurationError,
    KubeError,
    NoAnswerError,
)
from multus_daemon.runtime import timeline

log = logging.getLogger(__name__)

CONCURRENT_REQUESTS: Final = 16
WATCHES: Final = 4
KEPT_SECONDS: Final = 60.0
"""An idle connection stays open this long. kube-apiserver closes it after 90 s; it must not do so during a request."""
READ_BUFFER_BYTES: Final = 2 * 1024 * 1024
TLS_BUFFER_BYTES: Final = 32 * 1024
"""Two TLS records. asyncio takes 256 KiB for each connection and touches all of it."""
ANSWER_MAX_BYTES: Final = 16 * 1024 * 1024  # the list of 250 pods is one answer of about 5 MiB
LINE_MAX_BYTES: Final = 8 * 1024 * 1024  # an object has at most 1.5 MiB (etcd's limit)
RELOAD_SECONDS: Final = 5.0  # between two attempts to read refused or unreadable credentials again
CLOSE_SECONDS: Final = 1.0  # for the peer's close message on a websocket
REPEAT_SECONDS: Final = 1.5
"""Time between two requests that repeat failed ones, whoever sends them. aiohttp sends some of them twice."""
REPEATS_AT_ONCE: Final = 3
CREDENTIALS_MAX: Final = 3  # tried by one request, if they are replaced while it runs

_TRANSPORT_ERRORS: Final = (OSError, aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError)


class ApiClient:
    """Requests to the API server; an asynchronous context manager. It reads the source with the first request."""

    def __init__(
        self, source: Source, *, on_unauthorized: Callable[[], None] | None = None, websockets: int = 0
    ) -> None:
        """`on_unauthorized` is called when the server answers 401 to the newest credentials; it must not block.

        `websockets`: the number that may be open at a time.
        """
        self.count: Callable[[str, str], None] = lambda _verb, _code: None
        """Called after each request with its verb (get, list, watch, patch, put, post) and its status, or `error`."""
        self._source = source
        self._websockets = websockets
        self._on_unauthorized = on_unauthorized
        self._transport: _Transport | None = None
        self._stale = False
        self._loaded_at = float("-inf")
        self._loading = asyncio.Lock()
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)
        self._turn = float("-inf")
        """When the next repetition may be sent, on the monotonic clock."""

    async def __aenter__(self) -> ApiClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections, also those in use."""
        transport, self._transport = self._transport, None
        if transport:
            await transport.session.close()

    def reload(self) -> None:
        """Use new credentials and connections for the next request."""
        self._stale = True
        self._loaded_at = float("-inf")

    async def turn(self) -> None:
        """Wait for the turn of a request that repeats a failed one.

        Each sender has a growing pause of its own, but a server that fails in a new way each time ends it.
        """
        now = time.monotonic()
        self._turn = max(self._turn, now - REPEATS_AT_ONCE * REPEAT_SECONDS) + REPEAT_SECONDS
        await asyncio.sleep(max(0.0, self._turn - now))

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
        """Send one request and return the body of its answer. `timeout` (seconds) covers the whole request.

        The caller escapes names in `path`. Raises ApiError, ApiUnavailableError, ConfigurationError.
        """
        began, outcome = time.monotonic(), "failed"
        try:
            with _as_unavailable(f"{method} {path}", timeout):
                answer = self._answer(method, path, query or {}, body, content_type)
                async with asyncio.timeout(timeout), self._slots, answer as response:
                    content = await _read_body(response, f"{method} {path}")
            outcome = "done"
            return content
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
        """Yield the lines of a watch until the server ends it. Use with `contextlib.aclosing`. Raises like `request`.

        A connection without a byte for `inactivity` seconds is dead. `on_open` is called when the watch is accepted.
        """
        what = f"watch of {path}"
        with _as_unavailable(what, inactivity):
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(deadlines.API_REQUEST_SECONDS):
                    response = await stack.enter_async_context(self._answer("GET", path, query, None, ""))
                on_open()
                partial = bytearray()
                while True:
                    async with asyncio.timeout(inactivity):
                        chunk = await response.content.readany()
                    if not chunk:
                        break
                    first, *others = chunk.split(b"\n")
                    partial += first
                    for other in others:
                        if partial:
                            yield bytes(partial)
                        partial = bytearray(other)
                    if len(partial) > LINE_MAX_BYTES:
                        raise ApiUnavailableError(f"{what}: a line is longer than {LINE_MAX_BYTES} bytes")
                if partial:
                    raise ApiUnavailableError(f"{what}: the connection ended within a line")

    @contextlib.asynccontextmanager
    async def websocket(
        self, path: str, query: Sequence[tuple[str, str]], *, protocols: Sequence[str], message_max: int
    ) -> AsyncIterator[Any]:
        """Open a websocket (aiohttp's) for the block. The caller sets deadlines. Raises as `request` does.

        The server chooses one of `protocols`, or none. `message_max`: bytes of one message.
        """
        with _as_unavailable(f"GET {path}", deadlines.API_REQUEST_SECONDS):
            transport = await self.load()
            async with transport.used():
                authorization = transport.access.header()
                opened = await transport.session.ws_connect(
                    transport.url(path, query),
                    headers={"Authorization": authorization} if authorization else {},
                    protocols=protocols,
                    max_msg_size=message_max,
                    **transport.options,
                )
                patience = 0.0
                try:
                    yield opened
                    patience = CLOSE_SECONDS
                finally:
                    # aiohttp waits for the close message of a peer that may send for ever. Cancelled, it hangs up.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(patience):
                            await opened.close()

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, query: Mapping[str, str], body: bytes | None, content_type: str
    ) -> AsyncIterator[Any]:
        """Return a successful response; after a 401 the request is sent again with fresh credentials."""
        refused: list[str] = []
        while True:
            transport = await self.load()
            async with transport.used():
                authorization = transport.access.header(fresh=bool(refused))
                headers = {"Accept": "application/json", "Content-Type": content_type, "Authorization": authorization}
                headers = {name: value for name, value in headers.items() if value}
                # Refused credentials are tried once more: a starting API server refuses everyone.
                again = not refused or (authorization not in refused and len(refused) < CREDENTIALS_MAX)
                code = "error"
                try:
                    response = await transport.session.request(
                        method,
                        transport.url(path, list(query.items())),
                        data=body,
                        headers=headers,
                        raise_for_status=False,
                        # The API server redirects no request of these, and a proxy's sign-in page is no API.
                        allow_redirects=False,
                        **transport.options,
                    )
                    code = str(response.status)
                finally:
                    self.count(_verb(method, query), code)
                try:
                    if response.status == 401 and again and self._can_refresh(transport):
                        refused.append(authorization)
                        continue
                    if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                        raise ApiUnavailableError(f"{method} {path}: the answer has the encoding {coding[:32]}")
                    if not 200 <= response.status < 300:
                        if response.status == 401 and self._on_unauthorized:
                            self._on_unauthorized()
                        raise await _read_error(response, f"{method} {path}")
                    yield response
                    return
                finally:
                    _abort(response)

    def _can_refresh(self, transport: _Transport) -> bool:
        """Return whether there may be newer credentials than the refused ones of `transport`."""
        if transport.access.token_file or transport is not self._transport:
            return True
        # The kubeconfig may have been replaced. A server that refuses everything must not make every request read it.
        if time.monotonic() - self._loaded_at > RELOAD_SECONDS:
            self._stale = True
        return self._stale

    async def load(self) -> _Transport:
        """Read the source if needed; return the transport for a new request. Raises ConfigurationError."""
        if self._transport and not self._stale:
            return self._transport
        async with self._loading:
            if self._transport and (not self._stale or time.monotonic() - self._loaded_at < RELOAD_SECONDS):
                return self._transport
            old, self._loaded_at = self._transport, time.monotonic()
            # Before the load: a `reload` meanwhile must not be lost.
            self._stale, loaded = False, False
            try:
                self._transport = _Transport(*await asyncio.to_thread(_load, self._source), self._websockets)
                loaded = True
            except ConfigurationError as error:
                if old is None:
                    raise
                log.warning("credentials for the API server stay as they were: %s", error)
                return old
            finally:
                self._stale = self._stale or not loaded
            new = self._transport
        if old:
            old.retired = True
            async with old.used():
                pass  # closes it if no request uses it
        return new


class _Transport:
    """Connections with one set of credentials. A retired one is closed after its last user."""

    def __init__(self, access: Access, tls: ssl.SSLContext, websockets: int) -> None:
        self.access = access
        configuration = access.configuration
        # Applies to all connections of the process: asyncio has no parameter for it.
        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
        self._host = str(configuration.host).rstrip("/")
        self.options: dict[str, Any] = {}  # arguments for aiohttp
        if configuration.proxy:
            self.options |= {"proxy": configuration.proxy, "proxy_headers": configuration.proxy_headers}
        if configuration.tls_server_name:
            self.options["server_hostname"] = configuration.tls_server_name
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONCURRENT_REQUESTS + WATCHES + websockets, ssl=tls, keepalive_timeout=KEPT_SECONDS
            ),
            headers={"User-Agent": f"multus-daemon/{__version__}", "Accept-Encoding": "identity"},
            # For websockets only: `ws_connect` drops the body of a refusal, which gives the reason.
            raise_for_status=_refuse_upgrade,
            # The limit of an answer counts its bytes as they are used.
            auto_decompress=False,
            # Disables aiohttp's own deadlines.
            timeout=aiohttp.ClientTimeout(),
            # With True aiohttp looks for proxies and for `~/.netrc` in threads, with each request.
            trust_env=not configuration.proxy and _is_proxied_by_environment(self._host),
            read_bufsize=READ_BUFFER_BYTES,
        )
        self._users = 0
        self.retired = False

    def url(self, path: str, query: Sequence[tuple[str, str]]) -> str:
        return f"{self._host}{path}?{urllib.parse.urlencode(query)}" if query else self._host + path

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Keep the transport open for the block."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self.retired and not self._users:
                await self.session.close()


def _load(source: Source) -> tuple[Access, ssl.SSLContext]:
    """Read the source and make the TLS context for it. Blocks. Raises ConfigurationError."""
    access = source.load()
    configuration = access.configuration
    try:
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    except OSError as error:
        raise ConfigurationError(str(error)) from error
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    # Python 3.13 refuses certificates without an authority key identifier. Go accepts them, as do all other clients.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return access, context


def _verb(method: str, query: Mapping[str, str]) -> str:
    """Return the verb of a request as the API server's own metrics call it, as far as its method and query say it."""
    if method == "GET" and "watch" in query:
        return "watch"
    return "list" if method == "GET" and query else method.lower()


async def _read_body(response: Any, request: str) -> bytes:
    """Return the body of an answer, up to the limit. Raises AnswerTooLongError."""
    if (response.content_length or 0) <= ANSWER_MAX_BYTES:
        try:
            await response.content.readexactly(ANSWER_MAX_BYTES + 1)
        except asyncio.IncompleteReadError as error:
            return error.partial
    raise AnswerTooLongError(f"{request}: the answer is longer than {ANSWER_MAX_BYTES} bytes", status=response.status)


async def _read_error(response: Any, request: str) -> KubeError:
    body = await _read_body(response, request)
    return errors.from_answer(response.status, response.reason or "", body, response.headers, request=request)


def _abort(response: Any) -> None:
    """Release the connection if the body was read to its end; abort it otherwise."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        # An orderly close waits up to 30 s for a server that may be gone; the connection would outlive the client.
        connection.transport.abort()
    response.release()


@contextlib.contextmanager
def _as_unavailable(what: str, seconds: float) -> Iterator[None]:
    """Turn errors of the transport into NoAnswerError."""
    try:
        yield
    except KubeError:
        raise
    except _TRANSPORT_ERRORS as error:
        plain = isinstance(error, TimeoutError) and not str(error)
        reason = f"nothing heard within {seconds:g} s" if plain else str(error) or type(error).__name__
        raise NoAnswerError(f"{what}: {reason}") from error


async def _refuse_upgrade(response: Any) -> None:
    """Raise the error of an answer that does not open a websocket."""
    if response.status == 101:
        return
    try:
        error = await _read_error(response, f"{response.method} {response.url.path}")
    finally:
        _abort(response)
    raise error


def _is_proxied_by_environment(host: str) -> bool:
    """Return whether `HTTPS_PROXY` or the like names a proxy for this URL and `NO_PROXY` does not exclude it."""
    url = urllib.parse.urlsplit(host)
    return url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or "")
