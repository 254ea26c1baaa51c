"""TLS: the server's certificate is checked, the client's is shown, and replaced without a failed request."""

import asyncio
import contextlib
import gc
import json
import socket
import ssl
import threading
import warnings

import pytest

from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import InCluster, Kubeconfig
from multus_daemon.cluster.kube.errors import ApiUnavailableError
from tests.e2e.certificates import Authority
from tests.fakes.apiserver import FakeApiServer
from tests.programs import require
from tests.waiting import eventually


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    require("openssl")
    return Authority(tmp_path_factory.mktemp("tls") / "pki", ("IP:127.0.0.1",))


@pytest.fixture
async def server(authority):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.certificate))
    pair = authority.server()
    context.load_cert_chain(pair.certificate, pair.key)
    context.verify_mode = ssl.CERT_OPTIONAL
    server = FakeApiServer()
    await server.start(context)
    yield server
    await server.stop()


def install(directory, authority, user):
    """Certificate and key in one file, as the certificate manager keeps them."""
    pair = authority.client(user, user)
    new = directory / "new.pem"
    new.write_bytes(pair.certificate.read_bytes() + pair.key.read_bytes())
    new.rename(directory / "current.pem")


async def test_a_new_client_certificate_is_used_after_reload(server, authority, tmp_path):
    install(tmp_path, authority, "first")
    kubeconfig = server.kubeconfig(tmp_path / "k", ca=authority.certificate, token="bootstrap")
    async with ApiClient(Kubeconfig(kubeconfig, certificate=tmp_path / "current.pem")) as client:
        watch = client.lines("/api/v1/pods", {"watch": "1"})
        async with contextlib.aclosing(watch):
            line = asyncio.create_task(anext(watch))
            await eventually(lambda: server.watches)
            load = asyncio.gather(*[client.request("GET", "/api/v1/pods") for _ in range(50)])
            await asyncio.sleep(0)
            install(tmp_path, authority, "second")
            client.reload()
            await load
            await client.request("GET", "/api/v1/pods")
            assert server.peers[0] == "first"
            assert server.peers[-1] == "second"
            server.send_on_watches(b"still there\n")
            assert await line == b"still there"


async def test_a_certificate_half_replaced_is_not_used(server, authority, tmp_path):
    install(tmp_path, authority, "third")
    kubeconfig = server.kubeconfig(tmp_path / "k", ca=authority.certificate)
    async with ApiClient(Kubeconfig(kubeconfig, certificate=tmp_path / "current.pem")) as client:
        await client.request("GET", "/api/v1/pods")
        (tmp_path / "current.pem").write_text("half")
        client.reload()
        await client.request("GET", "/api/v1/pods")
        assert server.peers == ["third"] * 2
        install(tmp_path, authority, "fourth")
        client.reload()
        await client.request("GET", "/api/v1/pods")
        assert server.peers[-1] == "fourth"


async def test_a_server_that_is_not_ours_gets_no_token(server, authority, tmp_path):
    other = Authority(tmp_path / "other", ("IP:127.0.0.1",))
    for ca, reachable in ((authority.certificate, True), (other.certificate, False)):
        (tmp_path / "token").write_text("t\n")
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
        async with ApiClient(InCluster(environ, tmp_path / "token", ca)) as client:
            server.tokens = {"t"}
            if reachable:
                await client.request("GET", "/api/v1/pods")
            else:
                with pytest.raises(ApiUnavailableError, match="certificate verify failed"):
                    await client.request("GET", "/api/v1/pods")
    assert len(server.requests) == 1


def test_a_watch_that_is_given_up_leaves_no_connection_to_a_server_that_is_gone(authority, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = authority.server()
    context.load_cert_chain(pair.certificate, pair.key)
    seen = threading.Event()

    def serve(listener):
        # One line, and then nothing at all, not even the end of TLS.
        connection = context.wrap_socket(listener.accept()[0], server_side=True)
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}\n\r\n")
            seen.wait(10)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, args=(listener,))
        serving.start()
        fake = FakeApiServer()
        fake.port = listener.getsockname()[1]
        kubeconfig = fake.kubeconfig(tmp_path / "k", ca=authority.certificate)
        kubeconfig.write_text(json.dumps(json.loads(kubeconfig.read_text())).replace("http:", "https:"))

        async def watch():
            async with (
                ApiClient(Kubeconfig(kubeconfig)) as client,
                contextlib.aclosing(client.lines("/api/v1/pods", {"watch": "1"})) as lines,
            ):
                assert await anext(lines) == b"{}"

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            asyncio.run(watch())
            gc.collect()
        seen.set()
        serving.join(10)
    assert [str(warning.message) for warning in warned] == []


@pytest.mark.parametrize(
    ("cluster", "reachable"),
    [
        ({}, False),
        ({"tls-server-name": "127.0.0.1"}, True),
        ({"tls-server-name": "127.0.0.2"}, False),
        ({"insecure-skip-tls-verify": True}, True),
    ],
)
async def test_what_a_kubeconfig_says_of_the_servers_name(server, authority, tmp_path, cluster, reachable):
    path = server.kubeconfig(tmp_path / "k", ca=authority.certificate)
    config = json.loads(path.read_text())
    # The certificate is for the address.
    config["clusters"][0]["cluster"] |= {"server": server.url.replace("127.0.0.1", "localhost"), **cluster}
    path.write_text(json.dumps(config))
    async with ApiClient(Kubeconfig(path)) as client:
        if reachable:
            await client.request("GET", "/api/v1/pods")
        else:
            with pytest.raises(ApiUnavailableError, match="certificate verify failed"):
                await client.request("GET", "/api/v1/pods")
