"""Answers about running pods, the node's files and what is left: each was false once (see `test_answers.py`)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.cluster.test_answers import LINES, NAMESPACE, RESULT, STORAGE, Asked, asked, cluster

__all__ = ["asked", "cluster"]

pytest_plugins = ["tests.e2e.cluster.fixtures"]

NET_D = "/etc/cni/net.d"


def say(asked: Asked, answers: dict[str, str], cause: str, remedy: str) -> None:
    """Each answer names the cause and the remedy in its first lines."""
    for way, text in answers.items():
        first = "\n".join(text.splitlines()[:LINES])
        assert re.search(cause, first), f"{way} does not name the cause: {text}"
        assert re.search(remedy, first), f"{way} has no remedy: {text}"


def on_the_node(asked: Asked, *words: str) -> str:
    """The output of `multusctl` in the daemon's pod."""
    (daemon,) = asked.multus.pods()
    return asked.node.kubectl(
        "-n", "kube-system", "exec", daemon, "--", "sh", "-c", f"multusctl {' '.join(words)} || :"
    )


def status(asked: Asked) -> str:
    """The output of `kubectl multus status`."""
    kubeconfig = str(asked.node.server.admin_kubeconfig)
    command = [sys.executable, "-m", "multus_tools.kubectl", "status", "--kubeconfig", kubeconfig]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


def both(asked: Asked, pod: str) -> dict[str, str]:
    return {"why": asked.why(pod), "explain": asked.explain(pod)}


@pytest.fixture
def running(asked: Asked) -> Asked:
    """A pod `web` that runs with the network `storage`."""
    asked.define("storage", STORAGE)
    asked.define("backup", {**STORAGE, "bridge": "br-red"})
    asked.node.pod("web", networks="storage")
    asked.node.wait_running("web")
    return asked


def test_a_network_that_is_added_to_the_annotation_of_a_running_pod(running: Asked) -> None:
    networks = "k8s.v1.cni.cncf.io/networks=storage,backup"
    running.node.kubectl("-n", NAMESPACE, "annotate", "--overwrite", "pod", "web", networks)
    cause = r"networks that it asked for: default/backup: its annotation was changed after its start"
    answers = {**both(running, "web"), "why, onlooker": running.why("web", running.onlooker)}
    say(running, answers, cause, "made anew.* hotplug")


def test_an_interface_that_is_deleted_in_the_pod(running: Asked) -> None:
    assert "has its networks: its interfaces were compared with the kernel just now" in in_order(running, "web")
    running.node.ip("link", "delete", "net1", pod="web")
    say(running, both(running, "web"), 'interface "net1" is not there', "multusctl repair default/web")
    assert re.search(r"\bbroken\s+1 attachment\b", on_the_node(running, "status"))
    on_the_node(running, "repair", "default/web")
    assert "has its networks" in in_order(running, "web")


