import asyncio
import contextlib
import json
import logging
import ssl
import time
from asyncio import sslproto

import pytest

from multus_daemon import __version__
from multus_daemon.cluster.kube import client as module
from multus_daemon.cluster.kube.client import CONCURRENT_REQUESTS, ApiClient
from multus_daemon.cluster.kube.credentials import InCluster, Kubeconfig
from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError, ConfigurationError, GoneError
from multus_daemon.cluster.kube.latest import StatusWriter
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from tests.fakes.apiserver import FakeApiServer
from tests.waiting import eventually


async def raw_server(answer):
    """A server that answers every connection by `answer`, bytes, and keeps it open where that ends with `...`."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer.removesuffix(b"..."))
        await writer.drain()
        if answer.endswith(b"..."):
            await reader.read()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


@contextlib.asynccontextmanager
async def client_of(answer, tmp_path):
    fake = FakeApiServer()
    async with await raw_server(answer) as server:
        fake.port = server.sockets[0].getsockname()[1]
        async with ApiClient(Kubeconfig(fake.kubeconfig(tmp_path / "k"))) as client:
            yield client


class Peer:
    """A server, or a proxy, that knows its connections and the first line of each request."""

    def __init__(self, answer=b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"):
        self.answer = answer
        self.requests = []
        """Requests of each connection."""
        self.closes_when_asked_again = False
        self._writers = []

    @contextlib.asynccontextmanager
    async def listening(self):
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
            self.close_connections()

    def close_connections(self):
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader, writer):
        asked: list[str] = []
        self.requests.append(asked)
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[15:]) for line in head.splitlines() if line.startswith("Content-Length:")), 0)
                await reader.readexactly(length)
                asked.append(head.partition("\r\n")[0])
                if self.closes_when_asked_again and len(asked) == 2:
                    self.closes_when_asked_again = False
                    break
                writer.write(self.answer)
        writer.close()


@pytest.fixture
async def peer():
    async with Peer().listening() as peer:
        yield peer


@pytest.fixture
def client_to(tmp_path):
    """A function that makes a client to a URL, by way of a proxy if one is given."""

    def make(url, proxy=""):
        path = FakeApiServer().kubeconfig(tmp_path / "k", token="t")
        config = json.loads(path.read_text())
        config["clusters"][0]["cluster"] = {"server": url} | ({"proxy-url": proxy} if proxy else {})
        path.write_text(json.dumps(config))
        return ApiClient(Kubeconfig(path))

    return make


@pytest.fixture
def threads(monkeypatch):
    """Record the functions that the event loop hands to threads."""
    found = []
    original = asyncio.BaseEventLoop.run_in_executor

    def run_in_executor(loop, executor, function, *arguments):
        found.append(function)
        return original(loop, executor, function, *arguments)

    monkeypatch.setattr(asyncio.BaseEventLoop, "run_in_executor", run_in_executor)
    return found


@pytest.fixture
def environment(monkeypatch):
    """A function that sets the variables for proxies; there are none before."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return lambda **variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


async def collect(lines):
    async with contextlib.aclosing(lines):
        return [line async for line in lines]


# --- requests ---


async def test_get_with_query(server, client):
    server.add_pod()
    body = await client.request("GET", "/api/v1/pods", query={"fieldSelector": "spec.nodeName=node-a", "limit": "5"})
    assert [item["metadata"]["name"] for item in json.loads(body)["items"]] == ["web-1"]
    assert server.agents == {f"multus-daemon/{__version__}"}
    assert server.requests == [("GET", "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-a&limit=5")]


async def test_every_request_is_counted_with_its_verb_and_status(server, client):
    counted = []
    client.count = lambda verb, code: counted.append((verb, code))
    server.add_pod()
    server.fail(500, 1, method="PATCH")
    await client.request("GET", "/api/v1/pods", query={"limit": "5"})
    await client.request("GET", "/api/v1/namespaces/web/pods/web-1")
    with pytest.raises(ApiUnavailableError):
        await client.request("PATCH", "/api/v1/namespaces/web/pods/web-1", body=b"{}")
    with contextlib.suppress(ApiUnavailableError, ApiError):
        query = {"watch": "true", "resourceVersion": "0", "timeoutSeconds": "1"}
        async with contextlib.aclosing(client.lines("/api/v1/pods", query)) as lines:
            async for _ in lines:
                break
    assert counted == [("list", "200"), ("get", "200"), ("patch", "500"), ("watch", "200")]
    await server.stop()
    with pytest.raises(ApiUnavailableError):
        await client.request("GET", "/api/v1/namespaces/web/pods/web-1")
    assert counted[-1] == ("get", "error")


