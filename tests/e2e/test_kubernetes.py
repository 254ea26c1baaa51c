"""The daemon against a real API server, with exactly the rights that `manifests/` gives it."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.apiserver import ApiServer
from tests.e2e.node import NAD, Answer, Node
from tests.e2e.rights import Container, of_folder
from tests.programs import needed

pytest_plugins = ["tests.e2e.kube_fixtures"]

ROOT = Path(__file__).parents[2]
USER = "system:serviceaccount:kube-system:multus-daemon"
STATUS = "k8s.v1.cni.cncf.io/network-status"
NETWORKS = "k8s.v1.cni.cncf.io/networks"


def manifests(name: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all((ROOT / "manifests" / "base" / name).read_text()) if item]


class Cluster:
    """A node of its own in the session's API server, and what a test does to both."""

    def __init__(self, server: ApiServer, node: Node, namespace: str) -> None:
        self.server, self.node, self.namespace = server, node, namespace
        self.name = f"node-{namespace}"
        self.token = node.root / "token"
        self.uids: dict[str, str] = {}

    def prepare(self) -> None:
        server = self.server
        (crd,) = manifests("crd.yaml")
        server.install_crd(crd)
        server.apply(*manifests("rbac.yaml"))
        server.create_node(self.name)
        self.token.write_text(server.service_account_token("kube-system", "multus-daemon"))
        self.node.settings |= {
            "kubeconfig": str(server.kubeconfig_for_token(self.token)),
            "multusNamespace": self.namespace,
        }
        self.node.node_name = self.name
        self.network("cluster", "10.85.0.0/16")

    def network(self, name: str, subnet: str) -> None:
        ipam = {"type": "host-local", "subnet": subnet, "dataDir": str(self.node.networks_dir)}
        config = {"cniVersion": "1.0.0", "name": name, "type": "ptp", "ipam": ipam}
        self.definition(name, json.dumps(config))

    def definition(self, name: str, config: str) -> None:
        spec = {"spec": {"config": config}} if config else {}
        self.server.apply({**NAD, "metadata": {"namespace": self.namespace, "name": name}, **spec})

    def pod(self, name: str, networks: str | None = None, **annotations: str) -> None:
        found = {**annotations, **({} if networks is None else {NETWORKS: networks})}
        pod = self.server.create_pod(name, namespace=self.namespace, node=self.name, annotations=found)
        self.uids[name] = pod["metadata"]["uid"]

    def cni(self, verb: str, pod: str, netns: str, container: str = "", **options: Any) -> Answer:
        uid = options.pop("uid", self.uids.get(pod, ""))
        return self.node.cni(verb, container or f"c-{pod}", netns, pod, self.namespace, uid=uid, **options)

    def annotations(self, pod: str) -> dict[str, str]:
        found: dict[str, str] = self.server.get("v1", "Pod", pod, self.namespace)["metadata"].get("annotations") or {}
        return found

    def status(self, pod: str) -> list[dict[str, Any]]:
        value: list[dict[str, Any]] = json.loads(self.annotations(pod).get(STATUS, "[]"))
        return value

    def events(self, pod: str) -> list[dict[str, Any]]:
        items = self.server.request("GET", f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return [item for item in items if item["involvedObject"]["name"] == pod]


def closed(node: Node) -> dict[str, str]:
    """The closed gates of the daemon, and why."""
    status, text = node.get("/readyz?gates")
    found: dict[str, str] = json.loads(text)["closed"] if status == 503 else {}
    return found


@pytest.fixture
def cluster(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node]) -> Iterator[Cluster]:
    made = Cluster(api_server, make_node(standalone=False), api_namespace)
    made.prepare()
    with api_server.reachable_in(made.node.host):
        yield made
        made.node.kill()


@pytest.mark.conformance("verbs-18", "pods-29")
def test_an_add_on_a_warm_cache_reads_nothing_patches_once_and_sends_one_event(cluster: Cluster) -> None:
    cluster.network("n1", "10.86.0.0/16")
    cluster.pod("p1", "n1")
    cluster.node.start()
    netns = cluster.node.add_netns()
    mark = cluster.server.audit_mark()
    added = cluster.cni("ADD", "p1", netns)
    assert added.code == 0, added.stdout
    cluster.node.wait_until(lambda: bool(cluster.events("p1")), "the event is there")
    assert [(item["name"], item["interface"], item.get("default", False)) for item in cluster.status("p1")] == [
        (f"{cluster.namespace}/cluster", "eth0", True),
        (f"{cluster.namespace}/n1", "net1", False),
    ]
    time.sleep(1)
    asked = [item for item in cluster.server.audit(USER, since=mark) if item["verb"] != "watch"]
    assert sorted((item["verb"], item["resource"], item["subresource"]) for item in asked) == [
        ("create", "events", ""),
        ("patch", "pods", "status"),
    ]
    assert all(item["code"] < 300 for item in asked)
    assert cluster.cni("DEL", "p1", netns).code == 0
    assert cluster.node.leftovers() == []


