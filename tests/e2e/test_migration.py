"""docs/migration.md at a real API server with two nodes: upstream's daemon on one, ours on the other, there and back.

Each daemon has the rights of its own side's manifest and no others. While both run, whatever was applied last, an ADD
on either node succeeds and has its status.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.e2e import upstream_manifest
from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.node import Node
from tests.e2e.takeover import Takeover
from tests.e2e.test_kubernetes import Cluster
from tests.e2e.test_manifests import Kubectl
from tests.e2e.upstream import Upstream
from tests.repo.manifests import RENDERED

RUNS: Final = ("Multus, thick",)
pytest_plugins = ["tests.e2e.kube_fixtures"]

GROUP = "system:multus"
UPSTREAMS = (
    "clusterrole/multus",
    "clusterrolebinding/multus",
    "serviceaccount/multus",
    "configmap/multus-daemon-config",
)
OURS = ("clusterrole/multus-daemon", "clusterrolebinding/multus-daemon", "serviceaccount/multus-daemon",
        "configmap/multus-daemon")  # fmt: skip
DAEMON_SET = "daemonset/kube-multus-ds"


class UpstreamNode(Takeover):
    """A node with upstream's daemon, whose certificate has the rights of upstream's ClusterRole."""

    def _grant(self, user: str) -> None:
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "multus"}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": GROUP}
        self.server.apply(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": "upstream-per-node"},
                "roleRef": reference,
                "subjects": [subject],
            }
        )

    def prepare(self) -> None:
        # Only what a node needs: definitions and rights come from the manifests under test.
        self.server.create_node(self.name)
        self.node.settings |= {"kubeconfig": "", "multusNamespace": self.namespace}

    def add(self, pod: str) -> None:
        """An ADD of a new pod with an additional network, its status, and the DEL."""
        self.pod(pod, "ptp")
        added = self.runtime("ADD", pod, by="upstream")
        assert added.code == 0, added.stdout
        assert [item["interface"] for item in self.status(pod)] == ["eth0", "net1"]
        assert self.runtime("DEL", pod, by="upstream").code == 0


class OurNode(Cluster):
    """A node with our daemon, which has the rights of our ClusterRole."""

    def prepare(self) -> None:
        self.server.create_node(self.name)
        self.node.settings |= {"multusNamespace": self.namespace}
        self.node.node_name = self.name
        self.network("cluster", "10.85.0.0/16")
        self.network("ptp", "10.86.0.0/16")

    def log_in(self, account: str) -> None:
        """Use the service account from now on."""
        self.token.write_text(self.server.service_account_token("kube-system", account))
        self.node.settings["kubeconfig"] = str(self.server.kubeconfig_for_token(self.token))

    def add(self, pod: str) -> None:
        """Call ADD, check the status and call DEL, like `UpstreamNode.add`."""
        self.pod(pod, "ptp")
        netns = self.node.add_netns()
        added = self.cni("ADD", pod, netns)
        assert added.code == 0, added.stdout
        interfaces = ["eth0", "net1"]
        # An ADD waits for the status only so long.
        self.node.wait_until(
            lambda: [item["interface"] for item in self.status(pod)] == interfaces, "the status is there"
        )
        assert self.cni("DEL", pod, netns).code == 0


class Administrator:
    """Runs the commands of an operator."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl

    def apply_ours(self) -> None:
        self._kubectl("apply", "-f", RENDERED)

    def apply_upstreams(self) -> None:
        self._kubectl("apply", "-f", "-", stdin=upstream_manifest.text())

    def delete(self, *names: str) -> None:
        of_cluster = [name for name in names if name.startswith("clusterrole")]
        for scope, found in ((["-n", "kube-system"], sorted(set(names) - set(of_cluster))), ([], of_cluster)):
            if found:
                self._kubectl(*scope, "delete", "--ignore-not-found", "--wait=false", *found)

    def daemon_set(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._kubectl("-n", "kube-system", "get", DAEMON_SET, "-o", "json"))
        return found


@pytest.fixture
def administrator(api_server: ApiServer) -> Iterator[Administrator]:
    try:
        upstream_manifest.text()
    except ToolError as error:
        pytest.skip(str(error))
    made = Administrator(Kubectl(api_server))
    made.delete(DAEMON_SET, *UPSTREAMS, *OURS)
    yield made
    made.delete(DAEMON_SET, *UPSTREAMS, *OURS, "clusterrolebinding/upstream-per-node")


def wait_for_definitions(server: ApiServer) -> None:
    """The custom resource is served a moment after it is applied."""
    path = "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions"
    server.wait_until(lambda: server._served(path), "networks are served")


