"""What keeps a pod from its networks, on a real node: the first lines of each answer name the cause and what to do.

Asked by the cluster's administrator, by somebody who may only read pods and Events of the namespace, and on the node.
MULTUS_ANSWERS names a directory into which the answers are written, for people who judge them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster.fixtures import installed
from tests.e2e.cluster.multus import SHIM, MultusPod
from tests.e2e.cluster.real_node import RealNode
from tests.e2e.cluster.workload import forget_events, host_local, network
from tests.e2e.node import NAD

pytest_plugins = ["tests.e2e.cluster.fixtures"]

RESULT = '{"cniVersion": "1.0.0", "interfaces": [], "ips": []}'
LINES = 3
NAMESPACE = "default"
LEASES = "/var/lib/cni/networks"


@dataclass
class Asked:
    """A cluster with something wrong, and the ways to ask about it."""

    multus: MultusPod
    onlooker: str
    """A kubeconfig."""

    @property
    def node(self) -> RealNode:
        return self.multus.node

    def event(self, pod: str, cause: str, seconds: float) -> str:
        """The first Warning about the pod that names the cause."""
        found: list[str] = []

        def is_there() -> bool:
            items = self.node.server.request("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
            about = [item for item in items if item["involvedObject"]["name"] == pod and item["type"] == "Warning"]
            found[:] = [item["message"] for item in about if re.search(cause, item["message"])]
            return bool(found)

        self.node.wait_until(is_there, f"an Event about {pod} says {cause!r}", seconds)
        return found[0]

    def why(self, pod: str, kubeconfig: str = "") -> str:
        """The output of `kubectl multus why`."""
        words = ["why", f"{NAMESPACE}/{pod}", "--kubeconfig", kubeconfig or str(self.node.server.admin_kubeconfig)]
        command = [sys.executable, "-m", "multus_tools.kubectl", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout

    def explain(self, pod: str) -> str:
        """The output of `multusctl explain` in the daemon's pod."""
        (daemon,) = self.multus.pods()
        words = ["-n", "kube-system", "exec", daemon, "--", "sh", "-c", f"multusctl explain {NAMESPACE}/{pod} || true"]
        return self.node.kubectl(*words)

    def told(
        self,
        pod: str,
        cause: str,
        remedy: str,
        *,
        event: bool = True,
        explain: bool = True,
        seconds: float = 60,
    ) -> None:
        """Every way names the cause, a pattern, and the remedy, another one, in its first lines.

        `event`: a Warning of ours has both; else the kubelet's has the cause. `explain`: the node can be asked.
        """
        answers = {"event": self.event(pod, cause, seconds)}
        for who, kubeconfig in (("administrator", ""), ("onlooker", self.onlooker)):
            answers[f"why, {who}"] = self.why(pod, kubeconfig)
        if explain:
            answers["explain"] = self.explain(pod)
        first = {way: "\n".join(text.splitlines()[:LINES]) for way, text in answers.items()}
        if directory := os.environ.get("MULTUS_ANSWERS"):
            Path(directory, pod).write_text("\n\n".join(f"## {way}\n{text}" for way, text in first.items()))
        for way, text in first.items():
            assert re.search(cause, text), f"{way} does not name the cause: {text}"
            assert re.search(remedy, text) or (way == "event" and not event), f"{way} has no remedy: {text}"

    def define(self, name: str, *plugins: dict[str, Any], namespace: str = NAMESPACE) -> None:
        """A network of one plugin or a chain."""
        config = json.dumps({"cniVersion": "1.0.0", "name": name, "plugins": list(plugins)})
        metadata = {"namespace": namespace, "name": name}
        self.node.server.apply({**NAD, "metadata": metadata, "spec": {"config": config}})

    def plugin(self, name: str, script: str) -> None:
        """A plugin of the node's, a shell script."""
        path = self.node.machine.path(f"/opt/cni/bin/{name}")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


