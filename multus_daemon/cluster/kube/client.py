"""The API client: requests and watches in raw bytes, with our own deadlines, limits and errors.

kubernetes_asyncio only reads the configuration (`credentials`). Its transport is not used: for each request it looks
for `~/.netrc` in a thread, and it closes a connection after 15 s of idleness.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
import time
import urllib.parse
import urllib.request
from asyncio import sslproto
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
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
WATCHES: Final = 6
KEPT_SECONDS: Final = 60.0
"""An idle connection stays open this long. kube-apiserver closes it after 90 s; it must not do so during a request."""
READ_BUFFER_BYTES: Final = 2 * 1024 * 1024
TLS_BUFFER_BYTES: Final = 32 * 1024
"""Size of two TLS records. asyncio's default is 256 KiB for each connection, all of which becomes resident."""
ANSWER_MAX_BYTES: Final = 16 * 1024 * 1024  # the list of 250 pods is one answer of about 5 MiB
LINE_MAX_BYTES: Final = 8 * 1024 * 1024  # an object has at most 1.5 MiB (etcd's limit)
RELOAD_SECONDS: Final = 5.0  # between two attempts to read refused or unreadable credentials again
REPEAT_SECONDS: Final = 1.5
"""Time between two requests that repeat failed ones, of all tasks together. aiohttp sends some requests twice."""
REPEATS_AT_ONCE: Final = 3

_TRANSPORT_ERRORS: Final = (OSError, aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError)


class ApiClient:
    """Sends requests to the API server; an asynchronous context manager. The first request reads the credentials."""

    def __init__(self, source: Source, *, on_unauthorized: Callable[[], None] = lambda: None) -> None:
        """`on_unauthorized` is called when the server answers 401 to the newest credentials; it must not block."""
        self.count: Callable[[str, str], None] = lambda _verb, _code: None
        """Called after each request with its verb (get, list, watch, patch, put, post) and its status, or `error`."""
        self._source = source
        self._on_unauthorized = on_unauthorized
        self._transport: Transport | None = None
        self._session: aiohttp.ClientSession
        self._stale = False
        self._loaded_at = float("-inf")
        self._loading = asyncio.Lock()
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)
        self._turn = float("-inf")
        """When the next repetition may be sent, on the monotonic clock."""

    async def __aenter__(self) -> ApiClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONCURRENT_REQUESTS + WATCHES, keepalive_timeout=KEPT_SECONDS),
            headers={"User-Agent": f"multus-daemon/{__version__}", "Accept-Encoding": "identity"},
            # The limit of an answer counts its bytes as they are used.
            auto_decompress=False,
            # Disables aiohttp's own deadlines.
            timeout=aiohttp.ClientTimeout(),
            read_bufsize=READ_BUFFER_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections, also those in use."""
        await self._session.close()

    def reload(self) -> None:
        """Use new credentials and connections for the next request."""
        self._stale = True
        self._loaded_at = float("-inf")

    async def turn(self) -> None:
        """Wait for the turn of a request that repeats a failed one.

        Each task has a growing pause of its own, but a server that fails in a new way each time resets it.
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
            with as_unavailable(f"{method} {path}", timeout):
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
        inactivity: float = deadlines.INFORMER_INACTIVITY_SECONDS,
        on_open: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch until the server ends it. Use with `contextlib.aclosing`. Raises like `request`.

        A connection without a byte for `inactivity` seconds is dead. `on_open` is called when the watch is accepted.
        """
        what = f"watch of {path}"
        with as_unavailable(what, inactivity):
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(deadlines.API_REQUEST_SECONDS):
                    response = await stack.enter_async_context(self._answer("GET", path, query, None, ""))
                on_open()
                partial = b""
                while True:
                    async with asyncio.timeout(inactivity):
                        chunk = await response.content.readany()
                    if not chunk:
                        break
                    *whole, partial = (partial + chunk).split(b"\n")
                    for line in filter(None, whole):
                        yield line
                    if len(partial) > LINE_MAX_BYTES:
                        raise ApiUnavailableError(f"{what}: a line is longer than {LINE_MAX_BYTES} bytes")
                if partial:
                    raise ApiUnavailableError(f"{what}: the connection ended within a line")

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, query: Mapping[str, str], body: bytes | None, content_type: str
    ) -> AsyncIterator[Any]:
        """Return a successful response; after a 401 the request is sent again with fresh credentials."""
        is_again = False
        while True:
            transport = await self.load()
            authorization = transport.access.header(fresh=is_again)
            headers = {"Accept": "application/json", "Content-Type": content_type, "Authorization": authorization}
            code = "error"
            try:
                response = await self._session.request(
                    method,
                    transport.host + path,
                    params=query,
                    data=body,
                    headers={name: value for name, value in headers.items() if value},
                    # The API server redirects no request of these, and a proxy's sign-in page is no API.
                    allow_redirects=False,
                    **transport.options,
                )
                code = str(response.status)
            finally:
                self.count(_verb(method, query), code)
            try:
                # Refused credentials are tried once more: a starting API server refuses everyone.
                if response.status == 401 and not is_again and self._can_refresh(transport):
                    is_again = True
                    continue
                if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise ApiUnavailableError(
                        f"{method} {path}: the answer has an encoding that was not asked for: {coding[:32]}"
                    )
                if not 200 <= response.status < 300:
                    if response.status == 401:
                        self._on_unauthorized()
                    raise await read_error(response, f"{method} {path}")
                yield response
                return
            finally:
                abort(response)

    def _can_refresh(self, transport: Transport) -> bool:
        """Return whether there may be newer credentials than the refused ones of `transport`."""
        if transport.access.token_file or transport is not self._transport:
            return True
        # The kubeconfig may have been replaced. A server that refuses everything must not make every request read it.
        if time.monotonic() - self._loaded_at > RELOAD_SECONDS:
            self._stale = True
        return self._stale

    async def load(self) -> Transport:
        """Read the credentials if needed; return the transport for a new request. Raises ConfigurationError."""
        if self._transport and not self._stale:
            return self._transport
        async with self._loading:
            if self._transport and (not self._stale or time.monotonic() - self._loaded_at < RELOAD_SECONDS):
                return self._transport
            # Before the load: a `reload` meanwhile must not be lost.
            self._stale, self._loaded_at = False, time.monotonic()
            try:
                self._transport = await asyncio.to_thread(_load, self._source)
            except BaseException as error:
                self._stale = True
                if self._transport is None or not isinstance(error, ConfigurationError):
                    raise
                log.warning("new credentials for the API server can't be read, the old ones stay in use: %s", error)
            return self._transport


@dataclass(frozen=True, slots=True)
class Transport:
    """One set of credentials with its own TLS context, so that connections are never shared with other credentials."""

    access: Access
    host: str
    options: Mapping[str, Any]
    """Arguments for aiohttp's requests."""


