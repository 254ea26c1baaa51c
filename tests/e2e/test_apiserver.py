"""The harness with the real API server does what tests will rely on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import namespaces
from tests.e2e import tokens
from tests.e2e.apiserver import ApiServer
from tests.e2e.certificates import Pair, openssl
from tests.e2e.kube_client import ApiError, Client
from tests.programs import needed, require

pytest_plugins = ["tests.e2e.kube_fixtures"]

GROUP = "k8s.cni.cncf.io"
NAD_CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"network-attachment-definitions.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {
            "plural": "network-attachment-definitions",
            "singular": "network-attachment-definition",
            "kind": "NetworkAttachmentDefinition",
            "shortNames": ["net-attach-def"],
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {"spec": {"type": "object", "properties": {"config": {"type": "string"}}}},
                    }
                },
            }
        ],
    },
}


def refused(client: Client, path: str) -> int:
    """The status with which a GET is refused; 200 where it is not."""
    try:
        client.get(path)
    except ApiError as error:
        return error.code
    return 200


def is_refused(client: Client) -> bool:
    return refused(client, "/api/v1/pods") == 401


def client_of(kubeconfig: Path, server: ApiServer) -> Client:
    user = yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]
    return Client(server.url, server.ca_file, pair=Pair(Path(user["client-certificate"]), Path(user["client-key"])))


@pytest.fixture
def account(api_server: ApiServer, api_namespace: str) -> Iterator[Client]:
    """A client with a fresh token of the account `plain`, which may do nothing."""
    client = api_server.client_for_token(api_server.service_account_token(api_namespace, "plain"))
    yield client
    client.close()


def allow(server: ApiServer, namespace: str, name: str, *verbs: str) -> None:
    """The service account may do that with the namespace's pods."""
    metadata = {"namespace": namespace, "name": name}
    api = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": list(verbs)}]
    server.apply(
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": api, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "namespace": namespace, "name": name}],
        },
    )


def test_a_server_of_its_own_starts_and_leaves_nothing(api_server: ApiServer) -> None:
    start = time.monotonic()
    with ApiServer() as other:
        assert time.monotonic() - start < 60
        assert other.port != api_server.port
        assert other.client.get("/version")["gitVersion"].startswith("v1.")
        processes, directory = (other.server.pid, other.etcd.pid), other.directory
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert not directory.exists()


@pytest.mark.usefixtures("api_server")  # Skips where the programs are missing.
def test_a_server_that_cannot_start_says_why() -> None:
    server = ApiServer("--no-such-flag")
    with pytest.raises(Exception, match=r"kube-apiserver has ended\n(.|\n)*no-such-flag"), server:
        pass
    assert not server.directory.exists()


KILLED = """
import os, signal, sys
from tests.e2e.apiserver import ApiServer
with ApiServer() as server:
    print(server.server.pid, server.etcd.pid, server.directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("api_server")  # Skips where the programs are missing.
def test_its_processes_end_with_a_killed_test_run() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=root, capture_output=True, text=True, timeout=100)
    assert len(done.stdout.split()) == 3, done.stderr
    *pids, directory = done.stdout.split()
    ApiServer.wait_until(lambda: not any(running(pid) for pid in pids), "the processes have ended", 30)
    shutil.rmtree(directory)


def running(pid: str) -> bool:
    """Return True if the process exists and is not a zombie (its new parent may reap it late)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nobody_is_anonymous(api_server: ApiServer) -> None:
    client = Client(api_server.url, api_server.ca_file)
    assert refused(client, "/readyz") == 401
    client.close()


def test_rbac_refuses_what_it_does_not_allow(api_server: ApiServer, api_namespace: str, account: Client) -> None:
    pods = f"/api/v1/namespaces/{api_namespace}/pods"
    assert refused(account, pods) == 403
    allow(api_server, api_namespace, "plain", "list")
    api_server.wait_until(lambda: refused(account, pods) == 200, "the role works")
    assert refused(account, f"{pods}/any") == 403


def test_a_node_s_certificate(api_server: ApiServer, api_namespace: str) -> None:
    api_server.create_node("n1")
    api_server.create_pod("here", namespace=api_namespace, node="n1")
    kubeconfig = api_server.kubeconfig("system:node:n1", ["system:nodes"])
    client = client_of(kubeconfig, api_server)
    me = client.request(
        "POST",
        "/apis/authentication.k8s.io/v1/selfsubjectreviews",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"},
    )["status"]["userInfo"]
    assert me["username"] == "system:node:n1"
    assert "system:nodes" in me["groups"]
    pods = client.get("/api/v1/pods", fieldSelector="spec.nodeName=n1")
    assert "here" in [pod["metadata"]["name"] for pod in pods["items"]]
    assert refused(client, "/api/v1/namespaces") == 403
    client.close()