@pytest.fixture(scope="module")
def cluster(real_node_session: RealNode) -> Iterator[Asked]:
    """Our DaemonSet, started, and a reader of pods and Events."""
    server = real_node_session.server
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    rules = [{"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["get", "list"]}]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "onlooker"}
    subject = {"kind": "ServiceAccount", "name": "onlooker", "namespace": NAMESPACE}
    metadata = {"namespace": NAMESPACE, "name": "onlooker"}
    server.apply(
        {**rbac, "kind": "Role", "metadata": metadata, "rules": rules},
        {**rbac, "kind": "RoleBinding", "metadata": metadata, "roleRef": role, "subjects": [subject]},
    )
    token = server.service_account_token(NAMESPACE, "onlooker")
    with installed(real_node_session, MultusPod) as made:
        made.start()
        yield Asked(made, str(server.kubeconfig_for_token(token)))


@pytest.fixture
def asked(cluster: Asked) -> Iterator[Asked]:
    """The cluster; pods of the default namespace that a test leaves are removed after it."""
    yield cluster
    cluster.node.remove_pods()
    forget_events(cluster.node)


def test_a_plugin_that_hangs(asked: Asked) -> None:
    """Said while it hangs: it is ended after two minutes."""
    asked.plugin("hangs", f"[ \"$CNI_COMMAND\" = DEL ] || sleep 60; echo '{RESULT}'")
    asked.define("storage", {"type": "hangs"})
    asked.node.pod("hung", networks="storage")
    cause, remedy = r'plugin "hangs" of network default/storage', "look at the log of the plugin's own agent"
    asked.told("hung", cause, remedy)
    assert re.search(r"for \d+ s, up to 120 s", asked.why("hung"))
    asked.plugin("hangs", f"echo '{RESULT}'")


def test_a_daemon_that_is_down(asked: Asked) -> None:
    asked.multus.delete()
    try:
        asked.node.pod("alone")
        asked.told(
            "alone",
            "multus daemon does not listen on /run/multus/multus.sock",
            "kubectl get pods -A -l app=multus",
            explain=False,
            seconds=120,
        )
    finally:
        asked.multus.start()


@pytest.fixture
def shim(asked: Asked) -> Iterator[Path]:
    """The installed shim, put back afterwards."""
    path = asked.node.machine.path(SHIM)
    whole, mode = path.read_bytes(), path.stat().st_mode
    yield path
    path.unlink(missing_ok=True)
    path.write_bytes(whole)
    path.chmod(mode)


def test_a_shim_that_is_missing(asked: Asked, shim: Path) -> None:
    """The runtime's own words are the only Event."""
    shim.unlink()
    asked.node.pod("no-shim")
    cause = 'failed to find plugin "multus-shim" in path'
    asked.told(
        "no-shim", cause, "missing or damaged; the daemon's pod installs it .*delete pod", event=False, explain=False
    )
    doctor_names(asked, "is not there: the runtime can't call Multus", "delete the daemon's pod of this node")


def test_a_shim_that_is_damaged(asked: Asked, shim: Path) -> None:
    whole, mode = shim.read_bytes(), shim.stat().st_mode
    shim.unlink()
    shim.write_bytes(whole[: len(whole) // 3])
    shim.chmod(mode)
    asked.node.pod("torn-shim")
    cause = "multus-shim.*(signal|exec format error)"
    asked.told(
        "torn-shim", cause, "missing or damaged; the daemon's pod installs it .*delete pod", event=False, explain=False
    )
    doctor_names(asked, "is damaged or of another release", "delete the daemon's pod of this node")


def doctor_names(asked: Asked, evidence: str, advice: str) -> None:
    """The doctor of the node has the finding."""
    (daemon,) = asked.multus.pods()
    found = asked.node.kubectl("-n", "kube-system", "exec", daemon, "--", "sh", "-c", "multusctl doctor || true")
    assert re.search(rf"error shim: {SHIM}\n.*{evidence}.*\n.*{advice}", found), found


def test_rights_that_are_missing(asked: Asked) -> None:
    path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/multus-daemon"
    server = asked.node.server
    role = server.request("GET", path)
    rules = [rule for rule in role["rules"] if rule["resources"] != ["pods"]]
    assert rules != role["rules"]
    server.apply({**role, "rules": rules, "metadata": {"name": "multus-daemon"}})
    try:
        asked.multus.kill()
        asked.node.pod("refused")
        asked.told(
            "refused",
            r"pod default/refused can't be looked up: .*403 Forbidden",
            "give the daemon's service account that verb on that resource",
            seconds=120,
        )
    finally:
        server.apply({**role, "metadata": {"name": "multus-daemon"}})
        asked.multus.wait_ready()


def test_a_key_that_is_misspelt(asked: Asked) -> None:
    """The pod runs, without what it asked for."""
    asked.define("storage", {"type": "bridge", "bridge": "br-blue", "ipam": host_local("10.91.0.0/24")})
    asked.node.pod("misspelt", networks='[{"name": "storage", "interfce": "data0"}]')
    asked.node.wait_running("misspelt")
    cause = r"network default/storage: .*interfce"
    asked.told("misspelt", cause, "correct the annotation in the pod's template", explain=False)


def test_json_that_is_malformed(asked: Asked) -> None:
    metadata = {"namespace": NAMESPACE, "name": "torn"}
    asked.node.server.apply({**NAD, "metadata": metadata, "spec": {"config": '{"cniVersion": "1.0.0" "type": "ptp"}'}})
    asked.node.pod("bad-json", networks="torn")
    asked.told(
        "bad-json",
        r"not JSON: expected .* \(line 1, ",
        "correct spec.config of NetworkAttachmentDefinition default/torn",
    )


def test_a_network_that_does_not_exist(asked: Asked) -> None:
    asked.node.pod("no-network", networks="unheard-of")
    asked.told("no-network", "network default/unheard-of does not exist", "create it, or correct the pod's annotation")


def test_a_plugin_that_is_missing(asked: Asked) -> None:
    asked.define("storage", {"type": "fabric"})
    asked.node.pod("no-plugin", networks="storage")
    asked.told("no-plugin", 'failed to find plugin "fabric" in path', "install the plugin on the node")


def test_no_addresses_left(asked: Asked) -> None:
    asked.define("storage", {"type": "bridge", "bridge": "br-blue", "ipam": host_local("10.91.0.0/30")})
    asked.node.pod("first", networks="storage")
    asked.node.wait_running("first")
    asked.node.pod("no-address", networks="storage")
    asked.told(
        "no-address", "no IP addresses available in range set: 10.91.0.1-10.91.0.2", "give the network a larger range"
    )


def test_an_interface_that_is_asked_for_twice(asked: Asked) -> None:
    network(asked.node, "blue", {"type": "bridge", "bridge": "br-blue"})
    asked.node.pod("twice", networks="blue@net1,blue@net1")
    asked.told("twice", "interface 'net1' is asked for twice", "give each an interface of its own")


@pytest.mark.parametrize("plugin", ["garbage", "bridge"])
def test_a_pod_that_fails_at_every_try(asked: Asked, plugin: str) -> None:
    """One Event that counts, and at most one record, however often the kubelet tries."""
    asked.plugin("garbage", "echo this is not JSON")
    asked.node.machine.run("mkdir", "-p", f"{LEASES}/storage")
    asked.define("storage", {"type": plugin, "bridge": "br-blue", "ipam": host_local("10.91.0.0/24")})
    asked.node.machine.run("mount", "-t", "tmpfs", "-o", "ro", "multus-test", f"{LEASES}/storage")
    try:
        asked.node.pod("again", networks="storage")
        asked.node.wait_until(
            lambda: sum(item.get("count") or 1 for item in own_events(asked, "again")) >= 4, "4 tries", 120
        )
        reasons = [item["reason"] for item in own_events(asked, "again")]
        assert len(reasons) == len(set(reasons)), own_events(asked, "again")
        (daemon,) = asked.multus.pods()
        found = json.loads(
            asked.node.kubectl("-n", "kube-system", "exec", daemon, "--", "multusctl", "attachments", "--json")
        )
        assert len(found["containers"]) <= 1, found["containers"]
    finally:
        asked.node.machine.run("umount", f"{LEASES}/storage")


def own_events(asked: Asked, pod: str) -> list[dict[str, Any]]:
    """The daemon's Warnings about the pod."""
    items = asked.node.server.request("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
    return [
        item
        for item in items
        if (item["involvedObject"]["name"], item["type"]) == (pod, "Warning")
        and item["source"].get("component") == "multus"
    ]


# --- what the network's configuration or the pod asks for ------------------------------------------------------------

STORAGE: dict[str, Any] = {"type": "bridge", "bridge": "br-blue", "ipam": host_local("10.91.0.0/24")}


def test_a_network_of_another_namespace(asked: Asked) -> None:
    asked.node.server.create_namespace("other")
    asked.define("elsewhere", STORAGE, namespace="other")
    asked.node.pod("elsewhere", networks="elsewhere")
    asked.told("elsewhere", "network default/elsewhere does not exist", "write other/elsewhere in the pod's annotation")


@pytest.fixture
def held(asked: Asked) -> Asked:
    """A pod `holder` has the address 10.91.0.7 and a MAC address of the network `storage`, of a bridge."""
    capabilities = {"ips": True, "mac": True}
    asked.define("storage", {**STORAGE, "capabilities": capabilities})
    asked.node.pod("holder", networks=wants(ips=["10.91.0.7/24"], mac="02:00:00:00:00:07"))
    asked.node.wait_running("holder")
    return asked


def wants(network: str = "storage", **requests: Any) -> str:
    """An annotation with one network."""
    return json.dumps([{"name": network, **requests}])


def test_an_address_outside_the_range(held: Asked) -> None:
    held.node.pod("outside", networks=wants(ips=["10.99.0.5/24"]))
    held.told(
        "outside", r"10\.99\.0\.5", r"ask for another in the pod's annotation, in the network's range 10\.91\.0\.1"
    )


def test_an_address_that_is_taken(held: Asked) -> None:
    held.node.pod("taken", networks=wants(ips=["10.91.0.7/24"]))
    held.told("taken", r"10\.91\.0\.7 is not available", r"pod default/holder has 10\.91\.0\.7: ask for another")


def test_a_mac_address_that_is_taken_on_a_bridge(held: Asked) -> None:
    held.node.pod("same-mac", networks=wants(mac="02:00:00:00:00:07"))
    held.told("same-mac", "MAC address 02:00:00:00:00:07 is that of pod default/holder", "ask for another")


def test_a_mac_address_that_is_taken_on_a_master(asked: Asked) -> None:
    plugin = {"type": "macvlan", "master": "eth0", "capabilities": {"mac": True}, "ipam": host_local("10.92.0.0/24")}
    asked.define("fast", plugin)
    asked.node.pod("mac-holder", networks=wants("fast", mac="02:00:00:00:00:08"))
    asked.node.wait_running("mac-holder")
    asked.node.pod("same-macvlan", networks=wants("fast", mac="02:00:00:00:00:08"))
    asked.told("same-macvlan", "Address already in use", "02:00:00:00:00:08 is that of pod default/mac-holder")


def test_a_kernel_module_that_is_missing(asked: Asked) -> None:
    asked.define("fast", {"type": "ipvlan", "master": "eth0", "ipam": host_local("10.92.0.0/24")})
    asked.node.pod("no-module", networks="fast")
    asked.told(
        "no-module", "[Oo]peration not supported", "the kernel has no ipvlan devices: modprobe ipvlan on the node"
    )


def test_a_plugin_that_prints_garbage(asked: Asked) -> None:
    asked.plugin("chatty", "echo hello from the plugin")
    asked.define("storage", {"type": "chatty"})
    asked.node.pod("garbage", networks="storage")
    asked.told("garbage", "hello from the plugin", "/opt/cni/bin/chatty")


@pytest.mark.parametrize(
    ("pod", "printed"),
    [
        ("two-answers", f'{RESULT} {{"code": 111, "msg": "the pool is gone"}}'),
        ("only-error", '{"error": "the pool is gone"}'),
    ],
)
def test_an_error_that_is_no_error_of_cni(asked: Asked, pod: str, printed: str) -> None:
    asked.plugin("vague", f"[ $CNI_COMMAND = DEL ] || {{ echo '{printed}'; exit 1; }}")
    asked.define("storage", {"type": "vague"})
    asked.node.pod(pod, networks="storage")
    asked.told(pod, "the pool is gone", "/opt/cni/bin/vague")


def test_a_master_that_is_missing(asked: Asked) -> None:
    asked.define("fast", {"type": "macvlan", "master": "eth9", "ipam": host_local("10.92.0.0/24")})
    asked.node.pod("no-master", networks="fast")
    asked.told("no-master", "eth9", "the node has .*eth0")


def test_an_mtu_that_is_too_large(asked: Asked) -> None:
    asked.define("storage", {**STORAGE, "bridge": "br-mtu", "mtu": 90000})
    asked.node.pod("large-mtu", networks="storage")
    asked.told("large-mtu", "(?i)mtu.*90000", "65535")


def test_a_dhcp_agent_that_is_absent(asked: Asked) -> None:
    # With a socket of its own the network is left to the binary.
    asked.define("storage", {**STORAGE, "ipam": {"type": "dhcp", "daemonSocketPath": "/run/cni/own.sock"}})
    asked.node.pod("no-dhcp", networks="storage")
    asked.told("no-dhcp", r"own\.sock", "start `/opt/cni/bin/dhcp daemon` on each node")


def test_a_segment_without_a_dhcp_server(asked: Asked) -> None:
    asked.define("storage", {**STORAGE, "ipam": {"type": "dhcp"}})
    asked.node.pod("no-server", networks="storage")
    asked.told("no-server", "no DHCP lease within", "is a DHCP server on the segment")


def test_a_directory_of_leases_that_is_read_only(asked: Asked) -> None:
    asked.define("sealed", {**STORAGE, "name": "sealed"})
    asked.node.machine.run("mkdir", "-p", f"{LEASES}/sealed")
    asked.node.machine.run("mount", "-t", "tmpfs", "-o", "ro", "multus-test", f"{LEASES}/sealed")
    try:
        asked.node.pod("read-only", networks="sealed")
        asked.told("read-only", f"Read-only file system: {LEASES}/sealed", f"check mount.* {LEASES}.* on the node")
    finally:
        asked.node.machine.run("umount", f"{LEASES}/sealed")