def _load(source: Source) -> Transport:
    """Read the credentials and make their TLS context. Blocks. Raises ConfigurationError."""
    # Applies to all connections of the process: asyncio has no parameter for it.
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
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
    host = str(configuration.host).rstrip("/")
    options: dict[str, Any] = {"ssl": context}
    if configuration.proxy:
        options |= {"proxy": configuration.proxy, "proxy_headers": configuration.proxy_headers}
    else:
        # Not aiohttp's `trust_env`, with which it looks for proxies and for `~/.netrc` in threads, with each request.
        url = urllib.parse.urlsplit(host)
        proxy = urllib.request.getproxies().get(url.scheme)
        if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
            options["proxy"] = proxy
    if configuration.tls_server_name:
        options["server_hostname"] = configuration.tls_server_name
    return Transport(access, host, options)


def _verb(method: str, query: Mapping[str, str]) -> str:
    """Return the verb of a request as in the API server's metrics, derived from its method and query."""
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


async def read_error(response: Any, request: str) -> KubeError:
    """Read an unsuccessful answer and return it as an error."""
    body = await _read_body(response, request)
    return errors.from_answer(response.status, response.reason or "", body, response.headers, request=request)


def abort(response: Any) -> None:
    """Release the connection if the body was read to its end; abort it otherwise."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        # An orderly close waits up to 30 s for a server that may be gone; the connection would outlive the client.
        connection.transport.abort()
    response.release()


@contextlib.contextmanager
def as_unavailable(what: str, seconds: float) -> Iterator[None]:
    """Turn errors of the transport into NoAnswerError."""
    try:
        yield
    except KubeError:
        raise
    except _TRANSPORT_ERRORS as error:
        plain = isinstance(error, TimeoutError) and not str(error)
        reason = f"nothing heard within {seconds:g} s" if plain else str(error) or type(error).__name__
        # aiohttp shows its SSL context as an object with its address.
        reason = re.sub(r" ssl:.*?(?= \[)", "", reason)
        raise NoAnswerError(f"{what}: {reason}") from error
