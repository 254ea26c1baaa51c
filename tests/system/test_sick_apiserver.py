"""A node asks a sick API server at most twice a second, whatever the sickness is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.store import KubeStore
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import StatusWriteError
from tests.fakes.apiserver import FakeApiServer

FIRST_SECONDS = 1.0
SECONDS = 15.0
MOST_A_SECOND = 2.0
POD = Pod(Namespace("web"), PodName("web-1"), PodUid("u-1"), {})


@dataclass
class Request:
    """A request, and the way to its client."""

    method: str
    path: str
    writer: asyncio.StreamWriter
    number: int
    """Of the requests of this server, from 0."""

    @property
    def is_watch(self) -> bool:
        return "watch=true" in self.path

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def answer(self, status: int, body: bytes, *headers: str, length: int | None = None) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if length is None else length}", *headers]
        self.send("\r\n".join([*lines, "", ""]).encode() + body)

    def chunks(self, *lines: bytes, end: bool) -> None:
        """A watch's answer; with `end` it ends in an orderly way."""
        self.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for line in lines:
            self.send(b"%x\r\n%s\r\n" % (len(line), line))
        if end:
            self.send(b"0\r\n\r\n")

    def list(self, *items: object, **metadata: str) -> None:
        found = {"metadata": {"resourceVersion": "5", **metadata}, "items": items}
        self.answer(200, json.dumps(found).encode())


Behaviour = Callable[[Request], bool]
"""Answers a request; False closes the connection."""


def _always(status: int, body: bytes = b"", *headers: str, length: int | None = None) -> Behaviour:
    def behave(request: Request) -> bool:
        request.answer(status, body, *headers, length=length)
        return length is None

    return behave


def _raw(data: bytes) -> Behaviour:
    def behave(request: Request) -> bool:
        request.send(data)
        return False

    return behave


def _watching(watch: Behaviour, *items: object, **metadata: str) -> Behaviour:
    """Lists are well, watches are not."""

    def behave(request: Request) -> bool:
        if request.method != "GET":
            request.answer(500, b"")
            return True
        if request.is_watch:
            return watch(request)
        request.list(*items, **metadata)
        return True

    return behave


def _events(*lines: bytes, end: bool) -> Behaviour:
    def behave(request: Request) -> bool:
        request.chunks(*lines, end=end)
        return end

    return behave


def _in_turns(*behaviours: Behaviour) -> Behaviour:
    return lambda request: behaviours[request.number % len(behaviours)](request)


