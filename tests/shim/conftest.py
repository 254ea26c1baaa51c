"""A stub in place of the daemon, and a way to run the real shim binary against it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import multus_shim
from tests import hasty_shim

STDOUT_TYPE = "application/vnd.multus.cni-stdout"
"""The media type that both sides of the protocol agree on."""

CONFIG: dict[str, object] = {"cniVersion": "1.1.0", "name": "net", "type": "multus-shim"}
"""A network configuration that allows every verb."""

ENV = {
    "CNI_CONTAINERID": "c0ffee",
    "CNI_NETNS": "/nowhere/netns",
    "CNI_IFNAME": "eth0",
    "CNI_PATH": "/opt/cni/bin",
    "CNI_ARGS": "K8S_POD_NAMESPACE=web;K8S_POD_NAME=web-1",
}
"""An environment that satisfies every verb."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Holds what a container runtime sees of one call."""

    code: int
    out: bytes
    err: bytes
    seconds: float

    @property
    def error(self) -> dict[str, typing.Any]:
        """The CNI error object; fails the test when the call did not end as a CNI failure does."""
        assert self.code == 1, self
        value = json.loads(self.out)
        assert set(value) <= {"code", "msg", "details"}, value
        assert value["msg"], value
        return typing.cast("dict[str, typing.Any]", value)


@dataclasses.dataclass(frozen=True)
class Request:
    """One request as it came over the socket."""

    line: str
    headers: dict[str, str]
    body: bytes
    pid: int


Behaviour = Callable[[socket.socket, Request], None]
"""Handles a connection after the stub has read the request; the stub then closes the connection."""


def http(body: bytes = b"", status: str = "200 OK", content_type: str | None = STDOUT_TYPE, head: str = "") -> bytes:
    """The bytes of a complete reply."""
    lines = f"HTTP/1.1 {status}\r\n" + (f"Content-Type: {content_type}\r\n" if content_type else "")
    return f"{lines}{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