def test_a_certificate_ends_when_it_says_so(api_server: ApiServer) -> None:
    client = client_of(api_server.kubeconfig("someone", seconds=12), api_server)
    assert refused(client, "/api/v1/namespaces") == 403
    client.close()
    # The server looks at the certificate at each request, not at the handshake.
    api_server.wait_until(lambda: refused(client, "/api/v1/namespaces") == 401, "the certificate has ended", 40)
    client.close()


def test_a_certificate_is_requested_approved_and_signed(api_server: ApiServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(key))
    request = openssl("req", "-new", "-key", str(key), "-subj", "/O=system:multus/CN=system:multus:n1")
    csr = {
        "apiVersion": "certificates.k8s.io/v1",
        "kind": "CertificateSigningRequest",
        "metadata": {"name": "n1"},
        "spec": {
            "request": openssl("base64", "-A", stdin=request).decode(),
            "signerName": "kubernetes.io/kube-apiserver-client",
            "usages": ["digital signature", "client auth"],
        },
    }
    api_server.apply(csr)
    api_server.approve_certificate("n1")
    api_server.sign_certificate("n1", seconds=600)
    got = api_server.get("certificates.k8s.io/v1", "CertificateSigningRequest", "n1")
    certificate = openssl("base64", "-d", "-A", stdin=got["status"]["certificate"].encode())
    assert b"CN = system:multus:n1" in openssl("x509", "-noout", "-subject", stdin=certificate)


def test_the_token_request_api_gives_nothing_short(api_server: ApiServer, api_namespace: str) -> None:
    api_server.create_service_account(api_namespace, "plain")
    with pytest.raises(ApiError, match="may not specify a duration less than 10 minutes") as error:
        api_server.request_token(api_namespace, "plain", seconds=tokens.SHORTEST_REQUEST - 1)
    assert error.value.code == 422


def test_a_short_token_ends_and_a_bound_one_dies_with_its_object(api_server: ApiServer, api_namespace: str) -> None:
    pod = api_server.create_pod("owner", namespace=api_namespace, serviceAccountName="plain")
    start = time.monotonic()
    short = api_server.client_for_token(api_server.service_account_token(api_namespace, "plain", seconds=10))
    bound = api_server.client_for_token(api_server.service_account_token(api_namespace, "plain", bound_to=pod))
    unused = api_server.client_for_token(api_server.service_account_token(api_namespace, "plain", seconds=10))
    assert refused(short, "/api/v1/pods") == 403
    assert refused(bound, "/api/v1/pods") == 403
    assert api_server.delete_pod("owner", api_namespace)
    time.sleep(11)
    assert refused(unused, "/api/v1/pods") == 401
    # The server remembers for some seconds which tokens were good.
    for client in (short, bound):
        api_server.wait_until(partial(is_refused, client), "the token has ended", 40)
    assert time.monotonic() - start <= 10 + tokens.SUCCESS_CACHE + 60
    fresh = api_server.client_for_token(api_server.service_account_token(api_namespace, "plain", seconds=30))
    assert refused(fresh, "/api/v1/pods") == 403
    for client in (short, bound, unused, fresh):
        client.close()


def test_a_rotated_token_file_is_never_refused(api_server: ApiServer, api_namespace: str, tmp_path: Path) -> None:
    """How "a token that expires under load" is made: a new short token replaces the file before the old one ends."""
    file = tmp_path / "token"

    def rotate() -> None:
        fresh = tmp_path / ".token"
        fresh.write_text(api_server.service_account_token(api_namespace, "plain", seconds=8))
        fresh.rename(file)

    mark = api_server.audit_mark()
    begin = time.monotonic()
    for _ in range(4):
        rotate()
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            client = api_server.client_for_token(file.read_text())
            assert refused(client, "/api/v1/pods") == 403
            client.close()
    assert time.monotonic() - begin > 8
    codes = {item["code"] for item in api_server.audit(f"system:serviceaccount:{api_namespace}:plain", since=mark)}
    assert codes == {403}


def test_an_outage_keeps_data_and_address(api_server: ApiServer, api_namespace: str) -> None:
    before = api_server.create_pod("kept", namespace=api_namespace)
    api_server.stop()
    with pytest.raises(ConnectionRefusedError):
        api_server.client.get("/readyz")
    start = time.monotonic()
    api_server.start()
    assert time.monotonic() - start < 60
    assert api_server.get("v1", "Pod", "kept", api_namespace)["metadata"]["uid"] == before["metadata"]["uid"]


