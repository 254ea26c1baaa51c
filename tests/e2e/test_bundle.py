"""`multusctl bundle` and `kubectl multus bundle` of real daemons."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.apiserver import ApiServer
from tests.e2e.exec_kubelet import ExecKubelet
from tests.e2e.node import Node
from tests.e2e.test_ask import everything, tentative
from tests.e2e.test_kubernetes import Cluster

pytest_plugins = ["tests.e2e.kube_fixtures"]

DOCS = Path(__file__).parents[2] / "docs" / "kubectl-multus.md"
SECRET = "s3cr3t-0f-s0meb0dy"


def ran(
    program: str, *words: str, cwd: Path | None = None, node: Node | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run one of the programs; in the container of the daemon of `node`."""
    command = [sys.executable, "-m", f"multus_tools.{program}", *words]
    command = node.contained(*command) if node else command
    return subprocess.run(command, capture_output=True, timeout=90, check=False, env={**os.environ}, cwd=cwd)


def files_in(data: bytes) -> dict[str, bytes]:
    """The files of an archive, without its directory."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        (top,) = {item.name.partition("/")[0] for item in tar.getmembers()}
        assert top.startswith("multus-bundle-")
        found = {item.name.partition("/")[2]: tar.extractfile(item) for item in tar.getmembers()}
        return {name: file.read() for name, file in found.items() if file is not None}


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """A node with one attached pod, one that fails, and a configuration of each kind."""
    node = make_node()
    node.settings |= {"logFile": node.below_chroot(node.root / "own.log"), "cniConfigDir": str(node.root / "net.d")}
    node.settings |= {"multusConfigFile": str(node.root / "multus.conf")}
    (node.root / "net.d").mkdir()
    primary = {"cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus-shim", "psk": SECRET}
    (node.root / "multus.conf").write_text(json.dumps(primary))
    (node.root / "net.d" / "99-broken.conf").write_text(f'{{"password": {{\n"a": "{SECRET}",')
    (node.root / "net.d" / "other.kubeconfig").write_text(f"token: {SECRET}")
    (node.root / "conf.d").mkdir()
    node.ptp("cluster", "10.82.0.0/24", args={"cni": {"apiToken": SECRET}})
    node.pod("a")
    node.pod("b", "missing")
    node.start()
    assert node.cni("ADD", "c1", node.add_netns(), "a").code == 0
    assert node.cni("ADD", "c2", node.add_netns(), "b").code == 1
    own = node.root / "own.log"
    node.wait_until(lambda: "outcome=refused" in own.read_text(), "the log has the end of the last request")
    return node


def bundled(node: Node, *words: str, status: int = 0) -> dict[str, bytes]:
    """The files of the node's archive, by standard output."""
    done = ran("ctl", "bundle", "--output", "-", "--config", str(node.config), *words, node=node)
    assert done.returncode == status, done.stderr
    return files_in(done.stdout)


def test_the_archive_of_a_node(node: Node) -> None:
    found = bundled(node, status=1)
    assert json.loads(found["settings.json"])["effective"]["socketDir"] == str(node.root / "run")
    assert json.loads(found["answers/status.json"])["ready"] is True
    (container,) = json.loads(found["answers/attachments.json"])["containers"]
    assert container["pod"] == "default/a"
    (record,) = (name for name in found if name.startswith("records/attachments/"))
    assert json.loads(found[record].splitlines()[0])["record"]["podName"] == "a"
    assert json.loads(found["answers/explain/default/b.json"])["problem"]
    assert {item["verb"] for item in json.loads(found["answers/trace.json"])["requests"]} == {"ADD"}
    assert json.loads(found["answers/doctor.json"])["schema"] == "multusctl.doctor/v1"
    assert b"multus_server_request_total" in found["metrics.txt"]
    assert b"outcome=refused" in found["log.txt"]
    assert "--standalone" in json.loads(found["versions.json"])["commandLine"]
    listed = {item["name"]: item for item in json.loads(found["cni/cniConfigDir.json"])["files"]}
    assert {"99-broken.conf", "other.kubeconfig", "multus.conf"} <= listed.keys()
    assert listed["99-broken.conf"]["mode"].startswith("-rw")
    assert json.loads(found["cni/cniConfigDir/multus.conf"])["type"] == "multus-shim"
    index = json.loads(found["index.json"])
    # Keys of what is not JSON can't be told.
    (missing,) = index["missing"]
    assert missing["name"] == "cni/cniConfigDir/99-broken.conf"
    assert "not JSON" in missing["problem"]
    removed = {(item["file"], item["key"]) for item in json.loads(found["removed.json"])["removals"]}
    assert ("cni/cniConfigDir/multus.conf", "psk") in removed
    assert SECRET.encode() not in b"".join(found.values())


def test_the_archive_changes_nothing_on_the_node(node: Node, tmp_path: Path) -> None:
    netns = node.add_netns()
    node.wait_until(lambda: not tentative(node, ""), "the kernel has its addresses")
    before = everything(node, netns)
    own = str(node.root / "own.log")
    before["files"].pop(own)
    bundled(node, status=1)
    after = everything(node, netns)
    after["files"].pop(own)
    assert after == before


