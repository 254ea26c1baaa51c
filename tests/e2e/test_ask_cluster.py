"""Every command that asks, of `multusctl` and of `kubectl multus`: it changes nothing, and works while 16 ADDs run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from multus_tools.kubectl.commands import COMMANDS
from tests.e2e.addresses.objects import forget
from tests.e2e.apiserver import ApiServer
from tests.e2e.exec_kubelet import ExecKubelet
from tests.e2e.node import Node
from tests.e2e.test_ask import NOTHING_DIFFERS, asked, commands, everything, multusctl, tentative
from tests.e2e.test_kubernetes import Cluster

pytest_plugins = ["tests.e2e.kube_fixtures"]

READ_ONLY = {
    ("status",): 0,
    ("pods",): 1,
    ("why", "a"): 0,
    ("why", "b"): 1,
    ("networks",): 0,
    ("networks", "other"): 0,
    ("leaks",): 0,
    ("addresses",): 0,
}
"""Commands of `kubectl multus`, and their exit status: pod `a` has its networks, `b` lacks one that does not exist."""


UNSHARED = {("kubectl", "multus", "addresses")}
"""Says on standard error that no network has shared addresses, unless an earlier test has left one."""


class Asked(Cluster):
    """A cluster of one node, whose daemon can be asked by `pods/exec`."""

    def kubectl_multus(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run it as the cluster's administrator."""
        flags = ("--namespace", self.namespace, "--kubeconfig", str(self.server.admin_kubeconfig))
        # The last of two namespaces counts.
        command = [sys.executable, "-m", "multus_tools.kubectl", *flags, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})

    def all_commands(self) -> dict[tuple[str, ...], subprocess.CompletedProcess[str]]:
        """All that can be asked, on the node and from anywhere, as text and as JSON."""
        pods = {"default/a": f"{self.namespace}/a", "default/b": f"{self.namespace}/b"}
        done = {
            ("multusctl", *words): multusctl(self.node, *(pods.get(word, word) for word in words))
            for words in commands(self.node)
        }
        for words in READ_ONLY:
            for flags in ((), ("--json",)):
                done["kubectl", "multus", *words, *flags] = self.kubectl_multus(*words, *flags)
        return done


def expected(words: tuple[str, ...]) -> int:
    """The exit status of a command of `Asked.all_commands`."""
    if words[0] == "kubectl":
        return READ_ONLY[tuple(word for word in words[2:] if word != "--json")]
    return int(words[1:3] == ("explain", "default/b"))


@pytest.fixture
def cluster(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node]) -> Iterator[Asked]:
    for item in api_server.request("GET", "/api/v1/nodes")["items"]:
        # Of tests that have ended: nobody answers there.
        api_server.delete("v1", "Node", item["metadata"]["name"])
    forget(api_server)
    made = Asked(api_server, make_node(standalone=False), api_namespace)
    made.prepare()
    # 16 plugins side by side, of one network.
    made.node.settings |= {"reconcileSeconds": 0, "maxDelegateProcesses": 64, "delegateTimeoutSeconds": 165}
    made.network("other", "10.86.0.0/16")
    made.pod("a", "other")
    made.pod("b", "missing")
    with api_server.reachable_in(made.node.host), ExecKubelet(api_server, made.node, made.name):
        made.node.start()
        yield made
        made.node.kill()


def test_every_command_is_among_them() -> None:
    # `tests/e2e/test_bundle.py` has the one that writes a file.
    assert {words[0] for words in READ_ONLY} == {command.name for command in COMMANDS} - {"bundle"}