class Stub:
    """A unix socket server that follows a script, one thread for each connection."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.path = folder / "multus.sock"
        self.requests: list[Request] = []
        self.behaviour: Behaviour = lambda conn, request: conn.sendall(http(b"{}"))
        self.stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))

    def start(self) -> None:
        self._listener.listen(64)
        self._run(self._accept)

    def answer(self, *pieces: bytes, pause: float = 0) -> None:
        """Send these bytes as the reply, with pauses between the pieces, and close."""

        def behave(conn: socket.socket, request: Request) -> None:
            for piece in pieces:
                conn.sendall(piece)
                self.stopped.wait(pause)

        self.behaviour = behave

    def hang(self) -> None:
        """Read requests and never answer."""
        self.behaviour = lambda conn, request: typing.cast("None", self.stopped.wait(50))

    def stop(self) -> None:
        self.stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _run(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self.stopped.is_set():
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            self._run(self._serve, conn)

    def _serve(self, conn: socket.socket) -> None:
        with conn:
            conn.settimeout(20)
            # A shim that gives up closes the connection in the middle; that is what some tests want.
            with contextlib.suppress(ConnectionError, TimeoutError, EOFError):
                request = self._read(conn)
                self.requests.append(request)
                self.behaviour(conn, request)

    def _read(self, conn: socket.socket) -> Request:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._some(conn)
        head, _, begun = data.partition(b"\r\n\r\n")
        line, *fields = head.decode("ascii").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, v in (f.split(":", 1) for f in fields)}
        # Grows in place: bodies of 16 MiB come in pieces of 64 KiB.
        body = bytearray(begun)
        while len(body) < int(headers["content-length"]):
            body += self._some(conn)
        credentials = conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return Request(line, headers, bytes(body), int.from_bytes(credentials[:4], "little"))

    @staticmethod
    def _some(conn: socket.socket) -> bytes:
        data = conn.recv(65536)
        if not data:
            raise EOFError
        return data


class Shim:
    """The binary, and the folders that its configuration names."""

    def __init__(self, binary: pathlib.Path, folder: pathlib.Path) -> None:
        self.binary = binary
        self.socket_dir = folder / "run"
        self.socket_dir.mkdir()
        self.cni_dir = folder / "cni"
        self.spool = self.cni_dir / "spool"

    @property
    def hasty(self) -> Shim:
        """The same with a binary that waits for a second at most (`tests.hasty_shim`)."""
        made = copy.copy(self)
        made.binary = hasty_shim.binary()
        return made

    def config(self, **keys: object) -> bytes:
        """A network configuration that points at this test's folders; a key set to None is left out."""
        merged = CONFIG | {"daemonSocketDir": str(self.socket_dir), "cniDir": str(self.cni_dir)} | keys
        return json.dumps({k: v for k, v in merged.items() if v is not None}).encode()

    def environment(self, verb: str | None, **changes: str | None) -> dict[str, str]:
        """CNI variables for `verb`; a variable set to None is left out."""
        merged: dict[str, str | None] = {**ENV, "CNI_COMMAND": verb, **changes}
        return {k: v for k, v in merged.items() if v is not None}

    def __call__(
        self,
        verb: str | None = "ADD",
        *,
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
        conf: dict[str, object] | None = None,
        command: list[str] | None = None,
        timeout: float = 30,
    ) -> Result:
        """Run the shim to its end. `conf` changes the default configuration; `stdin` replaces it."""
        data = self.config(**(conf or {})) if stdin is None else stdin
        environment = self.environment(verb) if env is None else env
        began = time.monotonic()
        done = subprocess.run(
            command or [str(self.binary)],
            input=data,
            env=environment,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


@contextlib.contextmanager
def a_shim(binary: pathlib.Path) -> Iterator[Shim]:
    """The shim with folders of its own."""
    # NB: not tmp_path, whose length depends on the test's name; a socket path has room for 107 bytes.
    with tempfile.TemporaryDirectory(prefix="shim-") as folder:
        yield Shim(binary, pathlib.Path(folder))


@contextlib.contextmanager
def a_stub(shim: Shim, *, listens: bool) -> Iterator[Stub]:
    """A stub on the shim's socket."""
    stub = Stub(shim.socket_dir)
    if listens:
        stub.start()
    try:
        yield stub
    finally:
        stub.stop()


@pytest.fixture(scope="session")
def binary() -> pathlib.Path:
    """The installed shim; a missing one fails the tests, since then nothing here is tested."""
    return multus_shim.binary()


@pytest.fixture
def shim(binary: pathlib.Path) -> Iterator[Shim]:
    with a_shim(binary) as made:
        yield made


@pytest.fixture
def daemon(shim: Shim) -> Iterator[Stub]:
    """A listening stub on the shim's socket; it answers `{}` until told otherwise."""
    with a_stub(shim, listens=True) as stub:
        yield stub


@pytest.fixture
def late_daemon(shim: Shim) -> Iterator[Stub]:
    """A stub whose socket exists but refuses connections until `start()`."""
    with a_stub(shim, listens=False) as stub:
        yield stub


@pytest.fixture
def own_netns() -> str:
    """A path of the network namespace that the test, and so the shim, runs in."""
    path = "/proc/self/ns/net"
    if not os.path.exists(path):
        pytest.skip("no /proc/self/ns/net: mount proc")
    return path


# --- tests that mostly wait ------------------------------------------------------------------------------------------
# A shim that repeats a request, or whose deadline passes, sleeps for 0.6 to 10 seconds. Tests of that are marked
# `waits`: their bodies run side by side in threads, each with a shim and a stub of its own, while the other tests of
# the module run; the test itself only takes the outcome.

SIDE_BY_SIDE = 32
_OUTCOME: pytest.StashKey[Future[None]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "waits(long=False): the body runs in a thread from the module's first test on (long: from this folder's"
        " first), with a shim and a stub of its own; no other fixtures",
    )


def _waits(item: pytest.Item) -> int:
    """0: not at all; 1: for a second or so; 2: for long."""
    mark = item.get_closest_marker("waits")
    return 0 if mark is None else 1 + bool(mark.kwargs.get("long", False))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests that wait behind the others of their module, and those that wait for long behind all of ours."""
    here = pathlib.Path(__file__).parent
    places = [place for place, item in enumerate(items) if here in item.path.parents]
    modules = {path: number for number, path in enumerate(dict.fromkeys(items[place].path for place in places))}
    ours = sorted(
        (items[place] for place in places), key=lambda item: (_waits(item) == 2, modules[item.path], _waits(item))
    )
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def _threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        yield threads
        threads.shutdown(cancel_futures=True)


@pytest.fixture(scope="session", autouse=True)
def _start_what_waits_for_long(request: pytest.FixtureRequest) -> None:
    _start(request, [item for item in request.session.items if _waits(item) == 2])


@pytest.fixture(scope="module", autouse=True)
def _start_what_waits(request: pytest.FixtureRequest) -> None:
    _start(request, [item for item in request.session.items if item.path == request.path and _waits(item)])


def _start(request: pytest.FixtureRequest, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and _OUTCOME not in item.stash:
            threads: ThreadPoolExecutor = request.getfixturevalue("_threads")
            item.stash[_OUTCOME] = threads.submit(_body, item, request.getfixturevalue("binary"))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Wait for what has been started before a test of another folder: it counts its processes and descriptors."""
    if nextitem is not None and pathlib.Path(__file__).parent not in nextitem.path.parents:
        started = (other.stash.get(_OUTCOME, None) for other in item.session.items)
        futures.wait([outcome for outcome in started if outcome is not None])


def _body(item: pytest.Function, binary: pathlib.Path) -> None:
    """Call the test's function; what it raises is its outcome."""
    arguments = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    with contextlib.ExitStack() as stack:
        arguments["shim"] = shim = stack.enter_context(a_shim(binary))
        for name in {"daemon", "late_daemon"} & set(item.fixturenames):
            arguments[name] = stack.enter_context(a_stub(shim, listens=name == "daemon"))
        item.obj(**arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if _OUTCOME not in pyfuncitem.stash:
        return None
    pyfuncitem.stash[_OUTCOME].result()
    return True
