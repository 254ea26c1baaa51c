"""The admission webhook with a real API server: `multus-daemon webhook`, the manifests' configuration, kubectl."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import build_tools
from tests.e2e.apiserver import ApiServer
from tests.e2e.certificates import Authority
from tests.e2e.server_process import ServerProcess, free_port
from tests.repo.manifests import MANIFESTS

pytest_plugins = ["tests.e2e.kube_fixtures"]

GOOD = '{"cniVersion": "1.0.0", "type": "ptp", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}'
BAD = '{\n  "cniVersion": "1.0.0",\n  "type": "ptp",\n}'


def network(name: str, config: str) -> dict[str, Any]:
    kind = {"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition"}
    return {**kind, "metadata": {"name": name}, "spec": {"config": config}}


def pod(name: str, networks: str) -> dict[str, Any]:
    metadata = {"name": name, "annotations": {"k8s.v1.cni.cncf.io/networks": networks}}
    container = {"name": "main", "image": "none"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


class Cluster:
    """An API server that asks a webhook of this machine."""

    def __init__(self, server: ApiServer, namespace: str, directory: Path) -> None:
        self.namespace = namespace
        self._kubectl = build_tools.find("kubectl")
        self._kubeconfig = server.kubeconfig("administrator", ("system:masters",))
        self._server = server
        for item in yaml.safe_load_all((MANIFESTS / "webhook" / "rbac.yaml").read_text()):
            server.apply(item)
        self._own = server.kubeconfig_for_token(
            server.service_account_token("kube-system", "multus-webhook", seconds=3600)
        )
        authority = Authority(directory / "pki", ("IP:127.0.0.1",))
        pair, port = authority.server(), free_port()
        files = ["--cert", str(pair.certificate), "--key", str(pair.key), "--kubeconfig", str(self._own)]
        command = [sys.executable, "-m", "multus_daemon.cli", "webhook", *files, "--port", str(port)]
        self.webhook = ServerProcess("webhook", [*command, "--address", "127.0.0.1"], directory)
        (configuration,) = yaml.safe_load_all((MANIFESTS / "webhook" / "configuration.yaml").read_text())
        for item in configuration["webhooks"]:
            bundle = base64.b64encode(authority.certificate.read_bytes()).decode()
            item["clientConfig"] = {"url": f"https://127.0.0.1:{port}/validate", "caBundle": bundle}
        # Not of other tests' objects.
        for item in configuration["webhooks"]:
            item["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
        self._configuration = configuration

    def __enter__(self) -> Cluster:
        self.webhook.start()
        self._server.apply(self._configuration)
        # The API server reads its configuration a moment later, and the webhook its networks.
        self.wait_until("denied the request", network("probe", BAD))
        return self

    def __exit__(self, *_: object) -> None:
        self.webhook.stop()
        group = "admissionregistration.k8s.io/v1"
        self._server.delete(group, "ValidatingWebhookConfiguration", "multus-webhook")

    def apply(self, *items: dict[str, Any], words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [str(self._kubectl), "--kubeconfig", str(self._kubeconfig), "-n", self.namespace, "apply", *words]
        text = "\n---\n".join(map(json.dumps, items))
        return subprocess.run(
            [*command, "-f", "-"], input=text, capture_output=True, text=True, timeout=50, check=False
        )

    def wait_until(self, text: str, item: dict[str, Any]) -> None:
        """Until the answer to `item`, which is not stored, has `text`."""
        end = time.monotonic() + 30
        while text not in (said := self.apply(item, words=("--dry-run=server",)).stderr):
            assert time.monotonic() < end, f"{said}\n{self.webhook.log.read_text()}"
            time.sleep(0.1)


@pytest.fixture
def cluster(api_server: ApiServer, api_namespace: str, tmp_path: Path) -> Iterator[Cluster]:
    try:
        build_tools.find("kubectl")
    except build_tools.ToolError as error:
        pytest.skip(str(error))
    (crd,) = yaml.safe_load_all((MANIFESTS / "base" / "crd.yaml").read_text())
    api_server.install_crd(crd)
    with Cluster(api_server, api_namespace, tmp_path) as cluster:
        yield cluster


def test_a_network_that_can_not_be_used_is_refused_and_pods_are_warned_about(cluster: Cluster) -> None:
    refused = cluster.apply(network("blue", BAD))
    assert refused.returncode == 1
    assert "denied the request: spec.config line 4, column 1: not JSON: trailing comma in object" in refused.stderr
    done = cluster.apply(network("blue", GOOD))
    assert (done.returncode, done.stderr) == (0, "")
    # The webhook hears of the network by its watch.
    cluster.wait_until("is blue meant?", pod("wrong", "blu"))
    done = cluster.apply(pod("wrong", "blu"), pod("right", "blue"))
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert warning.startswith(f"Warning: network {cluster.namespace}/blu does not exist")
    # A workload, by its template; one without networks is not asked about.
    for networks, said in (("blu", True), ("blue", False), (None, False)):
        template = pod("", networks) if networks else pod("", "") | {"metadata": {}}
        template["metadata"] = {**template["metadata"], "labels": {"app": "web"}}
        spec = {
            "selector": {"matchLabels": {"app": "web"}},
            "template": {key: template[key] for key in ("metadata", "spec")},
        }
        metadata = {"name": f"web-{networks or 'none'}"}
        done = cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
        assert (done.returncode, "is blue meant?" in done.stderr) == (0, said), done.stderr
    cron = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "cron"}}
    template = pod("", "blu")
    template["spec"]["restartPolicy"] = "Never"
    template = {key: template[key] for key in ("metadata", "spec")}
    done = cluster.apply({**cron, "spec": {"schedule": "* * * * *", "jobTemplate": {"spec": {"template": template}}}})
    assert "is blue meant?" in done.stderr


def test_a_webhook_that_is_down_keeps_nobody_from_anything(cluster: Cluster) -> None:
    cluster.webhook.stop()
    done = cluster.apply(network("blue", BAD), pod("a", "blue"))
    assert (done.returncode, done.stderr) == (0, "")
    # A network that was bad before the webhook came can be changed otherwise.
    cluster.webhook.start()
    cluster.wait_until("denied the request", network("probe", BAD))
    labelled = network("blue", BAD)
    labelled["metadata"]["labels"] = {"a": "b"}
    done = cluster.apply(labelled)
    assert done.returncode == 0
    assert "not JSON: trailing comma" in done.stderr
