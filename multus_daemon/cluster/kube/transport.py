"""Connections to the API server with one set of credentials, and what goes wrong on them.

kubernetes_asyncio's own transport is not used: for each request it looks for `~/.netrc` in a thread, and it closes a
connection that is idle for 15 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.parse
import urllib.request
from asyncio import sslproto
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

from multus_daemon import __version__
from multus_daemon.cluster.kube.credentials import Access, Source
from multus_daemon.cluster.kube.errors import ApiUnavailableError, KubeError, NoAnswerError, from_answer
from multus_daemon.cluster.kube.library import aiohttp

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
ANSWER_MAX_BYTES: Final = 128 * 1024 * 1024
"""Of any other answer: the pods of a node come in one, some 5 MiB for 250 of them."""

_TRANSPORT_ERRORS: Final = (
    OSError,
    TimeoutError,
    # They have no base among the above.
    aiohttp.ClientError,
    aiohttp.http_exceptions.HttpProcessingError,
)


class Transport:
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
            headers={"User-Agent": f"multus-daemon/{__version__}"},
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


def read(source: Source) -> tuple[Access, ssl.SSLContext]:
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


async def whole(response: Any, what: str) -> bytes:
    """The body of an answer, of any length up to the limit. Raises ApiUnavailableError."""
    try:
        await response.content.readexactly(ANSWER_MAX_BYTES + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise ApiUnavailableError(f"{what}: the answer is longer than {ANSWER_MAX_BYTES} bytes")


def let_go(response: Any) -> None:
    """Put the connection back where the body was read to its end; end it otherwise, without a word to the server."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        # Closing it in good order waits 30 s for a server that may be gone to say goodbye in TLS, and nobody waits
        # for that: the connection would outlive the client.
        connection.transport.abort()
    response.release()


@contextlib.contextmanager
def as_unavailable(what: str, seconds: float) -> Iterator[None]:
    """The edge at which errors of the transport become ours."""
    try:
        yield
    except KubeError:
        raise
    except _TRANSPORT_ERRORS as error:
        plain = isinstance(error, TimeoutError) and not str(error)
        reason = f"nothing heard within {seconds:g} s" if plain else str(error) or type(error).__name__
        raise NoAnswerError(f"{what}: {reason}") from error


async def _refuse_upgrade(response: Any) -> None:
    """Raise what the answer to a request for a websocket says where it is none."""
    if response.status == 101:
        return
    request = f"{response.method} {response.url.path}"
    try:
        body = await whole(response, request)
    finally:
        let_go(response)
    raise from_answer(response.status, response.reason or "", body, response.headers, request=request)


def _is_proxied_by_environment(host: str) -> bool:
    """Whether `HTTPS_PROXY` and the like name a proxy for this URL, and `NO_PROXY` does not except it."""
    url = urllib.parse.urlsplit(host)
    return url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or "")
