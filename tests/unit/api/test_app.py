"""The edge: paths and methods, who may call, the socket's file, the metrics port."""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from multus_daemon import deadlines
from multus_daemon.api.app import UnixServer, application
from multus_daemon.api.metrics_port import METRICS_CONNECTIONS, MetricsServer
from multus_daemon.runtime import aio, fs
from multus_daemon.runtime.aio import StartError
from multus_daemon.runtime.gates import Gates
from tests.unit.api.harness import VECTORS, body, exchange, exposition, http, listening, parse_reply, send, started
from tests.waiting import eventually


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def make(api, gates, metrics):
    return lambda directory, **options: UnixServer(api, gates, metrics, directory, **options)


# --- paths and methods -----------------------------------------------------------------------------------------------

HTTP = [record for record in VECTORS if record["name"].startswith("http/")]


@pytest.mark.parametrize("record", HTTP, ids=[record["name"] for record in HTTP])
async def test_recorded_http(server, record):
    method, path, _ = record["request"]["line"].split()
    reply = await exchange(server, method, path, record["request"]["body"].encode())
    recorded = record["response"]
    if path == "/readyz":
        assert reply.status == 200  # v4.3.0 has none.
        return
    assert reply.status == int(recorded["status"].split()[1])
    assert reply.headers["connection"] == "close"
    assert "server" not in reply.headers
    if record["name"] == "http/POST /cni":
        # Upstream's text has no code; ours is always a CNI error.
        assert reply.json["code"] == 6
        assert recorded["body"].strip() in reply.json["msg"]
        return
    assert reply.body.decode() == recorded["body"]
    for header in recorded["headers"]:
        key, _, value = header.partition(": ")
        assert reply.headers[key.lower()] == value


@pytest.mark.usefixtures("little_linger")
async def test_a_wrong_method_is_refused_before_the_body_is_read(server):
    data = http("PUT", "/cni", b"x" * 1000)[:-1000]
    async with asyncio.timeout(30):
        assert b" 405 " in await send(server.path, data)


@pytest.mark.parametrize("path", ["/delegate/", "/cni/", "/CNI", "/", "/cni/../healthz", "//cni"])
async def test_other_paths_are_empty_404s(server, path):
    reply = await exchange(server, "POST", path, body())
    assert (reply.status, reply.body) == (404, b"")


@pytest.mark.parametrize("content", [b"", b"null", b"nonsense", b"x" * 200_000])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_healthz_ignores_the_body_and_the_gates(server, gates, method, content):
    gates.close("informer", "API server away")
    reply = await exchange(server, method, "/healthz", content)
    assert (reply.status, reply.body) == (200, b"")


async def test_readyz_names_the_closed_gates(server, gates):
    gates.close("informer", "API server away")
    reply = await exchange(server, "GET", "/readyz?gates")
    assert (reply.status, reply.json) == (503, {"podsGetNetworks": "no", "closed": {"informer": "API server away"}})
    gates.open("informer")
    reply = await exchange(server, "GET", "/readyz?gates")
    assert (reply.status, reply.body) == (200, b"ok")


async def test_readyz_names_what_is_degraded_and_stays_200(server, gates):
    gates.degraded.close("interfaces", "found late")
    reply = await exchange(server, "GET", "/readyz?gates")
    assert (reply.status, reply.json) == (200, {"podsGetNetworks": "in part", "degraded": {"interfaces": "found late"}})
    gates.close("informer", "API server away")
    reply = await exchange(server, "GET", "/readyz?gates")
    assert (reply.status, reply.json["degraded"]) == (503, {"interfaces": "found late"})
    gates.open("informer")
    gates.degraded.open("interfaces")
    reply = await exchange(server, "GET", "/readyz?gates")
    assert (reply.status, reply.body) == (200, b"ok")