@pytest.mark.npwg("5")
@pytest.mark.conformance("e2e-1")
def test_other_annotations_are_left_alone(cluster: Cluster) -> None:
    cluster.pod("p1", None, **{"example.com/kept": "yes"})
    cluster.node.start()
    assert cluster.cni("ADD", "p1", cluster.node.add_netns()).code == 0
    cluster.node.wait_until(lambda: STATUS in cluster.annotations("p1"), "the status is written")
    assert cluster.annotations("p1")["example.com/kept"] == "yes"


@pytest.mark.conformance("verbs-19")
def test_a_pod_that_is_made_after_the_add_began_is_waited_for(cluster: Cluster) -> None:
    cluster.node.start()
    netns = cluster.node.add_netns()
    later = threading.Timer(0.1, cluster.pod, ["late"])
    later.start()
    answer = cluster.cni("ADD", "late", netns, uid="")
    later.join()
    assert answer.code == 0, answer.stdout


@pytest.mark.weak_spot(4)
@pytest.mark.conformance("verbs-26")
def test_a_pod_that_is_gone_is_an_error_and_its_del_is_not(cluster: Cluster) -> None:
    cluster.node.start()
    netns = cluster.node.add_netns()
    answer = cluster.cni("ADD", "ghost", netns)
    assert (answer.code, answer.json["code"]) == (1, 11)
    assert answer.json["msg"].startswith(f"pod {cluster.namespace}/ghost is not known")
    assert cluster.cni("DEL", "ghost", netns).code == 0


@pytest.mark.conformance("verbs-21")
def test_a_pod_made_anew_under_the_same_name_is_not_confused(cluster: Cluster) -> None:
    cluster.pod("p1")
    old = cluster.uids["p1"]
    cluster.server.delete_pod("p1", cluster.namespace)
    cluster.pod("p1")
    cluster.node.start()
    answer = cluster.cni("ADD", "p1", cluster.node.add_netns(), uid=old)
    assert answer.code == 1
    assert old in answer.json["msg"]
    assert cluster.uids["p1"] in answer.json["msg"]
    assert STATUS not in cluster.annotations("p1")
    assert cluster.cni("ADD", "p1", cluster.node.add_netns(), "c-new").code == 0


@pytest.mark.conformance("e2e-3")
def test_a_static_pod_has_another_uid_in_the_api(cluster: Cluster) -> None:
    cluster.pod("static", None, **{"kubernetes.io/config.source": "file", "kubernetes.io/config.mirror": "m"})
    cluster.node.start()
    answer = cluster.cni("ADD", "static", cluster.node.add_netns(), uid="the-kubelets-own")
    assert answer.code == 0, answer.stdout
    cluster.node.wait_until(lambda: bool(cluster.status("static")), "the status is written")


def test_an_api_server_away_for_a_minute_loses_nothing(cluster: Cluster) -> None:
    names = [f"p{number}" for number in range(8)]
    for name in names:
        cluster.pod(name)
    cluster.node.start()
    spaces = {name: cluster.node.add_netns() for name in names}
    for name in names[:4]:
        assert cluster.cni("ADD", name, spaces[name]).code == 0
    cluster.server.stop()
    stopped = time.monotonic()
    for name in names[4:]:
        assert cluster.cni("ADD", name, spaces[name]).code == 0, "the pod was known"
    for name in names[:4]:
        assert cluster.cni("DEL", name, spaces[name]).code == 0
    time.sleep(max(0.0, 60 - (time.monotonic() - stopped)))
    cluster.server.start()
    cluster.node.wait_until(lambda: all(cluster.status(name) for name in names[4:]), "every status is written", 60)
    for name in names[4:]:
        assert cluster.status(name)[0]["interface"] == "eth0"
        assert cluster.cni("DEL", name, spaces[name]).code == 0
    assert cluster.node.leftovers() == []