def test_a_file_of_the_archive(node: Node, tmp_path: Path) -> None:
    (node.root / "net.d" / "99-broken.conf").unlink()
    # The container has no directory for a file.
    node.writable.append(tmp_path)
    words = ("bundle", "--config", str(node.config), "--pod", "a", "--pod", "default/b")
    done = ran("ctl", *words, cwd=tmp_path, node=node)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    assert done.stdout.decode() == f"{path.name}\n"
    assert path.name.startswith("multus-bundle-")
    assert path.name.endswith(".tar.gz")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"removed.json lists them" in done.stderr
    explained = {name for name in files_in(path.read_bytes()) if name.startswith("answers/explain/")}
    assert explained == {"answers/explain/default/a.json", "answers/explain/default/b.json"}
    content = path.read_bytes()
    done = ran("ctl", *words, "--output", path.name, cwd=tmp_path, node=node)
    assert (done.returncode, path.read_bytes()) == (1, content)
    assert done.stderr.decode() == f"multusctl: {path.name} exists: name another file, or use --force\n"
    assert ran("ctl", *words, "--output", path.name, "--force", cwd=tmp_path, node=node).returncode == 0
    assert path.read_bytes() != content
    done = ran("ctl", *words, "--output", "no/such/directory.tar.gz", cwd=tmp_path, node=node)
    assert (done.returncode, b"can't be written" in done.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_daemon_the_node_is_in_it(node: Node) -> None:
    node.stop()
    found = bundled(node, status=3)
    assert json.loads(found["index.json"])["daemon"].startswith("no daemon")
    assert json.loads(found["answers/status.json"])["source"] == "store"
    assert [item["pod"] for item in json.loads(found["answers/attachments.json"])["containers"]] == ["default/a"]
    assert "metrics.txt" not in found
    assert b"outcome=refused" in found["log.txt"]
    missing = [item["name"] for item in json.loads(found["index.json"])["missing"]]
    assert missing == ["cni/cniConfigDir/99-broken.conf"]


def test_a_daemon_that_hangs_keeps_nothing_else_from_it(node: Node) -> None:
    assert node.daemon is not None
    node.daemon.send_signal(19)
    try:
        found = bundled(node, status=3)
    finally:
        node.daemon.send_signal(18)
    assert "does not answer in time" in json.loads(found["index.json"])["daemon"]
    assert "records.json" in found
    assert b"outcome=refused" in found["log.txt"]


def test_settings_that_no_daemon_would_take(node: Node) -> None:
    node.config.write_text(json.dumps({**node.settings, "logLevel": "loud"}))
    done = ran("ctl", "bundle", "--output", "-", "--config", str(node.config), "--socket-dir", str(node.root / "run"))
    assert done.returncode == 1
    found = files_in(done.stdout)
    missing = {item["name"]: item["problem"] for item in json.loads(found["index.json"])["missing"]}
    assert "logLevel" in missing["settings.json"]
    assert json.loads(found["answers/status.json"])["ready"] is True


@pytest.fixture
def cluster(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node]) -> Iterator[Cluster]:
    for item in api_server.request("GET", "/api/v1/nodes")["items"]:
        # Of tests that have ended: nobody answers there.
        api_server.delete("v1", "Node", item["metadata"]["name"])
    made = Cluster(api_server, make_node(standalone=False), api_namespace)
    made.prepare()
    made.pod("a")
    made.pod("b", "missing")
    with api_server.reachable_in(made.node.host), ExecKubelet(api_server, made.node, made.name):
        made.node.start()
        yield made
        made.node.kill()


def asked(cluster: Cluster, *words: str, kubeconfig: Path | None = None) -> tuple[int, dict[str, bytes], str]:
    """Exit status, files and standard error of `kubectl multus bundle`, by default by the administrator."""
    flags = ("--namespace", cluster.namespace, "--kubeconfig", str(kubeconfig or cluster.server.admin_kubeconfig))
    done = ran("kubectl", "bundle", "--output", "-", *flags, *words)
    return done.returncode, files_in(done.stdout), done.stderr.decode()