@pytest.mark.conformance("server-12")
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_upstreams_shim_does_not_wait_for_a_gate(server, gates, method):
    """It asks before each ADD until the answer is 200; an ADD at a closed gate waits here, or says why it fails."""
    gates.close("informer", "API server away")
    reply = await exchange(server, method, "/readyz", b"null")
    assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"", "application/json")


async def test_one_request_per_connection(server, verbs):
    received = await send(server.path, http("GET", "/healthz") * 3)
    assert received.count(b"HTTP/1.1") == 1


async def test_requests_are_counted_as_upstream_counts(server, metrics):
    await exchange(server, "POST", "/cni", body())
    await exchange(server, "POST", "/cni", b"x")
    await exchange(server, "GET", "/healthz")
    await exchange(server, "GET", "/nope")
    text = await exposition(metrics)
    for handler, code, method in (
        ("/cni", 200, "post"),
        ("/cni", 400, "post"),
        ("/healthz", 200, "get"),
        ("NotFound", 404, "get"),
    ):
        line = f'multus_server_request_total{{code="{code}",handler="{handler}",method="{method}"}} 1.0'
        assert line in text


async def test_what_is_no_http_is_answered_and_logged_quietly(server, caplog):
    caplog.set_level(logging.DEBUG, "multus_daemon")
    for garbage in (b"\x16\x03\x01\r\n\r\n", b"POST /cni SMTP/9\r\n\r\n", b"GET / HTTP/1.1\r\nA" + b"a" * 99999):
        assert b" 400 " in await send(server.path, garbage)
    assert (await exchange(server, "GET", "/healthz")).status == 200
    assert max(record.levelno for record in caplog.records) == logging.DEBUG
    assert not any(record.exc_info for record in caplog.records)
    assert "not a valid HTTP request" in caplog.text


async def test_a_fault_of_a_handler_is_an_empty_500(api, gates, metrics, aiohttp_client, monkeypatch, caplog):
    async def broken(_request):
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(api, "handle", broken)
    client = await aiohttp_client(application(api, gates, metrics))
    reply = await client.post("/cni", data=b"{}")
    assert (reply.status, await reply.read()) == (500, b"")
    assert "ZeroDivisionError" in caplog.text


# --- who may call ----------------------------------------------------------------------------------------------------


async def test_the_list_of_users_decides(make, tmp_path, verbs):
    async with started(make(tmp_path / "run", allowed_uids=frozenset({os.getuid() + 1}))) as server:
        assert (await exchange(server, "POST", "/cni", body())).status == 403
        assert verbs.calls == []


# --- the socket's file -----------------------------------------------------------------------------------------------


@pytest.mark.conformance("server-3")
async def test_modes_of_the_socket_and_its_directory(make, tmp_path):
    directory = tmp_path / "a" / "run"
    old = os.umask(0)
    try:
        server = make(directory)
        await server.start()
    finally:
        os.umask(old)
    assert (mode(directory), mode(server.path)) == (0o700, 0o600)
    assert [entry.name for entry in directory.iterdir()] == ["multus.sock"]
    await server.stop(1)
    assert list(directory.iterdir()) == []


@pytest.mark.weak_spot(29)
@pytest.mark.conformance("server-4")
async def test_nothing_else_in_the_directory_is_touched(make, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "foreign").write_text("keep")
    (tmp_path / "foreign").chmod(0o640)
    tmp_path.chmod(0o755)
    server = make(tmp_path)
    await server.start()
    assert mode(tmp_path) == 0o700
    await server.stop(1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["foreign", "sub"]
    assert ((tmp_path / "foreign").read_text(), mode(tmp_path / "foreign")) == ("keep", 0o640)


async def test_a_shared_directory_keeps_its_mode(make, tmp_path, caplog):
    tmp_path.chmod(0o1777)
    async with started(make(tmp_path)) as server:
        assert (mode(tmp_path), mode(server.path)) == (0o1777, 0o600)
        assert "has other files" in caplog.text


@pytest.mark.conformance("server-4")
async def test_a_stale_socket_is_replaced(make, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "multus.sock"))
    async with started(make(tmp_path)) as server:
        assert (await exchange(server, "GET", "/healthz")).status == 200