async def test_bodies(server, client):
    server.add_pod(annotations={"kept": "1"})
    path = "/api/v1/namespaces/web/pods/web-1/status"
    body = '{"metadata": {"annotations": {"a": "ä \\u003c"}}}'.encode()
    await client.request("PATCH", path, body=body, content_type="application/merge-patch+json")
    assert server.get("pods", "web", "web-1")["metadata"]["annotations"] == {"kept": "1", "a": "ä <"}
    event = b'{"metadata": {"namespace": "web", "name": "e"}}'
    await client.request("POST", "/api/v1/namespaces/web/events", body=event)
    with pytest.raises(ApiError) as caught:
        await client.request("POST", "/api/v1/namespaces/web/events", body=event)
    assert (caught.value.status, caught.value.reason) == (409, "AlreadyExists")


@pytest.mark.parametrize(("status", "kind"), [(404, ApiError), (410, GoneError), (503, ApiUnavailableError)])
async def test_refusals(server, client, status, kind):
    server.fail(status, headers={"Retry-After": "2"})
    with pytest.raises(kind) as caught:
        await client.request("GET", "/api/v1/pods")
    assert caught.value.status == status
    assert caught.value.retry_after == (2.0 if kind is ApiUnavailableError else None)


async def test_deadline(server, client):
    server.delay = 5
    with pytest.raises(ApiUnavailableError, match=r"^GET /api/v1/pods: nothing heard within 0.1 s$"):
        await client.request("GET", "/api/v1/pods", timeout=0.1)


async def test_nobody_listens(server, client):
    await server.stop()
    with pytest.raises(ApiUnavailableError, match="GET /api/v1/pods: "):
        await client.request("GET", "/api/v1/pods")
    await server.start()
    assert await client.request("GET", "/api/v1/pods")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nhalf",
    ],
)
async def test_broken_answers(tmp_path, answer):
    async with client_of(answer, tmp_path) as client:
        with pytest.raises(ApiUnavailableError):
            await client.request("GET", "/api/v1/pods")