def test_a_status_that_waited_for_the_api_server_outlives_the_daemon(cluster: Cluster) -> None:
    cluster.network("n1", "10.86.0.0/16")
    cluster.pod("p1", "n1")
    cluster.pod("p2")
    cluster.node.start()
    netns, other = cluster.node.add_netns(), cluster.node.add_netns()
    assert cluster.cni("ADD", "p2", other).code == 0
    cluster.node.wait_until(lambda: bool(cluster.status("p2")), "the status is written")
    before = cluster.annotations("p2")
    cluster.server.stop()
    assert cluster.cni("ADD", "p1", netns).code == 0, "the pod was known"
    cluster.node.kill()
    cluster.node.start(ready=False)
    cluster.server.start()
    cluster.node.wait_until(lambda: bool(cluster.status("p1")), "the status is written", 60)
    assert [entry["interface"] for entry in cluster.status("p1")] == ["eth0", "net1"]
    assert cluster.annotations("p2") == before
    for name, path in (("p1", netns), ("p2", other)):
        assert cluster.cni("DEL", name, path).code == 0
    assert cluster.node.leftovers() == []


def test_a_daemon_that_starts_without_an_api_server_serves_del_and_says_why_add_waits(cluster: Cluster) -> None:
    cluster.pod("p1")
    cluster.node.start()
    netns = cluster.node.add_netns()
    assert cluster.cni("ADD", "p1", netns).code == 0
    cluster.node.kill()
    cluster.server.stop()
    cluster.node.start(ready=False)
    status, text = cluster.node.get("/readyz?gates")
    assert status == 503
    assert b"pods" in text
    answer = cluster.cni("ADD", "p1", cluster.node.add_netns(), "c-other", timeout=30)
    assert (answer.code, answer.json["code"]) == (1, 11)
    assert cluster.cni("DEL", "p1", netns).code == 0
    assert cluster.node.leftovers() == []
    cluster.server.start()
    cluster.node.wait_until(lambda: cluster.node.get("/readyz?gates")[0] == 200, "ready again", 45)


def test_a_daemon_that_generates_no_configuration_is_not_ready_and_says_what_to_set(cluster: Cluster) -> None:
    directory = cluster.node.root / "net.d"
    directory.mkdir()
    cluster.node.settings["cniConfigDir"] = str(directory)
    cluster.node.start(ready=False)
    cluster.node.wait_until(lambda: list(closed(cluster.node)) == ["primary"], "all but that is ready")
    assert closed(cluster.node)["primary"].startswith("no CNI configuration is generated")
    assert list(directory.iterdir()) == []
    cluster.node.stop()
    # As with the flags of the first thick release.
    (directory / "10-cluster.conf").write_text('{"cniVersion": "1.0.0", "name": "primary", "type": "ptp"}')
    cluster.node.settings["multusConfigFile"] = "auto"
    cluster.node.start()
    cluster.node.wait_until((directory / "00-multus.conf").exists, "it is generated")


def test_a_rotating_token_fails_no_request(cluster: Cluster) -> None:
    cluster.token.write_text(cluster.server.service_account_token("kube-system", "multus-daemon", seconds=20))
    for number in range(30):
        cluster.pod(f"p{number}")
    cluster.node.start()
    mark = cluster.server.audit_mark()
    until = time.monotonic() + 40
    rotated = time.monotonic()
    number = 0
    while time.monotonic() < until or number <= 30:
        if time.monotonic() - rotated > 5:
            fresh = cluster.token.with_suffix(".new")
            fresh.write_text(cluster.server.service_account_token("kube-system", "multus-daemon", seconds=20))
            fresh.rename(cluster.token)
            rotated = time.monotonic()
        name = f"p{number % 30}"
        netns = cluster.node.add_netns()
        assert cluster.cni("ADD", name, netns, f"c{number}").code == 0
        assert cluster.cni("DEL", name, netns, f"c{number}").code == 0
        cluster.node.remove_netns(netns)
        number += 1
        time.sleep(0.3)
    refused = [item for item in cluster.server.audit(USER, since=mark) if item["code"] in (401, 403)]
    assert refused == []


def test_a_node_that_the_api_does_not_know_is_refused(cluster: Cluster) -> None:
    cluster.node.node_name = ""
    with pytest.raises(AssertionError, match="MULTUS_NODE_NAME"):
        cluster.node.start()
    assert cluster.node.daemon is not None
    assert cluster.node.daemon.wait(timeout=20) == 3


