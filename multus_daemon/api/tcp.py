"""TCP servers for untrusted clients: a bounded number of connections, shared fairly between clients.

The head of each request is checked before any other code reads the request (RFC 9110, RFC 9112).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import logging
import re
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, NamedTuple

from multus_daemon import deadlines
from multus_daemon.runtime import bpf
from multus_daemon.runtime.aio import Acceptor, once_possible

READS_MAX: Final = 16
READ_BYTES: Final = 512
"""A connection may be read 512 times, and once more for each 512 bytes: each read takes a turn of the event loop."""
BACKLOG: Final = 128
_RESET: Final = struct.pack("ii", 1, 0)
"""struct linger of SO_LINGER: discard unsent data, and reset the connection."""
ALL: Final = "::"
"""All addresses of both families, as `metricsAddress` names them."""
HEAD_MAX: Final = 8 * 1024
"""Maximum bytes of a head."""
FIELDS_MAX: Final = 64
HEAD_END: Final = b"\r\n\r\n"
_HEAD_LIMIT: Final = HEAD_MAX - len(HEAD_END) - 1  # what `readuntil` finds before its end, after the first byte

_REQUEST_LINE: Final = re.compile(r"([A-Z]{1,20}) (?:https?://[^/? ]*(?=/))?(/[!-~]*) HTTP/1\.[01]")
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")

log = logging.getLogger(__name__)


class RefusedError(Exception):
    """The request is refused with an HTTP status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """A request's method, path without query, and fields by lower-case name; repeated ones are joined by a comma."""

    method: str
    path: str
    fields: Mapping[str, str]

    @property
    def length(self) -> int:
        """Number of bytes of the body."""
        return int(self.fields.get("content-length", 0))


def read_head(data: bytes, methods: Mapping[str, bool]) -> Head:
    """Return the head in `data`, which ends with HEAD_END. `methods`: allowed methods, True if one has a body.

    A body must have a Content-Length and no encoding. Raises RefusedError.
    """
    line, *lines = data[: -len(HEAD_END)].decode("latin-1").split("\r\n")
    request = _REQUEST_LINE.fullmatch(line)
    if request is None:
        raise RefusedError(HTTPStatus.BAD_REQUEST)
    if len(lines) > FIELDS_MAX:
        raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    fields: dict[str, str] = {}
    for text in lines:
        field = _FIELD.fullmatch(text)
        if field is None:
            raise RefusedError(HTTPStatus.BAD_REQUEST)
        name, value = field[1].lower(), field[2].strip(" \t")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    method, target = request.groups()
    if method not in methods:
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED)
    _check_body(fields, has_body=methods[method])
    return Head(method, target.partition("?")[0], fields)


def _check_body(fields: Mapping[str, str], *, has_body: bool) -> None:
    """Raise RefusedError for a body that is not allowed, has no Content-Length, or is encoded."""
    length = fields.get("content-length", "0")
    for refused, status in (
        ("transfer-encoding" in fields or (has_body and "content-length" not in fields), HTTPStatus.LENGTH_REQUIRED),
        ("content-encoding" in fields, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
        ("expect" in fields, HTTPStatus.EXPECTATION_FAILED),
        (not re.fullmatch("[0-9]{1,12}", length), HTTPStatus.BAD_REQUEST),
    ):
        if refused:
            raise RefusedError(status)
    if int(length) and not has_body:
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    more: Mapping[str, str] = {}

    def encode(self, *, with_body: bool = True) -> bytes:
        """Return the bytes of the HTTP response."""
        fields = {
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            "Date": formatdate(usegmt=True),
            "Connection": "close",
            **self.more,
        }
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", *map(": ".join, fields.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1") + (self.body if with_body else b"")