async def test_number_of_requests_at_once_is_bounded(server, client):
    server.delay = 30
    tasks = [asyncio.create_task(client.request("GET", "/api/v1/pods")) for _ in range(CONCURRENT_REQUESTS + 5)]
    await eventually(lambda: len(server.requests) == CONCURRENT_REQUESTS)
    await asyncio.sleep(0.05)
    assert len(server.requests) == CONCURRENT_REQUESTS
    for task in tasks[:CONCURRENT_REQUESTS]:
        task.cancel()
    await eventually(lambda: len(server.requests) == CONCURRENT_REQUESTS + 5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_waiting_for_a_turn_counts_for_the_deadline(server, client):
    server.delay = 1
    tasks = [asyncio.create_task(client.request("GET", "/api/v1/pods")) for _ in range(CONCURRENT_REQUESTS)]
    await asyncio.sleep(0.05)
    with pytest.raises(ApiUnavailableError):
        await client.request("GET", "/api/v1/pods", timeout=0.1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_cancelled(server, client):
    server.delay = 5
    task = asyncio.create_task(client.request("GET", "/api/v1/pods"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- connections ---


async def test_a_request_starts_no_thread_and_reads_no_netrc(
    server, client, environment, monkeypatch, threads, tmp_path
):
    (tmp_path / "netrc").write_text("default login of-netrc password of-netrc")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    await client.load()
    threads.clear()
    for _ in range(3):
        await client.request("GET", "/api/v1/pods")
    assert threads == []


async def test_a_connection_is_used_again_within_a_minute(peer, client_to, monkeypatch):
    passed = 0.0
    monkeypatch.setattr("aiohttp.connector.monotonic", lambda: time.monotonic() + passed)
    async with client_to(peer.url) as client:
        for _ in range(3):
            await client.request("PATCH", "/a", body=b"{}")
            passed += module.KEPT_SECONDS - 5
        assert peer.requests == [["PATCH /a HTTP/1.1"] * 3]
        passed += 10
        await client.request("PATCH", "/a", body=b"{}")
        assert len(peer.requests) == 2


async def test_a_connection_that_the_server_has_closed_is_not_used_again(peer, client_to):
    async with client_to(peer.url) as client:
        for _ in range(3):
            await client.request("PATCH", "/a", body=b"{}")
            peer.close_connections()
            await asyncio.sleep(0.02)
    assert peer.requests == [["PATCH /a HTTP/1.1"]] * 3


async def test_a_get_is_sent_again_where_the_server_closes_the_connection_meanwhile(peer, client_to):
    async with client_to(peer.url) as client:
        await client.request("GET", "/a")
        peer.closes_when_asked_again = True
        await client.request("GET", "/b")
    assert peer.requests == [["GET /a HTTP/1.1", "GET /b HTTP/1.1"], ["GET /b HTTP/1.1"]]


async def test_a_status_is_sent_again_where_the_server_closes_the_connection_meanwhile(peer, client_to):
    async with client_to(peer.url) as client:
        writer = StatusWriter(client)
        pod = Pod(Namespace("web"), PodName("web-1"), PodUid("uid"))
        await writer.write(pod, "1", keep_trying=False)
        peer.closes_when_asked_again = True
        await writer.write(pod, "2", keep_trying=False)
    assert [len(asked) for asked in peer.requests] == [2, 1]


@pytest.mark.parametrize("how", ["proxy-url", "https_proxy", "HTTPS_PROXY"])
async def test_a_proxy_is_asked_for_a_tunnel(peer, client_to, environment, how):
    peer.answer = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
    if how != "proxy-url":
        environment(**{how: peer.url})
    async with client_to("https://api.invalid:6443", peer.url if how == "proxy-url" else "") as client:
        with pytest.raises(ApiUnavailableError, match="502"):
            await client.request("GET", "/version")
    assert peer.requests == [["CONNECT api.invalid:6443 HTTP/1.1"]]


async def test_a_proxy_without_tls(peer, client_to, environment):
    environment(http_proxy=peer.url)
    async with client_to("http://api.invalid:8080") as client:
        assert await client.request("GET", "/version") == b"{}"
    assert peer.requests == [["GET http://api.invalid:8080/version HTTP/1.1"]]


async def test_no_proxy_for_what_is_excepted(peer, server, client, environment, threads):
    environment(http_proxy=peer.url, no_proxy="10.0.0.1,127.0.0.1")
    await client.load()
    threads.clear()
    await client.request("GET", "/api/v1/pods")
    assert len(server.requests) == 1
    assert peer.requests == []
    assert threads == []


# --- credentials ---


async def test_nothing_is_read_before_the_first_request(tmp_path):
    async with ApiClient(Kubeconfig(tmp_path / "absent")) as client:
        with pytest.raises(ConfigurationError, match="absent"):
            await client.load()
        with pytest.raises(ConfigurationError, match="absent"):
            await client.request("GET", "/version")


async def test_a_token_that_is_refused_is_tried_twice_and_told(server, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    (tmp_path / "token").write_text("wrong-secret")
    server.tokens = {"right"}
    told = []
    source = Kubeconfig(server.kubeconfig(tmp_path / "k", tokenFile="token"))
    async with ApiClient(source, on_unauthorized=lambda: told.append(1)) as client:
        with pytest.raises(ApiError) as caught:
            await client.request("GET", "/api/v1/pods")
    assert caught.value.status == 401
    assert len(server.requests) == 2
    assert told == [1]
    assert "wrong-secret" not in caplog.text + str(caught.value)


async def test_a_replaced_kubeconfig_is_read_again_after_a_401(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RELOAD_SECONDS", 0.05)
    server.tokens = {"one"}
    path = server.kubeconfig(tmp_path / "k", token="one")
    async with ApiClient(Kubeconfig(path)) as client:
        await client.request("GET", "/api/v1/pods")
        server.kubeconfig(path, token="two")
        server.tokens = {"two"}
        await asyncio.sleep(0.06)
        await client.request("GET", "/api/v1/pods")
        server.tokens = {"three"}
        monkeypatch.setattr(module, "RELOAD_SECONDS", 1000)
        before = len(server.requests)
        for _ in range(5):
            with pytest.raises(ApiError):
                await client.request("GET", "/api/v1/pods")
        # Not every one of them reads the file and asks again.
        assert len(server.requests) - before == 5


async def test_a_connection_with_tls_has_a_small_buffer(server, tmp_path, monkeypatch):
    """asyncio allocates a buffer for each connection and touches all of it."""
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", 256 * 1024)
    async with ApiClient(Kubeconfig(server.kubeconfig(tmp_path / "k"))) as client:
        await client.load()
        loop, context = asyncio.get_running_loop(), ssl.create_default_context()
        made = sslproto.SSLProtocol(loop, asyncio.Protocol(), context, loop.create_future(), server_hostname="server")
        assert len(made.get_buffer(-1)) == 32 * 1024
        made.connection_lost(None)


async def test_in_cluster_by_its_files(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_text("no certificate")
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    async with ApiClient(InCluster(environ, tmp_path / "token", tmp_path / "ca.crt")) as client:
        with pytest.raises(ConfigurationError):
            await client.request("GET", "/version")


async def test_credentials_that_can_not_be_read_stay(server, tmp_path, caplog):
    path = server.kubeconfig(tmp_path / "k", token="one")
    async with ApiClient(Kubeconfig(path)) as client:
        await client.request("GET", "/api/v1/pods")
        path.write_text("{")
        client.reload()
        await client.request("GET", "/api/v1/pods")
        await client.request("GET", "/api/v1/pods")
    assert caplog.text.count("stay in use") == 1


async def test_a_cancelled_reload_is_made_up_for(server, tmp_path):
    path = server.kubeconfig(tmp_path / "k", token="one")
    async with ApiClient(Kubeconfig(path)) as client:
        await client.request("GET", "/api/v1/pods")
        server.kubeconfig(path, token="two")
        server.tokens = {"two"}
        client.reload()
        task = asyncio.create_task(client.request("GET", "/api/v1/pods"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        client.reload()
        await client.request("GET", "/api/v1/pods")


# --- watches ---


async def test_lines(server, client):
    opened = []
    watch = client.lines("/api/v1/pods", {"watch": "1"}, on_open=lambda: opened.append(1))
    task = asyncio.create_task(collect(watch))
    await eventually(lambda: server.watches)
    for part in (b"on", b"e\ntwo\n\n\nth", b"ree\n"):
        server.send_on_watches(part)
        await asyncio.sleep(0.01)
    server.cut_watches()
    assert await task == [b"one", b"two", b"three"]
    assert opened == [1]


async def test_a_watch_cut_within_a_line(server, client):
    task = asyncio.create_task(collect(client.lines("/api/v1/pods", {"watch": "1"})))
    await eventually(lambda: server.watches)
    server.cut_watches(b'{"type": "ADDED", "obj')
    with pytest.raises(ApiUnavailableError, match="within a line"):
        await task


async def test_a_watch_cut_by_the_connection(tmp_path):
    async with client_of(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n", tmp_path) as client:
        with pytest.raises(ApiUnavailableError):
            await collect(client.lines("/api/v1/pods", {}))


async def test_a_silent_watch(tmp_path):
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n..."
    async with client_of(answer, tmp_path) as client:
        with pytest.raises(ApiUnavailableError, match=r"watch of /api/v1/pods: nothing heard within 0.1 s"):
            await collect(client.lines("/api/v1/pods", {}, inactivity=0.1))


async def test_a_line_without_end(server, client, monkeypatch):
    monkeypatch.setattr(module, "LINE_MAX_BYTES", 1000)
    task = asyncio.create_task(collect(client.lines("/api/v1/pods", {"watch": "1"})))
    await eventually(lambda: server.watches)
    server.send_on_watches(b"x" * 1001)
    with pytest.raises(ApiUnavailableError, match="longer than 1000 bytes"):
        await task


async def test_a_long_line(server, client):
    task = asyncio.create_task(collect(client.lines("/api/v1/pods", {"watch": "1"})))
    await eventually(lambda: server.watches)
    long = b"x" * 6_000_000
    server.send_on_watches(long + b"\n")
    server.cut_watches()
    assert await task == [long]


async def test_a_refused_watch(server, client):
    server.fail(403)
    with pytest.raises(ApiError):
        await collect(client.lines("/api/v1/pods", {"watch": "1"}))


async def test_watches_do_not_take_the_place_of_requests(server, client):
    tasks = [asyncio.create_task(collect(client.lines("/api/v1/pods", {"watch": "1"}))) for _ in range(3)]
    await eventually(lambda: server.watches == 3)
    await asyncio.gather(*[client.request("GET", "/api/v1/pods") for _ in range(2 * CONCURRENT_REQUESTS)])
    server.cut_watches()
    await asyncio.gather(*tasks)


async def test_an_answer_without_end(server, client, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_MAX_BYTES", 1000)
    server.add_pod(annotations={"a": "x" * 1000})
    with pytest.raises(ApiUnavailableError, match="GET /api/v1/pods: the answer is longer than 1000 bytes"):
        await client.request("GET", "/api/v1/pods")