def in_order(asked: Asked, pod: str) -> str:
    """The output of `kubectl multus why` about a pod that has its networks."""
    words = ["why", f"{NAMESPACE}/{pod}", "--kubeconfig", str(asked.node.server.admin_kubeconfig)]
    command = [sys.executable, "-m", "multus_tools.kubectl", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_annotation_that_can_not_be_read(asked: Asked) -> None:
    asked.node.pod("torn", networks='[{"name": "storage",}]')
    asked.told("torn", r"not JSON: .* \(line 1, column \d+\)", "correct the annotation in the pod's template")
    assert asked.explain("torn").count("not JSON") == 1


def test_a_del_that_keeps_failing(asked: Asked) -> None:
    error = '{"cniVersion": "1.0.0", "code": 999, "msg": "port 7 of the switch is locked"}'
    asked.plugin("fabric", f"[ $CNI_COMMAND != DEL ] || {{ echo '{error}'; exit 1; }}\necho '{RESULT}'")
    asked.define("storage", {"type": "fabric"})
    asked.node.pod("stays", networks="storage")
    asked.node.wait_running("stays")
    asked.node.kubectl("-n", NAMESPACE, "delete", "pod", "stays", "--wait=false", "--grace-period=1")
    try:
        asked.node.wait_until(lambda: "its DEL failed" in asked.explain("stays"), "a DEL has failed")
        cause = r"its DEL failed (once|\d+ times) and is tried again: port 7 of the switch is locked.*fabric"
        say(asked, both(asked, "stays"), cause, "multusctl attachments forget")
        asked.multus.kill()
        asked.multus.wait_ready()
        # The last requests are forgotten, the record is not.
        assert re.search(r"its DEL failed (once|\d+ times)", asked.explain("stays"))
        leaks = json.loads(on_the_node(asked, "attachments", "--leaks", "--json"))["containers"]
        assert json.loads(on_the_node(asked, "status", "--json"))["leftovers"] == len(leaks) == 1
    finally:
        asked.plugin("fabric", f"echo '{RESULT}'")


def test_a_host_device_that_is_left_holds_nothing_outside_of_the_pod(asked: Asked) -> None:
    program = asked.node.machine.path("/opt/cni/bin/host-device")
    reference = program.read_bytes()
    error = '{"cniVersion": "1.0.0", "code": 999, "msg": "failed to find net1"}'
    asked.plugin(
        "host-device",
        f"""PATH=/usr/sbin:/sbin:/usr/bin:/bin
[ $CNI_COMMAND != DEL ] || {{ echo '{error}'; exit 1; }}
[ $CNI_COMMAND != ADD ] || ip -n "$(basename "$CNI_NETNS")" link add "$CNI_IFNAME" type bridge
echo '{{"cniVersion": "1.0.0", "interfaces": [{{"name": "net1", "sandbox": "'"$CNI_NETNS"'"}}]}}'""",
    )
    # The built-in does not know the key.
    asked.define("storage", {"type": "host-device", "device": "eth7", "own": True})
    try:
        asked.node.pod("device", networks="storage")
        asked.node.wait_running("device")
        asked.node.kubectl("-n", NAMESPACE, "delete", "pod", "device", "--wait=false", "--grace-period=1")
        asked.node.wait_until(lambda: "its DEL failed" in asked.explain("device"), "a DEL has failed")
        say(asked, both(asked, "device"), "failed to find net1", "it holds nothing outside its network namespace")
        asked.plugin("host-device", f"echo '{RESULT}'")
        asked.node.wait_until(lambda: "its DEL failed" not in asked.explain("device"), "it is deleted", 120)
    finally:
        program.write_bytes(reference)


def test_a_daemon_that_may_not_list_networks(asked: Asked) -> None:
    path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/multus-daemon"
    server = asked.node.server
    role = server.request("GET", path)
    rules = [rule for rule in role["rules"] if "network-attachment-definitions" not in rule["resources"]]
    assert rules != role["rules"]
    asked.define("storage", STORAGE)
    server.apply({**role, "rules": rules, "metadata": {"name": "multus-daemon"}})
    try:
        asked.multus.kill()
        asked.node.pod("refused", networks="storage")
        cause = r"(?s)network-attachment-definitions.*403 Forbidden|403 Forbidden.*network-attachment-definitions"
        remedy = "give the daemon's service account that verb on that resource: its ClusterRole is multus-daemon"
        asked.told("refused", cause, remedy, seconds=120)
        say(asked, {"status": on_the_node(asked, "status"), "doctor": on_the_node(asked, "doctor")}, cause, remedy)
    finally:
        server.apply({**role, "metadata": {"name": "multus-daemon"}})
        asked.multus.wait_ready()


@pytest.fixture
def shadowed(asked: Asked) -> Iterator[Asked]:
    """Another file comes before `00-multus.conf`."""
    path = asked.node.machine.path(f"{NET_D}/00-aaa.conflist")
    config = {"cniVersion": "1.0.0", "name": "other", "plugins": [{**STORAGE, "isGateway": True}]}
    path.write_text(json.dumps(config))
    yield asked
    # What it gave an address gives it back.
    asked.node.remove_pods()
    path.unlink()
    asked.multus.wait_ready()


def test_a_file_before_ours(shadowed: Asked) -> None:
    shadowed.node.pod("astray", networks="storage")
    asked, cause = shadowed, f"{NET_D}/00-aaa.conflist comes before 00-multus.conf, so the runtime uses it"
    remedy = "remove it, or give it a name that sorts later"
    asked.node.wait_until(lambda: "comes before" in on_the_node(asked, "status"), "the file is seen")
    answers = {"status": on_the_node(asked, "status"), "doctor": on_the_node(asked, "doctor"), **both(asked, "astray")}
    say(asked, answers, cause, remedy)
    assert re.search(rf"not on 1\n(?s:.*){cause}", status(asked))


def test_a_directory_of_configurations_that_is_missing(asked: Asked) -> None:
    machine = asked.node.machine
    machine.run("cp", "-a", NET_D, "/var/tmp/net.d")
    machine.run("rm", "-r", NET_D)
    try:
        cause, remedy = f"{NET_D} is missing on the node", "delete the daemon's pod: the kubelet makes the directory"
        asked.node.wait_until(lambda: "is missing on the node" in on_the_node(asked, "status"), "it is missed")
        asked.node.pod("waits")
        answers = {"status": on_the_node(asked, "status"), "explain": asked.explain("waits"), "why": asked.why("waits")}
        say(asked, answers, cause, remedy)
        # The kubelet notices too, and the scheduler passes over the node.
        asked.node.wait_until(lambda: "NotReady" in asked.node.kubectl("get", "nodes"), "the node is not ready")
        asked.node.pod("later")
        asked.node.wait_until(lambda: "FailedScheduling" in asked.node.kubectl("get", "events"), "it is passed over")
        say(asked, {"why": asked.why("later")}, cause, remedy)
        assert re.search(rf"configuration: {cause[:14]}\n.*is missing.*\n.*{remedy}", on_the_node(asked, "doctor"))
    finally:
        asked.multus.kill()
        asked.node.kubectl("-n", "kube-system", "delete", "pod", *asked.multus.pods(), "--wait=false")
        machine.run("sh", "-c", f"mkdir -p {NET_D} && cp -a /var/tmp/net.d/. {NET_D}/ && rm -r /var/tmp/net.d")
        # It still watches the old directory.
        asked.node.kill_containerd()
        asked.multus.wait_ready(120)
    for pod in ("waits", "later"):
        asked.node.wait_running(pod, timeout=120)