@pytest.fixture
async def watched(make, tmp_path, monkeypatch):
    """A server that looks often after its socket."""
    monkeypatch.setattr(deadlines, "SOCKET_LOOK_SECONDS", 0.01)
    server = make(tmp_path)
    await server.start()
    watching = asyncio.create_task(server.keep_published())
    yield server
    await server.stop(1)
    watching.cancel()
    assert not server.path.exists()


async def until_served(path, seconds=30):
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(fs.is_listening, path):
            await asyncio.sleep(0.01)


async def test_a_socket_that_is_removed_comes_back(watched):
    watched.path.unlink()
    await until_served(watched.path)
    assert (await exchange(watched, "GET", "/healthz")).status == 200
    assert mode(watched.path) == 0o600
    assert [entry.name for entry in watched.path.parent.iterdir()] == ["multus.sock"]


async def test_the_socket_of_a_living_successor_stays(make, watched):
    successor = make(watched.path.parent)
    await successor.start()
    before = successor.path.lstat().st_ino
    await asyncio.sleep(0.1)
    assert successor.path.lstat().st_ino == before
    await successor.stop(1)
    await until_served(watched.path)


async def test_who_stops_publishes_nothing(watched, verbs):
    verbs.gate.clear()
    call = asyncio.create_task(exchange(watched, "POST", "/cni", body()))
    await verbs.begun()
    stopping = asyncio.create_task(watched.stop(30))
    await asyncio.sleep(0.05)
    verbs.gate.set()
    assert (await call).status == 200
    assert await stopping == 0
    await asyncio.sleep(0.1)
    assert not watched.path.exists()


async def test_what_is_put_in_place_of_the_socket_stays_and_makes_unready(watched, gates, caplog):
    watched.path.unlink()
    watched.path.mkdir()
    await eventually(lambda: "exists and is not a socket" in caplog.text)
    await asyncio.sleep(0.1)
    assert watched.path.is_dir()
    assert caplog.text.count("exists and is not a socket") == 1
    assert "socket" in gates.closed
    watched.path.rmdir()
    await until_served(watched.path)
    await eventually(lambda: not gates.closed)


async def test_no_connection_is_refused_while_a_successor_takes_over(make, tmp_path):
    server = make(tmp_path)
    await server.start()
    done = asyncio.Event()
    refused = []

    def knock():
        while not done.is_set():
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect(str(server.path))
                except OSError as error:
                    refused.append(error)
            time.sleep(0.0005)

    knocking = asyncio.create_task(asyncio.to_thread(knock))
    try:
        for _ in range(10):
            successor = make(tmp_path)
            await successor.start()
            await server.stop(1)
            server = successor
    finally:
        done.set()
        await knocking
        await server.stop(1)
    assert refused == []


@pytest.mark.weak_spot(29)
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
async def test_what_is_no_socket_is_not_removed(make, tmp_path, kind):
    path = tmp_path / "multus.sock"
    {"file": path.touch, "directory": path.mkdir, "link": lambda: path.symlink_to("elsewhere")}[kind]()
    before = path.lstat().st_ino
    with pytest.raises(StartError, match="exists and is not a socket"):
        await make(tmp_path).start()
    assert path.lstat().st_ino == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["multus.sock"]


