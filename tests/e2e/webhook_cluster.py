"""An API server that asks `multus-daemon webhook`, by the manifests' configurations, and kubectl."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.e2e import build_tools
from tests.e2e.apiserver import ApiServer
from tests.e2e.certificates import Authority
from tests.e2e.rights import Container, of_folder
from tests.e2e.server_process import ServerProcess, free_port
from tests.repo import manifests
from tests.repo.manifests import MANIFESTS

GOOD: Final = '{"cniVersion": "1.0.0", "type": "ptp", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}'
BAD: Final = '{\n  "cniVersion": "1.0.0",\n  "type": "ptp",\n}'


def network(name: str, config: str) -> dict[str, Any]:
    kind = {"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition"}
    return {**kind, "metadata": {"name": name}, "spec": {"config": config}}


def pod(name: str, networks: str) -> dict[str, Any]:
    metadata = {"name": name, "annotations": {"k8s.v1.cni.cncf.io/networks": networks}}
    container = {"name": "main", "image": "none"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


def role() -> list[dict[str, Any]]:
    """Return the webhook's account, its ClusterRole and the binding."""
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
    return [item for item in manifests.objects(MANIFESTS / "webhook") if item["kind"] in kinds]


class Cluster:
    """An API server that asks a webhook of this machine: to validate objects of a namespace, and to inject."""

    def __init__(self, server: ApiServer, namespace: str, directory: Path) -> None:
        self.namespace = namespace
        self._kubectl = build_tools.find("kubectl")
        self._kubeconfig = server.kubeconfig("administrator", ("system:masters",))
        self._server = server
        server.apply(*role())
        self._own = server.kubeconfig_for_token(
            server.service_account_token("kube-system", "multus-webhook", seconds=3600)
        )
        authority = Authority(directory / "pki", ("IP:127.0.0.1",))
        pair, port = authority.server(), free_port()
        files = ["--cert", str(pair.certificate), "--key", str(pair.key), "--kubeconfig", str(self._own)]
        # As root: the virtual environment may be in a home that others cannot read.
        self._container = Container(directory, replace(of_folder("webhook", "webhook"), user=0, group=0))
        command = self._container.cli("webhook", *files, "--port", str(port), "--address", "127.0.0.1")
        self.webhook = ServerProcess("webhook", command, directory)
        validating, injecting = (
            next(item for item in manifests.objects(MANIFESTS / name) if "webhooks" in item)
            for name in ("webhook", "webhook-injector")
        )
        for item in (*validating["webhooks"], *injecting["webhooks"]):
            bundle = base64.b64encode(authority.certificate.read_bytes()).decode()
            path = item["clientConfig"]["service"]["path"]
            item["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}
        # Not of other tests' objects.
        for item in validating["webhooks"]:
            item["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
        self._configurations = validating, injecting

    def __enter__(self) -> Cluster:
        self.webhook.start()
        self._server.apply(*self._configurations)
        # The API server reads its configuration a moment later, and the webhook its networks.
        self.wait_until("denied the request", network("probe", BAD))
        return self

    def __exit__(self, *_: object) -> None:
        self.webhook.stop()
        self._container.__exit__()
        for item in self._configurations:
            self._server.delete(item["apiVersion"], item["kind"], item["metadata"]["name"])

    def apply(
        self, *items: dict[str, Any], words: tuple[str, ...] = (), namespace: str = ""
    ) -> subprocess.CompletedProcess[str]:
        text = "\n---\n".join(map(json.dumps, items))
        return self.kubectl("apply", *words, "-f", "-", stdin=text, namespace=namespace)

    def kubectl(self, *words: str, stdin: str = "", namespace: str = "") -> subprocess.CompletedProcess[str]:
        """Run kubectl in the test's namespace, or in another one."""
        where = ["--kubeconfig", str(self._kubeconfig), "-n", namespace or self.namespace]
        return subprocess.run(
            [str(self._kubectl), *where, *words], input=stdin, capture_output=True, text=True, timeout=50, check=False
        )

    def wait_until(self, text: str, *items: dict[str, Any]) -> str:
        """Wait until the answer to `items`, which are not stored, has `text`; return the answer."""
        end = time.monotonic() + 60
        while text not in (said := self.apply(*items, words=("--dry-run=server",)).stderr):
            assert time.monotonic() < end, f"{said}\n{self.webhook.log.read_text()}"
            time.sleep(0.1)
        return said


@contextlib.contextmanager
def running(server: ApiServer, namespace: str, directory: Path) -> Iterator[Cluster]:
    """Start the webhook; skips the test without kubectl."""
    try:
        build_tools.find("kubectl")
    except build_tools.ToolError as error:
        pytest.skip(str(error))
    (crd,) = yaml.safe_load_all((MANIFESTS / "base" / "crd.yaml").read_text())
    server.install_crd(crd)
    with Cluster(server, namespace, directory) as cluster:
        yield cluster