def test_the_archive_of_a_cluster(cluster: Cluster) -> None:
    assert cluster.cni("ADD", "a", cluster.node.add_netns()).code == 0
    assert cluster.cni("ADD", "b", cluster.node.add_netns()).code == 1
    cluster.node.wait_until(
        lambda: b"missing" in asked(cluster)[1]["cluster/events.json"], "the Event of the pod is there"
    )
    mark = cluster.server.audit_mark()
    status, found, stderr = asked(cluster)
    requests = [item for item in cluster.server.audit("admin", since=mark) if item["userAgent"].startswith("multus")]
    assert {item["verb"] for item in requests if item["subresource"] != "exec"} == {"get", "list"}
    place = f"nodes/{cluster.name}"
    assert status == 0, stderr
    assert json.loads(found[f"{place}/answers/status.json"])["ready"] is True
    assert b"outcome=refused" in found[f"{place}/pod.log"]
    # Pods of the cluster that lack networks are explained by their nodes.
    assert json.loads(found[f"{place}/answers/explain/{cluster.namespace}/b.json"])["problem"]
    assert f"{cluster.namespace}/b" in {
        f"{item['metadata']['namespace']}/{item['metadata']['name']}" for item in json.loads(found["cluster/pods.json"])
    }
    assert json.loads(found["cluster/version.json"])["gitVersion"]
    names = {item["metadata"]["name"] for item in json.loads(found["cluster/networks.json"])}
    assert "cluster" in names
    index: dict[str, Any] = json.loads(found["index.json"])
    assert (index["daemons"], index["unanswered"], index["missing"]) == (1, [], [])
    assert "look through it before you publish it" in stderr


def bound(server: ApiServer, user: str, kind: str, namespace: str = "") -> None:
    """Bind a role of docs/kubectl-multus.md to a service account of kube-system."""
    place = {"namespace": namespace} if namespace else {}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "kubectl-multus"}
    binding = "RoleBinding" if namespace else "ClusterRoleBinding"
    server.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": binding,
            "metadata": {"name": f"{user}-{kind.lower()}", **place},
            "roleRef": reference,
            "subjects": [{"kind": "ServiceAccount", "name": user, "namespace": "kube-system"}],
        }
    )


def test_the_documented_rights_suffice_and_fewer_are_named(cluster: Cluster) -> None:
    server = cluster.server
    server.apply(*yaml.safe_load_all(DOCS.read_text().split("```yaml\n")[1].partition("```")[0]))
    configs = {}
    for user in ("reader", "looker", "local"):
        token = server.service_account_token("kube-system", user)
        configs[user] = Path(server.kubeconfig_for_token(token))
    bound(server, "reader", "ClusterRole")
    bound(server, "reader", "Role", "kube-system")
    bound(server, "looker", "ClusterRole")
    bound(server, "local", "ClusterRole", cluster.namespace)

    status, found, stderr = asked(cluster, kubeconfig=configs["reader"])
    assert status == 0, stderr
    assert f"nodes/{cluster.name}/pod.log" in found

    # Without `pods/exec` and `pods/log`.
    status, found, stderr = asked(cluster, kubeconfig=configs["looker"])
    assert status == 3
    assert "cluster/networks.json" in found
    index = json.loads(found["index.json"])
    assert [item["node"] for item in index["unanswered"]] == [cluster.name]
    assert "forbidden" in index["unanswered"][0]["problem"]
    assert [item["name"] for item in index["missing"]] == [f"nodes/{cluster.name}/pod.log"]

    # In one namespace only.
    status, found, stderr = asked(cluster, "--pod", "b", kubeconfig=configs["local"])
    assert status == 3
    assert [item["metadata"]["name"] for item in json.loads(found["cluster/pods.json"])] == ["b"]
    names = {item["metadata"]["name"] for item in json.loads(found["cluster/networks.json"])}
    assert names == {"cluster"}
    assert "you may not look for its daemon" in stderr


def test_a_node_without_a_daemon_is_named(cluster: Cluster) -> None:
    cluster.server.create_node("node-silent")
    status, found, stderr = asked(cluster)
    assert status == 1
    assert "kubectl-multus: node node-silent: no daemon" in stderr
    assert json.loads(found["index.json"])["unanswered"][0]["node"] == "node-silent"
    status, found, stderr = asked(cluster, "--nodes", cluster.name)
    assert (status, "node-silent" in stderr) == (0, False)
    assert f"nodes/{cluster.name}/settings.json" in found
    status, found, stderr = asked(cluster, "--nodes", "node-silent")
    assert status == 3
    assert "cluster/networks.json" in found


def test_the_pod_of_the_flag(cluster: Cluster) -> None:
    status, found, _ = asked(cluster, "--pod", "a")
    assert status == 0
    assert [item["metadata"]["name"] for item in json.loads(found["cluster/pods.json"])] == ["a"]
    explained = [name for name in found if "/explain/" in name]
    assert explained == [f"nodes/{cluster.name}/answers/explain/{cluster.namespace}/a.json"]
    flags = ("--namespace", cluster.namespace, "--kubeconfig", str(cluster.server.admin_kubeconfig))
    done = ran("kubectl", "bundle", "--output", "-", "--pod", "nobody", *flags)
    assert (done.returncode, done.stdout) == (3, b"")
    assert done.stderr.decode() == f"kubectl-multus: there is no pod {cluster.namespace}/nobody\n"
    for words, reason in (
        (("--json",), "bundle writes an archive: -o json and --json have no effect; leave them out"),
        (("--nodes", "x", "--pod", "a"), "name --nodes or --pod, not both"),
    ):
        done = ran("kubectl", "bundle", *flags, *words)
        assert (done.returncode, done.stderr.decode()) == (1, f"kubectl-multus: {reason}\n")
