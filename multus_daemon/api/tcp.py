"""TCP ports that strangers can reach: bounded connections, shared fairly between clients.

The head of each request is checked before any other code reads what a stranger sends (RFC 9110, RFC 9112).
"""

from __future__ import annotations

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
from multus_daemon.runtime.aio import Acceptor
from multus_daemon.runtime.deadline import backoff

READS_MAX: Final = 16
READ_BYTES: Final = 512
"""A connection may be read this often, and once more for so many bytes: each read takes a turn of the loop."""
BACKLOG: Final = 128
_RESET: Final = struct.pack("ii", 1, 0)
"""struct linger: discard what was not sent."""
ALL: Final = "::"
"""All addresses of both families, as `metricsAddress` names them."""
HEAD_MAX: Final = 8 * 1024
"""Maximum bytes of a head."""
FIELDS_MAX: Final = 64
HEAD_END: Final = b"\r\n\r\n"

_REQUEST_LINE: Final = re.compile(r"([A-Z]{1,20}) (?:https?://[^/? ]*(?=/))?(/[!-~]*) HTTP/1\.[01]")
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")

log = logging.getLogger(__name__)


class RefusedError(Exception):
    """The request is refused with this status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """A request's method, path without query, and fields by lower-case name; repeated ones are joined by a comma."""

    method: str
    path: str
    fields: Mapping[str, str]