def test_no_command_changes_anything(cluster: Asked) -> None:
    node = cluster.node
    netns = node.add_netns()
    assert cluster.cni("ADD", "a", netns).code == 0
    assert cluster.cni("ADD", "b", node.add_netns()).code == 1
    gone = node.add_netns()
    assert cluster.cni("ADD", "a", gone, "c-gone").code == 0
    node.remove_netns_and_links(gone)
    node.wait_until(lambda: bool(cluster.events("b")), "the Event is there")
    node.wait_until(lambda: not any(tentative(node, place) for place in ("", netns)), "the kernel has its addresses")
    list(commands(node))  # They need a file.
    before = everything(node, netns)
    mark = cluster.server.audit_mark()
    done = cluster.all_commands()
    assert everything(node, netns) == before
    requests = [item for item in cluster.server.audit("admin", since=mark) if item["userAgent"].startswith("multus")]
    assert {"pods", "nodes", "events", "network-attachment-definitions"} <= {item["resource"] for item in requests}
    asking = {item["verb"] for item in requests if item["subresource"] != "exec"}
    assert asking == {"get", "list"}
    # They have looked.
    silent = {words for words, each in done.items() if not each.stdout}
    assert silent - UNSHARED == {("multusctl", *words) for words in NOTHING_DIFFERS}
    found = json.loads(done["kubectl", "multus", "leaks", "--json"].stdout)["containers"]
    assert [item["container"] for item in found] == ["c-gone"]


def test_all_of_them_work_while_16_adds_run(cluster: Asked) -> None:
    node = cluster.node
    gate = node.root / "agent"
    waits = f'[ "$CNI_COMMAND" != ADD ] || until [ -e {gate} ]; do sleep 0.1; done'
    node.plugin("fabric", f'{waits}\necho \'{{"cniVersion": "1.0.0", "interfaces": [], "ips": []}}\'')
    cluster.definition("slow", json.dumps({"cniVersion": "1.0.0", "name": "slow", "type": "fabric"}))
    assert cluster.cni("ADD", "a", node.add_netns()).code == 0
    assert cluster.cni("ADD", "b", node.add_netns()).code == 1
    names = [f"busy-{number}" for number in range(16)]
    for name in names:
        cluster.pod(name, "slow")
    spaces = {name: node.add_netns() for name in names}
    with ThreadPoolExecutor(16) as pool:
        adds = [pool.submit(cluster.cni, "ADD", name, spaces[name], timeout=200) for name in names]
        try:
            node.wait_until(lambda: asked(node, "status")["requests"]["running"] == 16, "16 ADDs run")
            done = cluster.all_commands()
            assert asked(node, "status")["requests"]["running"] == 16
        finally:
            gate.touch()
        assert [add.result().code for add in adds] == [0] * 16
    statuses = {words: each.returncode for words, each in done.items() if words[1] != "doctor"}
    assert statuses == {words: expected(words) for words in statuses}
    silent = [words for words, each in done.items() if not each.stdout]
    remarks = {("multusctl", *words) for words in NOTHING_DIFFERS}
    nothing = {("multusctl", "attachments", "--leaks"), ("kubectl", "multus", "leaks")}
    assert set(silent) - remarks - UNSHARED == nothing
    busy = json.loads(done["multusctl", "trace", "--json"].stdout)["requests"]
    assert sum(item["seconds"] is None for item in busy) == 16


def networks_in(cluster: Asked) -> str:
    """What `multusctl status` says about the daemon's copy of the definitions."""
    lines = multusctl(cluster.node, "status").stdout.splitlines()
    (found,) = (line for line in lines if line.startswith("kubernetes: networks"))
    return found


def heard(cluster: Asked) -> float:
    """The age of the API server's last word, in seconds."""
    (informer,) = (
        item for item in asked(cluster.node, "status")["cluster"]["informers"] if item["resource"] == "networks"
    )
    return float(informer["heardSeconds"])


def test_the_status_says_since_when_the_api_server_is_away(cluster: Asked) -> None:
    node, server = cluster.node, cluster.server
    assert re.search(r"\d, up to date [\d.]+ s ago *$", networks_in(cluster))
    server.pause()
    try:
        # The connection is still there; the last word is not of now.
        first = heard(cluster)
        node.wait_until(lambda: heard(cluster) > first + 2, "the last word gets older")
    finally:
        server.resume()
    server.stop()
    node.wait_until(lambda: "not in sync for" in networks_in(cluster), "the daemon notices")
    assert "up to date" not in networks_in(cluster)
    assert "networks" in asked(node, "status")["behind"]