async def test_a_directory_that_is_a_file(make, tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(StartError, match="is not a directory; check socketDir"):
        await make(tmp_path / "run").start()


@pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
async def test_the_path_has_a_limit(make, length, fits):
    # Padded, and not that of another run beside this one.
    directory = Path("/tmp") / str(os.getpid()).ljust(length - len("/tmp//multus.sock"), "d")
    server = make(directory)
    assert len(str(server.path)) == length
    if not fits:
        with pytest.raises(StartError, match="is too long: 108 bytes, and a socket's path may have 107"):
            await server.start()
        assert not directory.exists()
        return
    await server.start()
    assert (await exchange(server, "GET", "/healthz")).status == 200
    await server.stop(1)
    directory.rmdir()


@pytest.fixture
async def draining(make, tmp_path, verbs):
    """A server that stops, as soon as the ADD that runs has ended."""
    verbs.gate.clear()
    server = make(tmp_path / "draining")
    await server.start()
    call = asyncio.create_task(exchange(server, "POST", "/cni", body(CNI_CONTAINERID="running")))
    await verbs.begun()
    stopping = asyncio.create_task(server.stop(30))
    await asyncio.sleep(0)
    yield server
    verbs.gate.set()
    assert (await call).status == 200
    assert await stopping == 0
    assert not server.path.exists()


@pytest.mark.weak_spot(41)
@pytest.mark.conformance("server-12")
async def test_while_a_daemon_stops_it_is_healthy_and_not_ready(draining, gates):
    gates.close("socket", "shutting down")
    for method in ("GET", "POST"):
        reply = await exchange(draining, method, "/readyz", b"null")
        assert (reply.status, reply.body, reply.headers["content-type"]) == (500, b"", "application/json")
        assert (await exchange(draining, method, "/healthz", b"null")).status == 200
    reply = await exchange(draining, "GET", "/readyz?gates")
    assert (reply.status, reply.json) == (503, {"podsGetNetworks": "no", "closed": {"socket": "shutting down"}})


@pytest.mark.weak_spot(41)
@pytest.mark.parametrize("native", [False, True])
async def test_a_daemon_that_stops_serves_a_del_and_the_shims_of_others(draining, verbs, native):
    """A client that knows no successor gets its ADD, too."""
    served = ["DEL", "STATUS"] if native else ["ADD", "DEL", "CHECK", "STATUS", "GC"]
    calls = [asyncio.create_task(exchange(draining, "POST", "/cni", body(verb), native=native)) for verb in served]
    await eventually(lambda: len(verbs.calls) > len(served))
    verbs.gate.set()
    assert {(await call).status for call in calls} == {200}


@pytest.mark.weak_spot(41)
@pytest.mark.parametrize("verb", ["ADD", "CHECK", "GC"])
async def test_the_native_shim_is_sent_on_when_the_socket_is_gone(draining, verbs, verb):
    """Sent on before that, it would ask the same daemon again, and give up after a few times."""
    call = asyncio.create_task(exchange(draining, "POST", "/cni", body(verb), native=True))
    done, _ = await asyncio.wait([call], timeout=0.1)
    assert not done
    gone = []
    call.add_done_callback(lambda _: gone.append(not draining.path.exists()))
    verbs.gate.set()
    assert ((await call).status, (await call).json["code"]) == (503, 11)
    assert gone == [True]
    assert [request.container_id for _, request in verbs.calls] == ["running"]


@pytest.mark.weak_spot(41)
@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_a_shim_of_others_that_has_asked_is_waited_for(make, tmp_path, path, monkeypatch):
    """Upstream's reports a DEL as success if the socket has gone meanwhile."""
    monkeypatch.setattr(deadlines, "ANNOUNCED_SECONDS", 2.0)
    server = make(tmp_path)
    await server.start()
    assert (await exchange(server, "POST", path, b"null")).status == 200
    stopping = asyncio.create_task(server.stop(60))
    await asyncio.sleep(0.1)
    assert (await exchange(server, "POST", "/cni", body("DEL"))).status == 200
    assert await stopping == 0
    assert not server.path.exists()


async def test_who_has_connected_before_the_stop_is_answered(make, tmp_path):
    server = make(tmp_path)
    await server.start()
    clients = []
    for _ in range(30):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(server.path))
        client.sendall(http("POST", "/cni", body("DEL")))
        clients.append(client)
    await server.stop(5)
    answers = []
    for client in clients:
        with client:
            answers.append(client.recv(1000).split(b"\r\n")[0])
    assert answers == [b"HTTP/1.1 200 OK"] * 30