def test_an_orderly_stop(api_server: ApiServer) -> None:
    api_server.stop(signal.SIGTERM)
    with pytest.raises(ConnectionRefusedError):
        api_server.client.get("/readyz")
    api_server.start()


def test_a_frozen_server_answers_later(api_server: ApiServer) -> None:
    client = Client(api_server.url, api_server.ca_file, timeout=0.5)
    api_server.pause()
    with pytest.raises(TimeoutError):
        client.get("/readyz")
    client.close()
    api_server.resume()
    patient = Client(api_server.url, api_server.ca_file)
    assert refused(patient, "/readyz") == 401
    patient.close()


def test_the_audit_log_counts_by_user(api_server: ApiServer, api_namespace: str, account: Client) -> None:
    user = f"system:serviceaccount:{api_namespace}:plain"
    allow(api_server, api_namespace, "plain", "get", "patch", "watch")
    api_server.create_pod("p", namespace=api_namespace)
    pods = f"/api/v1/namespaces/{api_namespace}/pods"
    api_server.wait_until(lambda: refused(account, f"{pods}/p") == 200, "the role works")
    mark = api_server.audit_mark()
    account.get(f"{pods}/p")
    account.merge(f"{pods}/p", {"metadata": {"annotations": {"a": "b"}}})
    assert refused(account, f"{pods}/p/log") == 403
    account.get(pods, watch="true", timeoutSeconds=1)
    api_server.create_pod("q", namespace=api_namespace)
    seen = api_server.audit(user, since=mark)
    assert [(item["verb"], item["resource"], item["subresource"], item["name"], item["code"]) for item in seen] == [
        ("get", "pods", "", "p", 200),
        ("patch", "pods", "", "p", 200),
        ("get", "pods", "log", "p", 403),
        ("watch", "pods", "", "", 200),
    ]
    assert {item["userAgent"] for item in seen} == {"multus-daemon-tests"}
    assert seen[1]["uri"] == f"{pods}/p"
    everybody = api_server.audit(since=mark)
    # A server that has just started makes objects of its own.
    made = [item["user"] for item in everybody if item["verb"] == "create"]
    assert [user for user in made if user != "system:apiserver"] == ["admin"]


def test_network_attachment_definitions(api_server: ApiServer, api_namespace: str) -> None:
    api_server.install_crd(NAD_CRD)
    nad = {
        "apiVersion": f"{GROUP}/v1",
        "kind": "NetworkAttachmentDefinition",
        "metadata": {"namespace": api_namespace, "name": "a"},
        "spec": {"config": json.dumps({"cniVersion": "1.0.0", "type": "macvlan"})},
    }
    (first,) = api_server.apply(nad)
    nad["spec"] = {"config": ""}
    (second,) = api_server.apply(nad)
    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    assert api_server.get(f"{GROUP}/v1", "NetworkAttachmentDefinition", "a", api_namespace)["spec"] == nad["spec"]
    assert api_server.delete(f"{GROUP}/v1", "NetworkAttachmentDefinition", "a", api_namespace)
    assert not api_server.delete(f"{GROUP}/v1", "NetworkAttachmentDefinition", "a", api_namespace)


def test_a_running_pod_of_a_node(api_server: ApiServer, api_namespace: str) -> None:
    api_server.create_node("n2")
    pod = api_server.create_pod("p", namespace=api_namespace, node="n2", annotations={"x": "y"}, hostNetwork=True)
    assert pod["spec"]["nodeName"] == "n2"
    assert pod["spec"]["hostNetwork"] is True
    assert pod["status"]["phase"] == "Running"
    assert pod["metadata"]["annotations"] == {"x": "y"}


@pytest.fixture
def namespace_path() -> Iterator[str]:
    require("ip")
    with namespaces.named("relay") as path:
        with namespaces.entered(path):
            namespaces.set_up("lo")
        yield path


ASK = """
import ssl, sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], context=ssl.create_default_context(cafile=sys.argv[2]), timeout=5)
except Exception as error:
    print(error)
"""


def test_the_same_url_inside_a_network_namespace(api_server: ApiServer, namespace_path: str) -> None:
    def ask() -> str:
        inside = [needed("ip"), "netns", "exec", Path(namespace_path).name, sys.executable, "-c", ASK]
        command = [*inside, f"{api_server.url}/readyz", str(api_server.ca_file)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert "refused" in ask()
    with api_server.reachable_in(namespace_path) as url:
        assert url == api_server.url
        assert "401" in ask()
        api_server.stop()
        assert "refused" in ask()
        api_server.start()
        assert "401" in ask()
    assert "refused" in ask()
