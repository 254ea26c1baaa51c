"""A fake of the verbs, requests, and a client that speaks raw HTTP to a live server."""

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multus_daemon.api.app import UnixServer
from multus_daemon.metrics import Metrics
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.runtime import deadline
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, from_object
from tests.waiting import eventually

STDOUT_TYPE = "application/vnd.multus.cni-stdout"
VECTORS = json.loads((Path(__file__).parents[2] / "data" / "upstream-v4.3.0.json").read_text())
EXCHANGES = [(record, exchange) for record in VECTORS for exchange in record.get("exchanges") or ()]

RESULT = Result(
    interfaces=(Interface("eth0", "02:00:00:00:00:01", sandbox="/run/netns/a"),),
    ips=(IpConfig("10.1.0.2/24", "10.1.0.1", 0),),
)


def no_thread(_thread: threading.Thread) -> None:
    """In place of `threading.Thread.start`, where the limit of processes is reached."""
    raise RuntimeError("can't start new thread")


def _open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


# Takes the place of `api.verbs.Verbs`, whose attributes are functions over an engine.
_Verbs: Any = object


@dataclass
class FakeVerbs(_Verbs):  # type: ignore[misc]  # that is Any on purpose
    """Records calls; answers with `result`, or raises `error`; waits for `gate` first, which is open."""

    result: Result = RESULT
    error: BaseException | None = None
    delete_error: BaseException | None = None
    gate: threading.Event = field(default_factory=_open_gate)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    cancelled: int = 0
    finished: int = 0
    _count: threading.Lock = field(default_factory=threading.Lock)

    async def begun(self) -> None:
        """Wait until a verb has begun."""
        await eventually(self.entered.is_set)

    def _work(self, verb: str, what: object, error: BaseException | None) -> None:
        self.calls.append((verb, what))
        self.entered.set()
        try:
            while not self.gate.is_set():
                deadline.pause(0.002)
        except deadline.Interrupted:
            with self._count:
                self.cancelled += 1
            raise
        if error:
            raise error
        with self._count:
            self.finished += 1

    def add(self, request: CniRequest) -> Result:
        self._work("ADD", request, self.error)
        return self.result

    def delete(self, request: CniRequest) -> None:
        self._work("DEL", request, self.delete_error or self.error)

    def check(self, request: CniRequest) -> None:
        self._work("CHECK", request, self.error)

    def add_network(self, request: DelegateRequest) -> Result:
        self._work("add_network", request, self.error)
        return self.result

    def remove_network(self, request: DelegateRequest) -> None:
        self._work("remove_network", request, self.error)

    def check_network(self, request: DelegateRequest) -> None:
        self._work("check_network", request, self.error)

    def slow(self, request: Any, timeline: Any) -> None:
        """What is announced after a while is kept with the other calls."""
        self.calls.append(("slow", (request.args.name, timeline.ended)))

    def status(self, stdin: bytes) -> None:
        self._work("STATUS", stdin, self.error)

    def gc(self, stdin: bytes) -> None:
        self._work("GC", stdin, self.error)


def netconf(version: str = "1.0.0", name: str = "multus-cni-network", **more: Any) -> dict[str, Any]:
    return {"cniVersion": version, "name": name, "type": "multus-shim", **more}


def environment(verb: str = "ADD", **changes: str | None) -> dict[str, str]:
    """CNI variables of a call; a change to None removes the variable."""
    env: dict[str, str | None] = {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": "c0ffee",
        "CNI_NETNS": "/run/netns/a",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAMESPACE=web;K8S_POD_NAME=web-1;K8S_POD_UID=u-1",
        **changes,
    }
    return {key: value for key, value in env.items() if value is not None}


def body(verb: str = "ADD", conf: bytes | dict[str, Any] | None = None, **changes: str | None) -> bytes:
    stdin = conf if isinstance(conf, bytes) else json.dumps(netconf() if conf is None else conf).encode()
    config = base64.b64encode(stdin).decode()
    return json.dumps({"env": environment(verb, **changes), "config": config}).encode()


PLUGGED_CONF = b'{"cniVersion": "0.3.1", "name": "n-b",  "type": "macvlan"}'


def delegate_body(
    verb: str = "ADD", conf: bytes = PLUGGED_CONF, attributes: Any = None, **changes: str | None
) -> bytes:
    """Build a body like the hot-plug controller's: few variables, the network's own configuration verbatim."""
    env: dict[str, str | None] = {
        "CNI_ARGS": "K8S_POD_NAMESPACE=ns1;K8S_POD_NAME=p1;K8S_POD_UID=uid-1",
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": "sandbox123",
        "CNI_IFNAME": "net2",
        "CNI_NETNS": "/var/run/netns/cni-xyz",
        **changes,
    }
    fields = {
        "env": {key: value for key, value in env.items() if value is not None},
        "config": base64.b64encode(conf).decode(),
    }
    return json.dumps(fields | ({} if attributes is None else {"interfaceAttributes": attributes})).encode()


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def parse_reply(data: bytes) -> Reply:
    head, _, rest = data.partition(b"\r\n\r\n")
    line, *headers = head.decode("latin-1").split("\r\n")
    fields = {key.lower(): value.strip() for key, _, value in (header.partition(":") for header in headers)}
    return Reply(int(line.split()[1]), fields, rest)


def http(method: str, path: str, content: bytes = b"", *, native: bool = False, headers: Sequence[str] = ()) -> bytes:
    accept = f"Accept: {STDOUT_TYPE}\r\n" if native else ""
    extra = "".join(f"{header}\r\n" for header in headers)
    head = f"{method} {path} HTTP/1.1\r\nHost: dummy\r\n{accept}{extra}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def send(path: Path, data: bytes, *, eof: bool = False) -> bytes:
    """All bytes that come back for the bytes `data`; as root may connect, so may the tests."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(data)
        try:
            await writer.drain()
            if eof:
                writer.write_eof()
        except ConnectionError:
            pass
        received = b""
        try:
            while chunk := await reader.read(65536):
                received += chunk
        except ConnectionError:
            pass
        return received
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass


async def exchange(server: UnixServer, method: str, path: str, content: bytes = b"", **options: Any) -> Reply:
    """One request, one reply; the server must close the connection."""
    return parse_reply(await send(server.path, http(method, path, content, **options)))


def from_recorded(said: str) -> Result:
    """The result in a recorded answer."""
    return from_object(json.loads(said)["Result"], "1.1.0")


@contextlib.asynccontextmanager
async def started(server: UnixServer) -> AsyncIterator[UnixServer]:
    """The server serves in the block."""
    await server.start()
    try:
        yield server
    finally:
        await server.stop(1)


@contextlib.asynccontextmanager
async def listening(server: Any, *beside: Coroutine[Any, Any, object]) -> AsyncIterator[int]:
    """A server of a TCP port runs in the block, and what is beside it; the port."""
    tasks = [asyncio.create_task(work) for work in (server.run(), *beside)]
    try:
        await eventually(lambda: server.port is not None)
        yield server.port
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def exposition(metrics: Metrics) -> str:
    """Return the current text of `/metrics`."""
    data, _ = await asyncio.to_thread(metrics.render)
    return data.decode()