class Signer(threading.Thread):
    """The controller manager's part: signs what is approved, for `seconds`."""

    def __init__(self, server: ApiServer, seconds: float) -> None:
        super().__init__(daemon=True)
        self._server, self._seconds = server, seconds
        self._stop_now = threading.Event()
        self.signed: list[str] = []

    def run(self) -> None:
        while not self._stop_now.wait(0.2):
            path = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
            for item in self._server.request("GET", path)["items"]:
                status = item.get("status") or {}
                approved = any(found["type"] == "Approved" for found in status.get("conditions") or [])
                if approved and not status.get("certificate"):
                    self._server.sign_certificate(item["metadata"]["name"], seconds=self._seconds)
                    self.signed.append(item["metadata"]["name"])

    def stop(self) -> None:
        self._stop_now.set()
        self.join()


def test_a_certificate_of_the_nodes_own_is_renewed_without_a_gap(cluster: Cluster) -> None:
    server, node = cluster.server, cluster.node
    objects = yaml.safe_load_all((ROOT / "manifests" / "cert-approver" / "approver.yaml").read_text())
    server.apply(*[item for item in objects if item["kind"] != "Deployment"])
    bootstrap = server.kubeconfig(f"system:node:{cluster.name}", ["system:nodes"])
    directory = node.root / "certificates"
    # The component per-node-certificates mounts it.
    node.writable.append(directory)
    del node.settings["kubeconfig"]
    node.settings["perNodeCertificate"] = {
        "enabled": True,
        "bootstrapKubeconfig": str(bootstrap),
        "certDir": str(directory),
    }
    approver_token = server.service_account_token("kube-system", "multus-cert-approver")
    approver_config = str(server.kubeconfig_for_token(approver_token))
    # As root: the virtual environment may be in a home that others cannot read.
    rights = replace(of_folder("cert-approver", "cert-approver"), user=0, group=0)
    container = Container(node.root, rights)
    contained = container.cli("cert-approver", "--kubeconfig", approver_config)
    inside = [needed("ip"), "netns", "exec", Path(node.host).name, *contained]
    cluster.pod("p1")
    signer = Signer(server, 20)
    log = (node.root / "approver.log").open("wb")
    approver = subprocess.Popen(inside, stdout=log, stderr=log)
    try:
        signer.start()
        node.start(timeout=30)
        mark = server.audit_mark()
        until, number = time.monotonic() + 50, 0
        while time.monotonic() < until:
            netns = node.add_netns()
            added = cluster.cni("ADD", "p1", netns, f"c{number}")
            assert added.code == 0, added.stdout
            assert cluster.cni("DEL", "p1", netns, f"c{number}").code == 0
            node.remove_netns(netns)
            number += 1
            time.sleep(0.5)
        asked = server.audit(f"system:multus:{cluster.name}", since=mark)
        assert asked, "the daemon is who its certificate says"
        assert [item for item in asked if item["code"] in (401, 403)] == []
        assert len(signer.signed) >= 3
        assert cluster.status("p1")[0]["interface"] == "eth0"
        assert (directory / "multus-client-current.pem").stat().st_mode & 0o777 == 0o600
    finally:
        approver.terminate()
        approver.wait(timeout=20)
        container.__exit__()
        signer.stop()
        log.close()


def test_what_happens_to_the_nodes_configuration_is_an_event_of_the_node(cluster: Cluster) -> None:
    directory = cluster.node.root / "net.d"
    directory.mkdir()
    (directory / "10-net.conf").write_text('{"cniVersion":"1.0.0","name":"net","type":"ptp"}')
    cluster.node.settings |= {"cniConfigDir": str(directory), "multusAutoconfigDir": str(directory)}
    cluster.node.start()
    ours = directory / "00-multus.conf"
    assert ours.exists(), "a daemon that is ready has written it"
    ours.rename(directory / "00-multus.conf.cilium_bak")
    cluster.node.wait_until(ours.exists, "it is put back")

    def events() -> dict[str, dict[str, Any]]:
        items = cluster.server.request("GET", "/api/v1/namespaces/default/events")["items"]
        return {item["reason"]: item for item in items if item["involvedObject"].get("name") == cluster.name}

    cluster.node.wait_until(lambda: "CNIConfigRestored" in events(), "the event is there")
    event = events()["CNIConfigRestored"]
    assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": cluster.name, "uid": cluster.name}
    assert (event["type"], event["source"]) == ("Warning", {"component": "multus", "host": cluster.name})
    assert "set cni.exclusive to false" in event["message"]
    assert "CNIConfigWritten" in events()