@pytest.mark.weak_spot(41)
async def test_stop_cuts_a_request_that_does_not_end(make, tmp_path, verbs):
    verbs.gate.clear()
    server = make(tmp_path)
    await server.start()
    call = asyncio.create_task(exchange(server, "POST", "/cni", body()))
    await verbs.begun()
    assert await server.stop(0.05) == 1
    assert (await call).json["code"] == 11


async def test_stop_can_be_repeated_and_need_not_follow_a_start(make, tmp_path):
    server = make(tmp_path)
    assert await server.stop(1) == 0
    await server.start()
    await server.stop(1)
    assert await server.stop(1) == 0


# --- the metrics port ------------------------------------------------------------------------------------------------


async def fetch(port, path="/metrics", more=""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n{more}Connection: close\r\n\r\n".encode())
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    return parse_reply(data)


@pytest.mark.weak_spot(39)
async def test_metrics_over_tcp(metrics):
    server = MetricsServer(metrics, Gates(), 0, "127.0.0.1")
    async with listening(server) as port:
        metrics.request("/cni", 200, "POST")
        reply = await fetch(port)
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/plain")
        assert b"multus_server_request_total{" in reply.body
        reply = await fetch(port, more="Accept: application/openmetrics-text; version=1.0.0\r\n")
        assert reply.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert reply.body.endswith(b"# EOF\n")
    assert server.port is None


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6: load the kernel's module ipv6")
async def test_without_an_address_both_families_are_served(metrics):
    async with listening(MetricsServer(metrics, Gates(), 0)) as port:
        for host in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()


@pytest.mark.weak_spot(39)
async def test_a_port_that_is_taken_is_tried_again(metrics, caplog, monkeypatch):
    monkeypatch.setattr(aio.once_possible, "__kwdefaults__", {"retry": (0.01, 0.02)})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = MetricsServer(metrics, Gates(), port, "127.0.0.1")
        task = asyncio.create_task(server.run())
        await eventually(lambda: f"no metrics: can't listen on 127.0.0.1 port {port}" in caplog.text)
        assert server.port is None
    try:
        await eventually(lambda: server.port == port)
        assert (await fetch(port)).status == 200
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_crowd_gives_its_places_to_those_who_come_later(metrics, monkeypatch):
    """Silent, dribbling, or not reading: the client with most connections loses its oldest one."""
    monkeypatch.setattr(deadlines, "METRICS_SECONDS", 60)
    async with listening(MetricsServer(metrics, Gates(), 0, "127.0.0.1")) as port:
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(METRICS_CONNECTIONS)]
        for number, (_, writer) in enumerate(crowd):
            writer.write((b"", b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\nHost: a")[number % 3])
        other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        crowd.append(other)
        # Two clients share the connections of a second.
        await asyncio.sleep(1.1)
        assert (await fetch(port)).status == 200
        for reader, _ in crowd[:2]:
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
        # The other client keeps its place among them.
        other[1].write(b"GET /healthz HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(30):
            assert (await other[0].read()).startswith(b"HTTP/1.1 200 OK\r\n")
        for _, writer in crowd:
            writer.close()


@pytest.mark.parametrize("beginning", [b"", b"GET /metrics HTTP/1.1\r\n"])
async def test_a_connection_has_its_time(metrics, beginning, monkeypatch):
    monkeypatch.setattr(deadlines, "METRICS_SECONDS", 0.2)
    server = MetricsServer(metrics, Gates(), 0, "127.0.0.1")
    async with listening(server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        assert not server.open


async def test_an_unknown_expectation_is_refused(server):
    received = await send(server.path, http("GET", "/healthz", headers=["Expect: the-moon", "Connection: close"]))
    reply = parse_reply(received)
    assert reply.status == 417
    assert "server" not in reply.headers


async def test_what_is_expected_comes_before_the_answer(server):
    received = await send(server.path, http("GET", "/healthz", headers=["Expect: 100-continue"]))
    assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
