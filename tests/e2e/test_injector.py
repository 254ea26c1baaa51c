"""The resource injector with a real API server: which pods get requests for devices, and that none is held up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e import build_tools, webhook_cluster
from tests.e2e.apiserver import ApiServer
from tests.e2e.server_process import ServerProcess
from tests.e2e.webhook_cluster import GOOD, Cluster, network, pod

pytest_plugins = ["tests.e2e.kube_fixtures"]

FAST: Final = "example.com/fast"
TENANT: Final = "injector-tenant"
OTHER: Final = "injector-other"
"""Has no label."""


class Injector:
    """The cluster, with a namespace that has the label and one that has not."""

    def __init__(self, cluster: Cluster, server: ApiServer) -> None:
        self.cluster = cluster
        self.server = server
        server.create_namespace(TENANT, {"multus.io/inject": "true"})
        server.create_namespace(OTHER)
        self.network("fast", FAST)
        self.network("plain", "")
        self.network("slow", "example.com/slow", OTHER)

    def network(self, name: str, resource: str, namespace: str = TENANT) -> None:
        item = network(name, GOOD)
        if resource:
            item["metadata"]["annotations"] = {"k8s.v1.cni.cncf.io/resourceName": resource}
        done = self.cluster.apply(item, namespace=namespace)
        assert done.returncode == 0, done.stderr

    def created(self, item: dict[str, Any], namespace: str = TENANT, *words: str) -> tuple[list[Any], str]:
        """Apply a pod; return the resources of its containers, as the API server stored them, and the warnings."""
        done = self.cluster.apply(item, words=(*words, "-o", "json"), namespace=namespace)
        assert done.returncode == 0, done.stderr
        stored = json.loads(done.stdout)
        if not words:
            stored = self.server.get("v1", "Pod", item["metadata"]["name"], namespace)
        return [container["resources"] for container in stored["spec"]["containers"]], done.stderr


@pytest.fixture
def injector(api_server: ApiServer, api_namespace: str, tmp_path: Path) -> Iterator[Injector]:
    with webhook_cluster.running(api_server, api_namespace, tmp_path) as cluster:
        made = Injector(cluster, api_server)
        # The API server reads its configuration a moment later.
        api_server.wait_until(
            lambda: made.created(pod("probe", "fast"), TENANT, "--dry-run=server")[0] == [both(**{FAST: "1"})],
            "the injector is asked",
        )
        yield made
        for namespace in (TENANT, OTHER):
            for kind in ("deployments", "pods", "network-attachment-definitions"):
                cluster.kubectl("delete", kind, "--all", "--grace-period=0", "--force", namespace=namespace)


def both(**values: str) -> dict[str, dict[str, str]]:
    return {"limits": values, "requests": values}


def test_each_network_of_a_resource_gets_a_device(injector: Injector) -> None:
    for number, (networks, values) in enumerate(
        [
            ("fast", {FAST: "1"}),
            ("fast, fast, plain", {FAST: "2"}),
            (f"fast, {OTHER}/slow", {FAST: "1", "example.com/slow": "1"}),
            (json.dumps([{"name": "slow", "namespace": OTHER, "interface": "data0"}]), {"example.com/slow": "1"}),
        ]
    ):
        assert injector.created(pod(f"a{number}", networks)) == ([both(**values)], "")
    assert injector.created(pod("plain", "plain")) == ([{}], "")


def test_pods_that_are_left_alone(injector: Injector) -> None:
    assert injector.created(pod("unlabelled", f"{TENANT}/fast"), OTHER) == ([{}], "")
    refusing = pod("refusing", "fast")
    refusing["metadata"]["annotations"]["multus.io/inject"] = "false"
    assert injector.created(refusing) == ([{}], "")
    claiming = pod("claiming", "fast")
    claiming["spec"]["resourceClaims"] = [{"name": "nic", "resourceClaimName": "nic"}]
    claiming["spec"]["containers"][0]["resources"] = {"claims": [{"name": "nic"}]}
    assert injector.created(claiming) == ([{"claims": [{"name": "nic"}]}], "")
    claiming["metadata"] = {**claiming["metadata"], "name": "both"}
    claiming["metadata"]["annotations"]["multus.io/inject"] = "true"
    assert injector.created(claiming) == ([{"claims": [{"name": "nic"}], **both(**{FAST: "1"})}], "")


def test_without_the_webhook_pods_are_created_as_they_are(injector: Injector) -> None:
    injector.cluster.webhook.stop()
    assert injector.created(pod("alone", "fast")) == ([{}], "")


def test_pods_of_a_deployment_get_requests(injector: Injector, tmp_path: Path) -> None:
    try:
        program = build_tools.find("kube-controller-manager")
    except build_tools.ToolError as error:
        pytest.skip(str(error))
    template = pod("", "fast, fast")
    template["metadata"] = {"labels": {"app": "web"}, "annotations": template["metadata"]["annotations"]}
    spec = {"selector": {"matchLabels": {"app": "web"}}, "template": {k: template[k] for k in ("metadata", "spec")}}
    item = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}
    assert injector.cluster.apply(item, namespace=TENANT).returncode == 0
    flags = [f"--kubeconfig={injector.server.admin_kubeconfig}", "--leader-elect=false", "--secure-port=0"]
    controllers = "--controllers=deployment-controller,replicaset-controller"
    manager = ServerProcess("kube-controller-manager", [str(program), *flags, controllers], tmp_path)

    def pods() -> list[Any]:
        found: list[Any] = injector.server.request("GET", f"/api/v1/namespaces/{TENANT}/pods", labelSelector="app=web")[
            "items"
        ]
        return found

    manager.start()
    try:
        injector.server.wait_until(lambda: bool(pods()), "the deployment has a pod", 60)
    finally:
        manager.stop()
    assert pods()[0]["spec"]["containers"][0]["resources"] == both(**{FAST: "2"})