def read_head(data: bytes, methods: Mapping[str, bool]) -> Head:
    """Return the head in `data`, which ends with HEAD_END. `methods`: the allowed ones, and whether each has a body.

    A body must have a length and no encoding, so that nothing has to be unpacked. Raises RefusedError.
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
    """Raises RefusedError for a body that is not allowed, or whose end or content is not plain."""
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


Accepted = Callable[[Head], asyncio.Protocol]
"""Returns the protocol that serves a request."""


class TcpListener:
    """Pass the connections to a port, after the head of their request, to a protocol of asyncio.

    Binding is retried until it succeeds. The number of connections, their rate, the lifetime and the reads of each are
    bounded, and clients share what there is: no address can keep the others out. None is served while only the last
    quarter of the descriptors is free, which is for pods.
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
        retry: tuple[float, float] = (1, 60),
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`name`: for the log. `address`: empty for all. `connections`: maximum number of concurrent connections.

        `per_second`: maximum number of new ones. `seconds`: lifetime of one connection after its TLS handshake, which
        has `handshake_seconds`. `methods`: see `read_head`. `retry`: first and longest pause in seconds. `tls`: returns
        the context of a connection.
        """
        self._name = name
        self._asked_port = port
        self._address = address
        self._connections, self._per_second = connections, per_second
        self.seconds = seconds
        self._handshake_seconds = handshake_seconds
        self.methods = methods
        self._retry = retry
        self._tls = tls
        self._acceptor: Acceptor
        self.open: dict[_Connection, None] = {}
        """The connections, the oldest first."""
        self._asked: Counter[bytes] = Counter()
        """Connections of the present second, by address."""
        self._second, self._served, self._silent_until = 0.0, 0, 0.0
        self._out: set[bytes] = set()
        """Addresses that wait until the next second."""
        self.port: int | None = None
        """The bound port; None while there is none."""

    async def serve(self, accepted: Accepted) -> None:
        """Serve until cancelled. `accepted` returns the protocol for a request; it gets the head too."""
        try:
            listener = await self._bind()
            async with asyncio.TaskGroup() as connecting:
                take = functools.partial(self._take, accepted, connecting, listener)
                with contextlib.closing(Acceptor(listener, self._name, take, spares=True)) as self._acceptor:
                    await asyncio.get_running_loop().create_future()
        finally:
            self.port = None
            for connection in tuple(self.open):
                connection.end()

    async def _bind(self) -> socket.socket:
        where = self._address or "any address"
        for pause in backoff(*self._retry, jitter=0.1):
            try:
                listener = await asyncio.to_thread(_listen, self._address, self._asked_port)
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

    def _take(
        self, accepted: Accepted, connecting: asyncio.TaskGroup, listener: socket.socket, connection: socket.socket
    ) -> None:
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
            counts = Counter(item.peer for item in self.open)
            most = max(counts, key=counts.__getitem__)
            next(item for item in self.open if item.peer == most).end()
        protocol = _Connection(self, peer, accepted)
        self.open[protocol] = None
        # A task, since a handshake waits for the other side.
        work = self._connect(connection, protocol)
        protocol.connecting = connecting.create_task(work, name=f"{self._name} connection")

    def _may_ask(self, peer: bytes) -> bool:
        """Return whether a client may have one more connection in this second."""
        now = asyncio.get_running_loop().time()
        if now >= self._second + 1:
            self._second, self._served = now, 0
            self._asked.clear()
        self._asked[peer] += 1
        may = self._asked[peer] <= max(1, self._per_second // len(self._asked)) and self._served < 2 * self._per_second
        self._served += may
        return may

    def _shut_out(self, listener: socket.socket, peer: bytes) -> None:
        """Have the kernel keep the client, or everyone after too many connections, waiting until the next second."""
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
                bpf.drop_all(listener)
            else:
                bpf.drop(listener, self._out)
        if loop.time() >= self._silent_until:
            self._silent_until = loop.time() + 60
            log.warning(
                "%s: clients must wait: they make more than %d connections a second", self._name, self._per_second
            )

    def _let_in(self, listener: socket.socket) -> None:
        self._out.clear()
        # Refused for a socket that is closed, or that has no filter.
        with contextlib.suppress(OSError):
            bpf.drop(listener, ())

    async def _connect(self, connection: socket.socket, protocol: _Connection) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls() if self._tls else None,
                ssl_handshake_timeout=self._handshake_seconds if self._tls else None,
                ssl_shutdown_timeout=self.seconds if self._tls else None,
            )
        except OSError as error:
            log.debug("%s: no connection: %s", self._name, error)
        finally:
            if not protocol.is_made:
                self.open.pop(protocol, None)
                connection.close()


class _Connection(asyncio.Protocol):
    """A connection with a limited lifetime and number of reads. After the head it passes all events on."""

    def __init__(self, listener: TcpListener, peer: bytes, accepted: Accepted) -> None:
        self.peer = peer
        self.connecting: asyncio.Task[None] | None = None
        self.is_made = False
        self._listener = listener
        self._accepted = accepted
        self._head: bytearray | None = bytearray()
        self._reads, self._received = 0, 0
        # Until the head is read, it does nothing.
        self._server = asyncio.Protocol()

    def end(self) -> None:
        """End the connection, or its handshake, at once."""
        self._listener.open.pop(self, None)
        if self.is_made:
            self._transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.is_made, self._transport = True, transport
        self._end = asyncio.get_running_loop().call_later(self._listener.seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._reads += 1
        self._received += len(data)
        if self._reads > READS_MAX + self._received // READ_BYTES:
            self.end()
        elif self._head is None:
            self._server.data_received(data)
        else:
            self._head += data
            try:
                self._read_head(self._head)
            except RefusedError as error:
                self._refuse(error.status)

    def _read_head(self, data: bytearray) -> None:
        """Pass the connection on if the head is complete. Raises RefusedError."""
        end = data.find(HEAD_END, 0, HEAD_MAX)
        if end < 0:
            if not data[:1].isupper():
                # Noise, or TLS.
                raise RefusedError(HTTPStatus.BAD_REQUEST)
            if len(data) >= HEAD_MAX:
                raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        self._server = self._accepted(read_head(bytes(data[: end + len(HEAD_END)]), self._listener.methods))
        self._head = None
        self._server.connection_made(self._transport)
        self._server.data_received(bytes(data))

    def _refuse(self, status: HTTPStatus) -> None:
        self._head = None
        more = {"Allow": ", ".join(self._listener.methods)} if status is HTTPStatus.METHOD_NOT_ALLOWED else {}
        self._transport.write(Reply(status, f"{status.phrase}\n".encode(), more=more).encode())
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        # Without a reader for the rest, the kernel would reset the connection before the client has the answer.
        self._transport.write_eof()
        self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(deadlines.LINGER_SECONDS, self._transport.abort)

    def eof_received(self) -> bool | None:
        return self._server.eof_received()

    def pause_writing(self) -> None:
        self._server.pause_writing()

    def resume_writing(self) -> None:
        self._server.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.open.pop(self, None)
        self._end.cancel()
        self._server.connection_lost(exc if isinstance(exc, Exception) else None)


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    more: Mapping[str, str] = {}

    def encode(self, *, with_body: bool = True) -> bytes:
        """Return its bytes."""
        fields = {
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            "Date": formatdate(usegmt=True),
            "Connection": "close",
            **self.more,
        }
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", *map(": ".join, fields.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1") + (self.body if with_body else b"")


def _listen(address: str, port: int) -> socket.socket:
    """Return a listening socket, for both families without an address or with ALL. Raises OSError."""
    if address not in ("", ALL):
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=BACKLOG)
    listener.setblocking(False)
    return listener
