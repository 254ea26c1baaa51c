"""`kubectl multus` against a real API server, a real kubelet, and the daemon as the manifests install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import build_tools
from tests.e2e.cluster.multus import MultusPod
from tests.e2e.cluster.real_node import NAME, PRIMARY, RealNode
from tests.e2e.cluster.workload import BRIDGE, host_local, network, two_networks

pytest_plugins = ["tests.e2e.cluster.fixtures"]

DOCS = Path(__file__).parents[3] / "docs" / "kubectl-multus.md"


@pytest.fixture
def multus(multus_pod: MultusPod) -> MultusPod:
    multus_pod.start()
    return multus_pod


@pytest.fixture
def reader(multus: MultusPod) -> str:
    """A kubeconfig of somebody who may do what docs/kubectl-multus.md says, and nothing else."""
    server = multus.node.server
    documents = DOCS.read_text().split("```yaml\n")[1].partition("```")[0]
    for item in yaml.safe_load_all(documents):
        server.apply(item)
    subject = {"kind": "ServiceAccount", "name": "reader", "namespace": "kube-system"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kubectl-multus"}
    server.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "kubectl-multus"},
            "roleRef": role,
            "subjects": [subject],
        }
    )
    server.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "kubectl-multus", "namespace": "kube-system"},
            "roleRef": {**role, "kind": "Role"},
            "subjects": [subject],
        }
    )
    return str(server.kubeconfig_for_token(server.service_account_token("kube-system", "reader")))


def asked(kubeconfig: str, *words: str, status: int = 0) -> dict[str, Any]:
    """The JSON object that the program prints."""
    command = [sys.executable, "-m", "multus_tools.kubectl", *words, "--json", "--kubeconfig", kubeconfig]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, f"{done.returncode}: {done.stderr}\n{done.stdout}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_is_asked_of_a_cluster(multus: MultusPod, reader: str, tmp_path: Path) -> None:
    node = multus.node
    two_networks(node)
    network(node, "red", {"type": "nonsense"})
    found = asked(reader, "status")
    (entry,) = found["nodes"]
    assert (entry["node"], entry["ready"], entry["gates"]) == (NAME, True, {})
    assert (found["unanswered"], found["notes"]) == ([], [])

    node.pod("well", networks="blue")
    node.wait_running("well")
    node.pod("lost", networks="green,nowhere")
    node.wait_until(lambda: bool(_events(node, "lost")), "there is an Event about the pod")

    found = asked(reader, "why", "default/lost", status=1)
    _names_what_explain_and_the_event_name(node, found)
    assert found["lacks"] == ["default/green", "default/nowhere"]
    assert "create it, or correct the pod's annotation" in found["advice"]
    # One that the kubelet has just begun has no end yet.
    failed = [item["error"] for item in found["requests"] if item["verb"] == "ADD" and item["seconds"] is not None]
    assert failed
    assert all(found["cause"] in error for error in failed)
    assert asked(reader, "why", "well")["attached"][1] == "default/blue@net1"

    (pod,) = asked(reader, "pods", status=1)["pods"]
    assert (pod["pod"], pod["source"], "(nowhere)" in pod["cause"]) == ("default/lost", "event", True)

    networks = {item["network"]: item for item in asked(reader, "networks", status=1)["networks"]}
    assert (networks["default/blue"]["pods"], networks["default/blue"]["missing"]) == (["default/well"], [])
    assert [(item["node"], item["plugin"]) for item in networks["default/red"]["missing"]] == [(NAME, "nonsense")]

    assert asked(reader, "leaks")["containers"] == []
    _bundles(node, reader, tmp_path)
    _runs_as_a_plugin_of_kubectl(node, reader, tmp_path)

    # What is advised makes the pod start.
    network(node, "nowhere", {"type": "bridge", "bridge": BRIDGE, "ipam": host_local("10.94.0.0/24")})
    node.wait_running("lost")
    assert asked(reader, "status")["nodes"][0]["podsGetNetworks"] == "yes"
    assert asked(reader, "why", "lost")["cause"] == ""
    assert asked(reader, "pods")["pods"] == []


def test_a_file_before_ours_takes_the_networks_away_and_is_named(multus: MultusPod, reader: str) -> None:
    node = multus.node
    two_networks(node)
    name = "00-first.conflist"
    node.primary(name, PRIMARY)
    try:
        node.wait_until(lambda: name in multus.readyz()[1], "the daemon names the file")
        node.pod("lost", networks="blue")
        node.wait_running("lost")
        assert node.links("lost") == ["eth0", "lo"]
        found = asked(reader, "why", "default/lost", status=1)
        assert (found["lacks"], name in found["cause"]) == (["default/blue"], True)
        (entry,) = asked(reader, "status", status=1)["nodes"]
        assert (entry["ready"], list(entry["gates"])) == (False, ["runtime"])
        # Its DEL goes to the file that attached it: the daemon does not know the pod.
        node.delete_pod("lost")
    finally:
        node.machine.run("rm", "-f", f"/etc/cni/net.d/{name}")
    multus.wait_ready()
    assert asked(reader, "status")["nodes"][0]["ready"]


def _bundles(node: RealNode, reader: str, directory: Path) -> None:
    """The archive has what the daemon's pod and the kubelet have."""
    path = directory / "report.tar.gz"
    command = [sys.executable, "-m", "multus_tools.kubectl", "bundle", "--output", str(path)]
    done = subprocess.run([*command, "--kubeconfig", reader], capture_output=True, text=True, timeout=90, check=False)
    assert (done.stdout, path.stat().st_mode & 0o777) == (f"{path}\n", 0o600), done.stderr
    with tarfile.open(path) as tar:
        opened = {item.name.partition("/")[2]: tar.extractfile(item) for item in tar.getmembers()}
        files = {name: file.read() for name, file in opened.items() if file is not None}
    index = json.loads(files["index.json"])
    assert (index["daemons"], index["unanswered"]) == (1, [])
    assert done.returncode == int(bool(index["missing"])), index["missing"]
    place = f"nodes/{NAME}"
    assert b"outcome=refused" in files[f"{place}/pod.log"]
    assert json.loads(files[f"{place}/answers/explain/default/lost.json"])["problem"]
    assert json.loads(files[f"{place}/cni/cniConfigDir/00-multus.conf"])["type"] == "multus-shim"
    assert b"multus_server_request_total" in files[f"{place}/metrics.txt"]
    assert json.loads(files[f"{place}/versions.json"])["shim"]
    assert "default/well" in files[f"{place}/answers/attachments.json"].decode()
    (pod,) = json.loads(files["cluster/pods.json"])
    assert pod["metadata"]["name"] == "lost"