def _line(kind: str, item: object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


_OBJECT = {"metadata": {"namespace": "web", "name": "web-1", "uid": "u-1", "resourceVersion": "6"}}
_STATUS = {"kind": "Status", "status": "Failure", "reason": "X", "message": "sick"}
_BOOKMARK = _line("BOOKMARK", {"metadata": {"resourceVersion": "7"}})

WAYS: dict[str, Behaviour] = {
    "closes": _raw(b""),
    "half a status line": _raw(b"HTTP/1.1 20"),
    "no HTTP": _raw(b"\x16\x03\x01 hello\r\n\r\n"),
    "HTML": _always(200, b"<html>sign in</html>"),
    "null": _always(200, b"null"),
    "an empty object": _always(200, b"{}"),
    "an array": _always(200, b"[]"),
    "nothing": _always(200, b""),
    "a body that is cut": _always(200, b'{"metadata":', length=500),
    "a malformed chunk": _raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "an unknown encoding": _always(200, b"x", "Content-Encoding: gzip"),
    "redirects to itself": _always(302, b"", "Location: /api/v1/pods"),
    **{str(status): _always(status, json.dumps(_STATUS).encode()) for status in (400, 401, 403, 404, 409, 410, 422)},
    "429 at once": _always(429, b"", "Retry-After: 0"),
    "429 as a date": _always(429, b"", "Retry-After: Fri, 27 Nov 2026 00:00:00 GMT"),
    **{str(status): _always(status, b"<html>") for status in (500, 502, 503, 504)},
    "503 at once": _always(503, b"", "Retry-After: 0"),
    "watches are cut": _watching(_raw(b"")),
    "watches are cut after their head": _watching(_events(end=False)),
    "watches end": _watching(_events(end=True)),
    "watches end after a bookmark": _watching(_events(_BOOKMARK, end=True)),
    "watches are cut after a bookmark": _watching(_events(_BOOKMARK, end=False)),
    "watches end after an object": _watching(_events(_line("ADDED", _OBJECT), end=True)),
    "watches are cut within an object": _watching(_events(_line("ADDED", _OBJECT)[:20], end=False)),
    "watches answer HTML": _watching(_always(200, b"<html>sign in</html>\n")),
    "watches answer null": _watching(_events(b"null\n", end=True)),
    "watches answer 410": _watching(_always(410, json.dumps(_STATUS).encode())),
    "watches send 410": _watching(_events(_line("ERROR", {**_STATUS, "code": 410}), end=True)),
    "watches send 410 after an object": _watching(
        _events(_line("ADDED", _OBJECT), _line("ERROR", {**_STATUS, "code": 410}), end=True)
    ),
    "watches send 500": _watching(_events(_line("ERROR", {**_STATUS, "code": 500}), end=True)),
    "watches answer 429": _watching(_always(429, b"", "Retry-After: 0")),
    "watches answer 403": _watching(_always(403, json.dumps(_STATUS).encode())),
    "lists never end": _watching(_raw(b""), _OBJECT, **{"continue": "x"}),
    "empty lists never end": _watching(_raw(b""), **{"continue": "x"}),
    "every second request is cut": _in_turns(_watching(_events(_BOOKMARK, end=True)), _raw(b"")),
    "every third request is well": _in_turns(
        _raw(b""), _always(503), _watching(_events(_line("ADDED", _OBJECT), end=True))
    ),
}


@dataclass
class Sick:
    """A server that behaves in one way."""

    behave: Behaviour
    times: list[float] = field(default_factory=list)
    """When requests came."""
    port: int = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((line[15:] for line in head.split("\r\n") if line.startswith("Content-Length:")), "0")
                await reader.readexactly(int(length))
                method, path, _ = head.split(" ", 2)
                self.times.append(time.monotonic())
                if not self.behave(Request(method, path, writer, len(self.times) - 1)):
                    break
        writer.close()


async def _count(way: Behaviour, folder: Path) -> float:
    """Return the requests a second after the first one, of a node with something of each kind to say."""
    sick = Sick(way)
    fake = FakeApiServer()
    async with sick.listening():
        fake.port = sick.port
        async with ApiClient(Kubeconfig(fake.kubeconfig(folder, token="t"))) as client:
            store = KubeStore(client, "node-a", Gates())
            store.claims.network_changed(
                NetworkAttachmentDefinition("web", "n", "", {"k8s.v1.cni.cncf.io/resourceName": "r"})
            )
            running = asyncio.create_task(store.run())
            store.events.event(POD, "Warning", "Sick", "a message")
            store.conditions.put_condition(POD, ready=False, reason="Sick", message="a message")
            store.devices.put_report(POD, DeviceReport("claim", "uid", ({"driver": "d"},)))
            began = time.monotonic()
            with contextlib.suppress(StatusWriteError):
                await store.statuses.write(POD, "[]", keep_trying=True)
            await asyncio.sleep(began + FIRST_SECONDS + SECONDS - time.monotonic())
            assert not running.done()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    # On a busy machine the first request comes late.
    return sum(at > sick.times[0] + FIRST_SECONDS for at in sick.times) / SECONDS


async def test_a_sick_server_is_asked_twice_a_second_at_most(tmp_path: Path) -> None:
    counts: list[Awaitable[float]] = [_count(way, tmp_path / str(number)) for number, way in enumerate(WAYS.values())]
    rates = dict(zip(WAYS, await asyncio.gather(*counts), strict=True))
    assert not {name: rate for name, rate in rates.items() if rate > MOST_A_SECOND}
