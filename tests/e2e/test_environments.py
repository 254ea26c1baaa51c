"""docs/environments.md: what Git has is what the cluster has, what Pod Security admits, and a node with IPv6 only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests import packets
from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.chart import CASES, template
from tests.e2e.node import Node
from tests.e2e.test_manifests import Kubectl
from tests.repo.manifests import MANIFESTS

pytest_plugins = ["tests.e2e.kube_fixtures"]

OVERLAYS = sorted((MANIFESTS / "overlays").iterdir())


@pytest.fixture
def kubectl(api_server: ApiServer) -> Kubectl:
    return Kubectl(api_server)


# --- GitOps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, "default"])
def test_two_renderings_are_the_same_and_have_no_hooks(name: str) -> None:
    try:
        first, second = (template(CASES.get(name, {})) for _ in range(2))
    except ToolError as error:
        pytest.skip(str(error))
    assert first == second
    assert "helm.sh/hook" not in first


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_the_cluster_does_not_differ_from_what_was_applied(kubectl: Kubectl, overlay: Path) -> None:
    """As Argo CD and Flux ask: by a dry run at the API server, whose defaults are no difference."""
    how = ("--server-side", "--force-conflicts", "--field-manager=gitops", "-k", overlay)
    kubectl("apply", *how)
    done = kubectl.run("diff", *how)
    assert (done.returncode, done.stdout) == (0, "")
    # A binding to a role that is not there is named in whatever the API server refuses to the daemon afterwards.
    left = ("daemonset/kube-multus-ds", "configmap/multus-daemon", "rolebinding/multus-scc")
    kubectl("-n", "kube-system", "delete", "--ignore-not-found", "--wait=false", *left)


# --- Pod Security ----------------------------------------------------------------------------------------------------


def admitted(kubectl: Kubectl, server: ApiServer, folder: str, kind: str, level: str) -> bool:
    """Return True if Pod Security admits the pod of a workload to a namespace of that level."""
    server.create_namespace(name := f"enforces-{level}-{folder}")
    kubectl("label", "--overwrite", "namespace", name, f"pod-security.kubernetes.io/enforce={level}")
    kubectl("-n", name, "create", "serviceaccount", "any")
    items = [item for path in (MANIFESTS / folder).glob("*.yaml") for item in yaml.safe_load_all(path.read_text())]
    (workload,) = [item for item in items if item and item["kind"] == kind]
    spec = workload["spec"]["template"]["spec"] | {"serviceAccountName": "any"}
    # A priority of the system is for its own namespace.
    spec.pop("priorityClassName", None)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": name}, "spec": spec}
    done = kubectl.run("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    assert done.returncode == 0 or "violates PodSecurity" in done.stderr, done.stderr
    return done.returncode == 0


@pytest.mark.parametrize(
    ("folder", "kind", "least"),
    [
        ("base", "DaemonSet", "privileged"),
        ("webhook", "Deployment", "restricted"),
        # It is in the node's network, as pods have none before it has approved their nodes' certificates.
        ("cert-approver", "Deployment", "privileged"),
    ],
)
def test_the_level_of_pod_security_that_each_workload_needs(
    kubectl: Kubectl, api_server: ApiServer, folder: str, kind: str, least: str
) -> None:
    levels = ("restricted", "baseline", "privileged")
    assert next(level for level in levels if admitted(kubectl, api_server, folder, kind, level)) == least


# --- IPv6 only -------------------------------------------------------------------------------------------------------


def test_pods_with_ipv6_alone(node: Node) -> None:
    """The cluster network and another one have ranges of IPv6 only, and so has the metrics port."""
    bridge = {"type": "bridge", "bridge": "br6", "isGateway": True}
    for name, subnet, namespace in (("cluster", "fd81:1::/64", "kube-system"), ("lan", "fd81:2::/64", "default")):
        node.ptp(name, subnet, namespace=namespace, **(bridge if name == "lan" else {}))
    node.settings |= {"metricsPort": 9093, "metricsAddress": "::1"}
    for name in ("p1", "p2"):
        node.pod(name, "lan")
    node.start()
    spaces = {name: node.add_netns() for name in ("p1", "p2")}
    results = {}
    for name, netns in spaces.items():
        added = node.cni("ADD", f"c-{name}", netns, name)
        assert added.code == 0, added.stdout
        results[name] = [item["address"] for item in added.json["ips"]]
    assert [address.startswith("fd81:1::") for found in results.values() for address in found] == [True, True]
    inside = {
        name: [item["local"] for link in node.ip("address", "show", "net1", netns=netns) for item in link["addr_info"]]
        for name, netns in spaces.items()
    }
    (other,) = [address for address in inside["p2"] if address.startswith("fd81:2::")]
    assert packets.replies(other, netns=spaces["p1"], wait=10) == 1
    assert not any("." in address for found in inside.values() for address in found)
    for name, netns in spaces.items():
        checked = node.cni("CHECK", f"c-{name}", netns, name)
        assert checked.code == 0, checked.stdout
        assert node.cni("DEL", f"c-{name}", netns, name).code == 0
    assert node.leftovers() == []