class TcpListener(abc.ABC):
    """A TCP server that answers one request of each connection.

    Binding is retried until it succeeds. The number of connections, their rate, and the lifetime and reads of each are
    bounded and shared fairly, so that no client can keep others out. No connection is accepted while only the last
    quarter of the descriptors is free.
    """

    def __init__(
        self,
        name: str,
        port: int,
        address: str,
        *,
        connections: int,
        per_second: int,
        seconds: float,
        handshake_seconds: float,
        methods: Mapping[str, bool],
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`name`: for the log. `address`: empty for all. `connections`: maximum number of concurrent connections.

        `per_second`: maximum number of new connections. `seconds`: lifetime of one connection after its TLS handshake,
        which may take `handshake_seconds`. `methods`: see `read_head`. `tls`: returns the TLS context; None: plain TCP.
        """
        self._name = name
        self._address, self._asked_port = address, port
        self._connections, self._per_second = connections, per_second
        self.seconds = seconds
        self._handshake_seconds, self._tls = handshake_seconds, tls
        self.methods = methods
        self._acceptor: Acceptor
        self.open: dict[asyncio.Task[None], bytes] = {}
        """The tasks that serve connections, the oldest first, and the address of each client."""
        self._asked: Counter[bytes] = Counter()
        """Connections of the present second, by address."""
        self._second, self._served, self._silent_until = 0.0, 0, 0.0
        self._out: set[bytes] = set()
        """Addresses that wait until the next second."""
        self.port: int | None = None
        """The bound port; None while there is none."""

    @abc.abstractmethod
    async def answer(self, head: Head, body: asyncio.StreamReader) -> Reply:
        """Return the answer to a request; `body` reads from the connection only when asked."""

    async def run(self) -> None:
        """Answer requests until cancelled."""
        try:
            listener = await self._bind()
            async with asyncio.TaskGroup() as connecting:
                take = functools.partial(self._take, connecting, listener)
                with contextlib.closing(Acceptor(listener, self._name, take, spares=True)) as self._acceptor:
                    await asyncio.get_running_loop().create_future()
        finally:
            self.port = None

    async def _bind(self) -> socket.socket:
        where = self._address or "any address"
        work = functools.partial(_listen, self._address, self._asked_port)
        missing = f"no {self._name}: can't listen on {where} port {self._asked_port}"
        listener = await once_possible(work, missing)
        self.port = listener.getsockname()[1]
        log.info("%s on %s port %d", self._name, where, self.port)
        return listener

    def _take(self, connecting: asyncio.TaskGroup, listener: socket.socket, connection: socket.socket) -> None:
        try:
            peer = bpf.key(connection.getpeername()[0])
        except OSError:
            # It is gone.
            connection.close()
            return
        if not self._may_ask(peer):
            # A reset, so that the kernel need not remember the connection.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.close()
            self._shut_out(listener, peer)
            return
        if len(self.open) >= self._connections:
            [(most, _)] = Counter(self.open.values()).most_common(1)
            oldest = next(work for work, client in self.open.items() if client == most)
            del self.open[oldest]
            oldest.cancel()
        work = connecting.create_task(self._serve_one(connection), name=f"{self._name} connection")
        self.open[work] = peer
        work.add_done_callback(functools.partial(self._end, connection))

    def _end(self, connection: socket.socket, work: asyncio.Task[None]) -> None:
        self.open.pop(work, None)
        # If the work was ended before it began.
        connection.close()

    def _may_ask(self, peer: bytes) -> bool:
        """Return True if a client may have one more connection in this second."""
        now = asyncio.get_running_loop().time()
        if now >= self._second + 1:
            self._second, self._served = now, 0
            self._asked.clear()
        self._asked[peer] += 1
        may = self._asked[peer] <= max(1, self._per_second // len(self._asked)) and self._served < 2 * self._per_second
        self._served += may
        return may

    def _shut_out(self, listener: socket.socket, peer: bytes) -> None:
        """Have the kernel drop packets of the client (of all clients, after too many) until the next second."""
        loop = asyncio.get_running_loop()
        if not self._out:
            loop.call_later(max(0.0, self._second + 1 - loop.time()), self._let_in, listener)
        if peer in self._out:
            # It was accepted before.
            return
        self._out.add(peer)
        # Without the filter, they are refused one by one.
        with contextlib.suppress(OSError):
            if self._served >= 2 * self._per_second or len(self._out) > self._per_second:
                bpf.attach(listener, [bpf.DROP])
            else:
                bpf.drop(listener, self._out)
        if loop.time() >= self._silent_until:
            self._silent_until = loop.time() + 60
            log.warning("%s: new connections must wait: there are more than %d a second", self._name, self._per_second)

    def _let_in(self, listener: socket.socket) -> None:
        self._out.clear()
        # Refused for a socket that is closed, or that has no filter.
        with contextlib.suppress(OSError):
            bpf.drop(listener, ())

    async def _serve_one(self, connection: socket.socket) -> None:
        """Answer the connection's first request, and ignore the rest. Raises nothing."""
        loop, work = asyncio.get_running_loop(), asyncio.current_task()
        assert work is not None
        try:
            transport, protocol = await loop.connect_accepted_socket(
                functools.partial(_Connection, work),
                connection,
                ssl=self._tls() if self._tls else None,
                ssl_handshake_timeout=self._handshake_seconds if self._tls else None,
                ssl_shutdown_timeout=self.seconds if self._tls else None,
            )
        except Exception as error:
            # A fault in one connection must not end the port.
            log.debug("%s: no connection: %s", self._name, error, exc_info=not isinstance(error, OSError))
            return
        try:
            # A timeout is an OSError; so is a reset by the client, which a read may raise before this is cancelled.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(self.seconds):
                    await self._exchange(transport, protocol)
                    transport.close()
                    # Until all is sent: the end of the connection ends this.
                    await loop.create_future()
        except Exception:
            log.exception("%s: a connection failed", self._name)
        finally:
            transport.abort()

    async def _exchange(self, transport: asyncio.Transport, connection: _Connection) -> None:
        """Read and answer the request. Raises asyncio.IncompleteReadError, OSError."""
        reader = connection.reader
        try:
            head, size = await self._head(reader)
        except RefusedError as error:
            status = error.status
            more = {"Allow": ", ".join(self.methods)} if status is HTTPStatus.METHOD_NOT_ALLOWED else {}
            transport.write(Reply(status, f"{status.phrase}\n".encode(), more=more).encode())
            if transport.can_write_eof():
                transport.write_eof()
                async with asyncio.timeout(deadlines.LINGER_SECONDS):
                    while await reader.read(HEAD_MAX):
                        pass
            return
        try:
            reply = await self.answer(head, reader)
        except Exception:
            log.exception("%s failed", head.path)
            reply = Reply(500)
        transport.write(reply.encode(with_body=head.method != "HEAD"))
        # Without a reader for the rest, the kernel would reset the connection before the client has the answer.
        while connection.received < size and await reader.read(HEAD_MAX):
            pass

    async def _head(self, reader: asyncio.StreamReader) -> tuple[Head, int]:
        """Return the head and the request's size in bytes. Raises RefusedError, asyncio.IncompleteReadError."""
        first = await reader.readexactly(1)
        if not first.isupper():
            # Noise, or TLS.
            raise RefusedError(HTTPStatus.BAD_REQUEST)
        try:
            data = first + await reader.readuntil(HEAD_END)
        except asyncio.LimitOverrunError:
            raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
        head = read_head(data, self.methods)
        return head, len(data) + head.length


class _Connection(asyncio.StreamReaderProtocol):
    """A connection with a limited number of reads. When it ends, the task that serves it is cancelled."""

    def __init__(self, work: asyncio.Task[None]) -> None:
        self.reader = asyncio.StreamReader(_HEAD_LIMIT)
        super().__init__(self.reader)
        self._work = work
        self._reads = self.received = 0

    def data_received(self, data: bytes) -> None:
        self._reads += 1
        self.received += len(data)
        if self._reads > READS_MAX + self.received // READ_BYTES:
            self._work.cancel()
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._work.cancel()


def _listen(address: str, port: int) -> socket.socket:
    """Return a listening socket; `address` empty or ALL: for IPv4 and IPv6. Raises OSError."""
    if address not in ("", ALL):
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=BACKLOG)
    listener.setblocking(False)
    return listener