@pytest.fixture
def nodes(
    api_server: ApiServer, administrator: Administrator, make_node: Callable[..., Node], reference: Path
) -> Iterator[tuple[UpstreamNode, OurNode]]:
    """Both nodes, upstream's manifest applied, no daemon started."""
    administrator.apply_upstreams()
    wait_for_definitions(api_server)
    for namespace in ("theirs", "ours"):
        api_server.create_namespace(namespace)
    theirs = UpstreamNode(api_server, make_node(standalone=False), "theirs")
    theirs.lay_out(reference)
    theirs.cluster_network("conflist")
    ours = OurNode(api_server, make_node(standalone=False), "ours")
    ours.prepare()
    with api_server.reachable_in(theirs.node.host), api_server.reachable_in(ours.node.host):
        yield theirs, ours
        for node in (theirs, ours):
            node.node.kill()


def test_there_and_back_on_two_nodes(
    administrator: Administrator, nodes: tuple[UpstreamNode, OurNode], api_server: ApiServer
) -> None:
    theirs, ours = nodes
    theirs.upstream = Upstream(theirs.node, theirs.name)
    theirs.upstream.start()
    try:
        theirs.add("before")

        # There: everything is applied, one node has our daemon, the other one not yet.
        administrator.apply_ours()
        theirs.add("during")
        ours.log_in("multus-daemon")
        ours.node.start()
        ours.add("during")
        mark = api_server.audit_mark()
        theirs.add("during-2")
        ours.add("during-2")
        user = "system:serviceaccount:kube-system:multus-daemon"
        refused = [item for item in api_server.audit(since=mark) if item["code"] in (401, 403)]
        assert refused == []
        assert {(item["verb"], item["subresource"]) for item in api_server.audit(user, since=mark)} >= {
            ("patch", "status")
        }

        # Back: upstream's manifest is applied, ours runs on one of the nodes still.
        administrator.apply_upstreams()
        theirs.add("way-back")
        ours.add("way-back")
        # Its container is started anew meanwhile.
        ours.node.stop()
        ours.node.start()
        ours.add("way-back-2")
    finally:
        theirs.upstream.stop()


def test_what_is_deleted_last_is_what_nobody_uses(
    administrator: Administrator, nodes: tuple[UpstreamNode, OurNode], api_server: ApiServer
) -> None:
    theirs, ours = nodes
    # The end of the way there: no node has upstream's daemon, and the objects that only it used go.
    administrator.apply_ours()
    administrator.delete(*UPSTREAMS)
    ours.log_in("multus-daemon")
    ours.node.start()
    ours.add("there")
    ours.node.stop()
    # The end of the way back.
    administrator.apply_upstreams()
    administrator.delete(*OURS)
    theirs.upstream = Upstream(theirs.node, theirs.name)
    theirs.upstream.start()
    try:
        theirs.add("back")
    finally:
        theirs.upstream.stop()


def test_with_upstreams_rights_ours_puts_what_it_may_not_patch(
    administrator: Administrator, nodes: tuple[UpstreamNode, OurNode], api_server: ApiServer
) -> None:
    """The image alone is changed: service account, role and configuration are upstream's."""
    _, ours = nodes
    ours.log_in("multus")
    ours.node.settings |= {"metricsPort": 9091}
    ours.node.start()
    mark = api_server.audit_mark()
    ours.add("first")
    ours.add("second")
    user = "system:serviceaccount:kube-system:multus"
    asked = [
        item for item in api_server.audit(user, since=mark) if item["resource"] == "pods" and item["verb"] != "watch"
    ]
    assert [(item["verb"], item["code"]) for item in asked if item["verb"] == "patch"] == [("patch", 403)]
    assert [item["code"] for item in asked if item["verb"] == "update"] == [200, 200]
    assert 'multus_api_requests_total{code="200",verb="put"} 2.0' in ours.node.metrics(9091)
    advice = "grant the verb patch on pods/status"
    ours.node.wait_for_log(advice)
    assert ours.node.log.read_text().count(advice) == 1


def test_the_daemon_set_is_one_and_keeps_nothing_of_the_other(administrator: Administrator) -> None:
    administrator.apply_upstreams()
    theirs = administrator.daemon_set()
    administrator.apply_ours()
    ours = administrator.daemon_set()
    administrator.apply_upstreams()
    back = administrator.daemon_set()
    assert theirs["metadata"]["uid"] == ours["metadata"]["uid"] == back["metadata"]["uid"]
    assert back["spec"]["template"] == theirs["spec"]["template"]
    (found,) = [item for item in yaml.safe_load_all(RENDERED.read_text()) if item and item["kind"] == "DaemonSet"]
    for kind in ("initContainers", "containers"):
        (made,), (wanted,) = ours["spec"]["template"]["spec"][kind], found["spec"]["template"]["spec"][kind]
        assert {key: made.get(key) for key in ("args", "command", "resources", "securityContext")} == {
            key: wanted.get(key) for key in ("args", "command", "resources", "securityContext")
        }
