"""The startup taint at a real API server: who may remove what, and who gets it."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from tests.e2e import chart
from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError
from tests.e2e.kube_client import ApiError, Client
from tests.repo import manifests
from tests.repo.manifests import CHART, MANIFESTS

pytest_plugins = ["tests.e2e.kube_fixtures"]

KEY: Final = "readiness.k8s.io/multus-not-ready"
OURS: Final = {"key": KEY, "value": "pending", "effect": "NoSchedule"}
OTHER: Final = {"key": "dedicated", "value": "db", "effect": "NoSchedule"}
ACCOUNT: Final = "multus-daemon"


@pytest.fixture
def node(api_server: ApiServer, api_namespace: str) -> Iterator[str]:
    """A tainted node; the rights and the policy are in force."""
    api_server.apply(*manifests.of_file(MANIFESTS / "startup-taint" / "rbac.yaml"))
    api_server.create_node(api_namespace)
    numbers = itertools.count()
    with daemon(api_server, api_namespace) as client:
        # Before, it changes the label each time.
        tried = (refused(client, api_namespace, {"labels": {"tried": str(number)}}) for number in numbers)
        api_server.wait_until(lambda: next(tried), "the policy is in force", 60)
    taint(api_server.client, api_namespace, OTHER, OURS)
    yield api_namespace
    api_server.client.request("DELETE", f"/api/v1/nodes/{api_namespace}")


@contextlib.contextmanager
def daemon(server: ApiServer, node: str) -> Iterator[Client]:
    """A client with the token of the daemon's pod on a node."""
    server.create_service_account("kube-system", ACCOUNT)
    pod = server.create_pod(f"daemon-{node}", namespace="kube-system", node=node, serviceAccountName=ACCOUNT)
    client = server.client_for_token(server.service_account_token("kube-system", ACCOUNT, bound_to=pod))
    try:
        yield client
    finally:
        client.close()
        server.delete_pod(f"daemon-{node}", "kube-system")


def taint(client: Client, node: str, *taints: dict[str, str]) -> None:
    client.merge(f"/api/v1/nodes/{node}", {"spec": {"taints": list(taints)}})


def refused(client: Client, node: str, metadata: dict[str, Any]) -> bool:
    try:
        client.merge(f"/api/v1/nodes/{node}", {"metadata": metadata})
    except ApiError as error:
        return "may remove the startup taint only" in str(error)
    return False


def test_the_daemon_removes_its_taint_of_its_node_and_nothing_else(api_server: ApiServer, node: str) -> None:
    with daemon(api_server, node) as client:
        for taints in ([OURS], [], [OTHER, OURS, {**OTHER, "key": "more"}], [{**OTHER, "value": "web"}]):
            with pytest.raises(ApiError, match="may remove the startup taint only"):
                taint(client, node, *taints)
        for metadata in ({"labels": {"a": "b"}}, {"annotations": {"a": "b"}}, {"finalizers": ["a.b/c"]}):
            assert refused(client, node, metadata)
        with pytest.raises(ApiError, match="may remove the startup taint only"):
            client.merge(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
        taint(client, node, OTHER)
    assert api_server.get("v1", "Node", node)["spec"]["taints"] == [OTHER]


def test_it_may_not_change_another_node(api_server: ApiServer, node: str) -> None:
    api_server.create_node(f"{node}-b")
    with daemon(api_server, f"{node}-b") as client, pytest.raises(ApiError, match="its own node only"):
        taint(client, node, OTHER)


def test_a_node_with_a_certificate_of_its_own_removes_it(api_server: ApiServer, node: str) -> None:
    for name, may in ((f"{node}-b", False), (node, True)):
        pair = api_server.authority.client(f"system-multus-{name}", f"system:multus:{name}", ("system:multus",))
        with contextlib.closing(Client(api_server.url, api_server.ca_file, pair=pair)) as client:
            if may:
                taint(client, node, OTHER)
            else:
                with pytest.raises(ApiError, match="its own node only"):
                    taint(client, node, OTHER)


def test_others_change_what_they_could(api_server: ApiServer, node: str) -> None:
    taint(api_server.client, node, OTHER, {**OTHER, "key": "more"})


# --- who gets it -----------------------------------------------------------------------------------------------------

POLICY: Final = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"


@pytest.fixture
def tainting() -> Iterator[ApiServer]:
    """An API server with the chart's policy, which is in force."""
    values = json.dumps({"startupTaint": {"enabled": True}})
    try:
        server = ApiServer(
            "--feature-gates=MutatingAdmissionPolicy=true",
            "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
        )
        text = chart.helm("template", "m", CHART, "--api-versions", POLICY, "--values", "-", stdin=values)
    except (ToolError, OpensslError) as error:
        pytest.skip(str(error))
    objects = [item for item in yaml.safe_load_all(text) if item and item["kind"].startswith("MutatingAdmission")]
    assert len(objects) == 2
    with server:
        # The version that this API server has: v1 is of Kubernetes 1.36.
        server.apply(*({**item, "apiVersion": "admissionregistration.k8s.io/v1beta1"} for item in objects))
        numbers = itertools.count()

        def in_force() -> bool:
            return KEY in registered(server, f"early-{next(numbers)}", {"kubernetes.io/os": "linux"})

        server.wait_until(in_force, "the policy is in force", 60)
        yield server


def registered(server: ApiServer, name: str, labels: dict[str, str], *taints: dict[str, str]) -> list[str]:
    """Create a node as its kubelet does; the keys of its taints."""
    body = {"metadata": {"name": name, "labels": labels}, "spec": {"taints": list(taints)} if taints else {}}
    made = server.client.request("POST", "/api/v1/nodes", body)
    return [item["key"] for item in made["spec"].get("taints", []) if item["key"] != "node.kubernetes.io/not-ready"]


def test_nodes_that_run_the_daemon_get_it_as_they_register(tainting: ApiServer) -> None:
    linux = {"kubernetes.io/os": "linux"}
    assert registered(tainting, "plain", linux) == [KEY]
    assert registered(tainting, "tainted", linux, OTHER) == ["dedicated", KEY]
    assert registered(tainting, "by-its-kubelet", linux, OURS) == [KEY]
    assert registered(tainting, "windows", {"kubernetes.io/os": "windows"}) == []
    assert registered(tainting, "unlabelled", {}) == []