def _names_what_explain_and_the_event_name(node: RealNode, found: dict[str, Any]) -> None:
    words = ["-n", "kube-system", "exec", found["daemon"].partition("/")[2], "--"]
    done = node.kubectl(*words, "sh", "-c", "multusctl explain default/lost --json || true")
    explained = json.loads(done)
    assert found["text"] == explained["problem"]
    assert found["cause"] in explained["problem"]
    assert found["cause"] == "network default/nowhere does not exist"
    assert all("(nowhere) in namespace (default)" in event["message"] for event in _events(node, "lost"))


def _events(node: RealNode, pod: str) -> list[dict[str, Any]]:
    """The daemon's Warnings about a pod."""
    items: list[dict[str, Any]] = node.server.request("GET", "/api/v1/namespaces/default/events")["items"]
    return [
        item
        for item in items
        if item["involvedObject"]["name"] == pod
        and item["type"] == "Warning"
        and item["source"].get("component") == "multus"
    ]


def _runs_as_a_plugin_of_kubectl(node: RealNode, kubeconfig: str, directory: Path) -> None:
    """Run the plugin as pip installs it: a program `kubectl-multus` on the PATH."""
    program = directory / "kubectl-multus"
    program.write_text(f"#!{sys.executable}\nfrom multus_tools.kubectl import main\nmain()\n")
    program.chmod(0o755)
    command = [str(build_tools.find("kubectl")), "multus", "status"]
    env = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "KUBECONFIG": kubeconfig}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    # The last ADD of one pod failed.
    assert "pods get their networks on 0 of 1 nodes, in part on 1" in done.stdout


def test_a_daemon_that_is_away_is_named(multus: MultusPod, reader: str) -> None:
    node = multus.node
    daemon_set = "/apis/apps/v1/namespaces/kube-system/daemonsets/kube-multus-ds"
    multus.node.server.request("DELETE", daemon_set)
    node.wait_until(lambda: not asked_nodes(reader), "the daemon's pod is gone")
    found = asked(reader, "status", status=3)
    assert found["unanswered"][0]["node"] == NAME


def asked_nodes(kubeconfig: str) -> list[Any]:
    """Nodes whose daemon answers."""
    command = [sys.executable, "-m", "multus_tools.kubectl", "status", "--json", "--kubeconfig", kubeconfig]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found: list[Any] = json.loads(done.stdout)["nodes"]
    return found
