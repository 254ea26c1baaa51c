"""The metrics port of a real daemon, whose scrapers a real API server judges, with the rights of `manifests/`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from multus_daemon.api.metrics_port import METRICS_PER_SECOND
from tests.e2e.apiserver import ApiServer
from tests.e2e.certificates import Authority
from tests.e2e.rights import Container
from tests.repo.manifests import MANIFESTS

pytest_plugins = ["tests.e2e.kube_fixtures"]

USER = "system:serviceaccount:kube-system:multus-daemon"


def objects(name: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all((MANIFESTS / name).read_text()) if item]


class Scraped:
    """A daemon whose metrics port speaks TLS and asks for tokens."""

    def __init__(self, server: ApiServer, root: Path) -> None:
        self.root, self.server = root, server
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.certificate, self.key = root / "tls.crt", root / "tls.key"
        self.log = root / "log"
        self.authority = Authority(root / "ca", ("IP:127.0.0.1",))
        self.renew()

    def renew(self) -> None:
        """Replace certificate and key."""
        pair = self.authority.server()
        for source, target in ((pair.key, self.key), (pair.certificate, self.certificate)):
            shutil.copyfile(source, target.with_suffix(".new"))
            target.with_suffix(".new").rename(target)

    @contextlib.contextmanager
    def running(self, kubeconfig: Path, **settings: object) -> Iterator[None]:
        """Run the daemon for the block."""
        own = {"socketDir": str(self.root / "run"), "cniDir": str(self.root / "cni"), "cniConfigDir": ""}
        port = {"metricsPort": self.port, "metricsAddress": "127.0.0.1"}
        tls = {"certFile": str(self.certificate), "keyFile": str(self.key)}
        given = own | port | {"kubeconfig": str(kubeconfig), "metricsTLS": tls, "logLevel": "debug"} | settings
        config = self.root / "daemon-config.json"
        config.write_text(json.dumps(given))
        with Container(self.root) as container:
            command = container.daemon(given, "--config", str(config))
            with self.log.open("wb") as log:
                daemon = subprocess.Popen(command, env=os.environ | {"MULTUS_NODE_NAME": "node-a"}, stderr=log)
            try:
                self.server.wait_until(lambda: self.ask("/healthz")[0] == 200, "the port is open")
                yield
            finally:
                daemon.terminate()
                daemon.wait(30)

    def ask(self, path: str = "/metrics", token: str = "") -> tuple[int, str]:
        """Status and body of the answer; 0 if there is none."""
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        # A client may make METRICS_PER_SECOND connections in a second.
        time.sleep(1.5 / METRICS_PER_SECOND)
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=context)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            except ConnectionRefusedError as error:
                return 0, str(error)


@pytest.fixture
def scraped(api_server: ApiServer, tmp_path: Path) -> Scraped:
    (crd,) = objects("base/crd.yaml")
    api_server.install_crd(crd)
    return Scraped(api_server, tmp_path)


@pytest.fixture
def kubeconfig(api_server: ApiServer) -> Path:
    return api_server.kubeconfig_for_token(api_server.service_account_token("kube-system", "multus-daemon"))


def grant(server: ApiServer, namespace: str, account: str) -> None:
    """Let the account get /metrics, as `kubectl create clusterrole --non-resource-url` does."""
    api = "rbac.authorization.k8s.io"
    rule = {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}
    subject = {"kind": "ServiceAccount", "namespace": namespace, "name": account}
    role = {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": f"scraper-{namespace}"}}
    binding = {**role, "kind": "ClusterRoleBinding", "subjects": [subject]}
    reference = {"apiGroup": api, "kind": "ClusterRole", "name": f"scraper-{namespace}"}
    server.apply({**role, "rules": [rule]}, {**binding, "roleRef": reference})


def test_the_api_server_decides_who_reads_the_metrics(
    api_server: ApiServer, api_namespace: str, scraped: Scraped, kubeconfig: Path
) -> None:
    api_server.apply(*objects("base/rbac.yaml"))
    reviews = objects("metrics-authorization/rbac.yaml")
    for item in reviews:
        api_server.delete(item["apiVersion"], item["kind"], item["metadata"]["name"])
    grant(api_server, api_namespace, "scraper")
    good = api_server.service_account_token(api_namespace, "scraper")
    poor = api_server.service_account_token(api_namespace, "other")
    wrong = good[:-8] + "AAAAAAAA"
    with scraped.running(kubeconfig, metricsAuthorization=True):
        # Without the component the daemon may not ask.
        assert scraped.ask(token=good)[0] == 503
        said = "grant the rights of manifests/metrics-authorization"
        api_server.wait_until(lambda: said in scraped.log.read_text(), "the log says what to do")
        api_server.apply(*reviews)
        api_server.wait_until(lambda: scraped.ask(token=good)[0] == 200, "the daemon may ask")
        mark = api_server.audit_mark()
        for _ in range(5):
            status, text = scraped.ask(token=good)
            assert (status, "multus_build_info{" in text) == (200, True)
            assert scraped.ask(token=wrong) == (401, "the API server does not accept the token\n")
            assert scraped.ask(token=poor)[0] == 403
        assert scraped.ask() == (401, "a bearer token is needed\n")
        asked = [item["resource"] for item in api_server.audit(USER, since=mark) if item["verb"] == "create"]
        assert sorted(asked) == ["subjectaccessreviews", "tokenreviews", "tokenreviews"]
        api_server.wait_until(lambda: scraped.ask("/readyz") == (200, "ok"), "the daemon is ready")
        api_server.pause()
        assert scraped.ask(token=good)[0] == 200
        assert scraped.ask(token=poor[:-8] + "AAAAAAAA")[0] == 503
        assert (scraped.ask("/healthz")[0], scraped.ask("/readyz")) == (200, (200, "ok"))
        api_server.resume()
    said = scraped.log.read_text()
    assert not [token for token in (good, poor, wrong) if token in said or token.rpartition(".")[2] in said]
