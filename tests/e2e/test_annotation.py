"""A running pod follows its networks annotation (`hotplug: on`): a real daemon, real namespaces."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.node import Node, ping
from tests.soak import annotation as soak

NETWORKS = ("blue", "green", "red")
KEY = "k8s.v1.cni.cncf.io/networks"


@pytest.fixture
def plugged(make_node: Callable[..., Node]) -> Node:
    """A node that follows annotations, with three networks beside the cluster's; not started."""
    node = make_node(settings={"hotplug": "on"})
    node.ptp("cluster", "10.81.0.0/24")
    for number, name in enumerate(NETWORKS):
        node.ptp(name, f"10.90.{number}.0/24", namespace="default")
    return node


def edit(node: Node, pod: str, networks: str | None, **annotations: str) -> None:
    """Declare the pod with this annotation, which its running container follows."""
    more = {} if networks is None else {KEY: networks}
    metadata = {"namespace": "default", "name": pod, "uid": f"uid-{pod}", "annotations": {**more, **annotations}}
    item = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}}
    path = node.manifests / f"pod-default-{pod}.yaml"
    beside = path.with_suffix(".new")
    beside.write_text(yaml.safe_dump(item))
    beside.rename(path)


def shown(node: Node, pod: str) -> dict[str, str]:
    """The network-status: name of each network by interface."""
    path = node.manifests / "status" / "default" / f"{pod}.yaml"
    text = yaml.safe_load(path.read_text())["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"]
    return {entry["interface"]: entry["name"] for entry in json.loads(text) if entry.get("interface")}


def settles(node: Node, netns: str, pod: str, wanted: dict[str, str]) -> None:
    """Kernel, record and status have these networks by interface, beside the cluster's."""
    links = sorted({"lo", "eth0", *wanted})

    def holds() -> bool:
        line = json.loads((node.cni_dir / "attachments" / "c1.json").read_text().splitlines()[-1])
        if "record" not in line:
            # The DEL of a network runs.
            return False
        record = line["record"]
        on_record = {item["ifname"]: item["name"] for item in record["attachments"] if not item.get("clusterNetwork")}
        status = {name: network for name, network in shown(node, pod).items() if name in wanted or name != "eth0"}
        named = {name: f"default/{network}" for name, network in wanted.items()}
        return node.links(netns) == links and on_record == named and status.items() >= named.items() <= status.items()

    try:
        node.wait_until(holds, f"{wanted} in kernel, record and status", timeout=20)
    except (AssertionError, FileNotFoundError) as error:
        raise AssertionError(f"{wanted}: {node.links(netns)}, {shown(node, pod)}\n{node.log.read_text()}") from error


def run(node: Node, pod: str, networks: str | None) -> str:
    """Start a container of the pod; its namespace."""
    edit(node, pod, networks)
    node.start()
    netns = node.add_netns()
    answer = node.cni("ADD", "c1", netns, pod)
    assert answer.code == 0, answer.stdout
    return netns


@pytest.mark.weak_spot(62)
def test_networks_come_and_go_with_the_annotation(plugged: Node) -> None:
    node = plugged
    before = node.leftovers()
    netns = run(node, "web", "blue")
    settles(node, netns, "web", {"net1": "blue"})
    edit(node, "web", "blue,green@data0")
    settles(node, netns, "web", {"net1": "blue", "data0": "green"})
    assert ping(netns, "10.90.1.1", "data0")
    edit(node, "web", "red,green@data0")
    settles(node, netns, "web", {"net1": "red", "data0": "green"})
    edit(node, "web", "green@data0")
    settles(node, netns, "web", {"data0": "green"})
    node.wait_for_log("NetworkAttached: network default/green, interface data0, is attached")
    node.wait_for_log("NetworkDetached: network default/blue, interface net1, is detached")
    assert node.cni("CHECK", "c1", netns, "web").code == 0
    assert node.cni("DEL", "c1", netns, "web").code == 0
    assert node.links(netns) == ["lo"]
    assert node.leftovers() == before


def test_a_network_under_the_same_interface_name_is_replaced(plugged: Node) -> None:
    node = plugged
    netns = run(node, "web", "blue@data0,red@data1")
    kept = node.ip("link", "show", "data1", netns=netns)[0]["ifindex"]
    edit(node, "web", "red@data1,green@data0")
    settles(node, netns, "web", {"data0": "green", "data1": "red"})
    assert ping(netns, "10.90.1.1", "data0")
    assert node.ip("link", "show", "data1", netns=netns)[0]["ifindex"] == kept


@pytest.mark.parametrize("networks", [None, "", "[]", "not valid@@", '[{"name": "blue"', '["blue"]', "blue@eth0"])
def test_what_asks_for_nothing_detaches_nothing(plugged: Node, networks: str | None) -> None:
    node = plugged
    netns = run(node, "web", "blue")
    settles(node, netns, "web", {"net1": "blue"})
    edit(node, "web", networks)
    edit(node, "other", "green")
    # What is valid is followed after it.
    node.wait_until(lambda: "other" in node.get("/admin/v1/status")[1].decode() or True, "the other is read")
    edit(node, "web", "blue,red")
    settles(node, netns, "web", {"net1": "blue", "net2": "red"})
    assert "NetworkDetached" not in node.log.read_text()


def test_an_empty_list_detaches_all_if_the_pod_says_so(plugged: Node) -> None:
    node = plugged
    netns = run(node, "web", "blue,red")
    edit(node, "web", "[]", **{"multus.io/hotplug": "detach-all"})
    settles(node, netns, "web", {})


def test_a_pod_that_is_left_alone(plugged: Node) -> None:
    node = plugged
    netns = run(node, "web", "blue")
    edit(node, "web", "blue,red", **{"multus.io/hotplug": "false"})
    edit(node, "web", "green", **{"multus.io/hotplug": "false"})
    edit(node, "web", "blue,green")
    settles(node, netns, "web", {"net1": "blue", "net2": "green"})
    assert "default/red" not in node.log.read_text()


def test_a_network_that_is_refused_changes_nothing(plugged: Node) -> None:
    node = plugged
    netns = run(node, "web", "blue")
    edit(node, "web", "green,no-such")
    node.wait_for_log("no-such")
    settles(node, netns, "web", {"net1": "blue"})
    edit(node, "web", "green")
    settles(node, netns, "web", {"net1": "green"})


@pytest.mark.parametrize("labels", [None, {"multus.io/hotplug": "false"}, {"multus.io/hotplug": "true"}])
def test_only_pods_of_labelled_namespaces_are_followed(
    make_node: Callable[..., Node], labels: dict[str, str] | None
) -> None:
    node = make_node(settings={"hotplug": "namespaces"})
    node.ptp("cluster", "10.81.0.0/24")
    node.ptp("blue", "10.90.0.0/24", namespace="default")
    if labels is not None:
        item: dict[str, Any] = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}
        item["metadata"]["labels"] = labels
        (node.manifests / "namespace.yaml").write_text(yaml.safe_dump(item))
    netns = run(node, "web", None)
    edit(node, "web", "blue")
    if labels == {"multus.io/hotplug": "true"}:
        settles(node, netns, "web", {"net1": "blue"})
    else:
        edit(node, "web", "blue,blue@data0")
        node.wait_until(lambda: node.get("/readyz?gates")[0] == 200, "it serves")
        assert node.links(netns) == ["eth0", "lo"]


def test_default_routes_go_and_come_back(plugged: Node) -> None:
    node = plugged
    ipam = {"type": "host-local", "subnet": "10.81.0.0/24", "dataDir": str(node.networks_dir)}
    ipam["routes"] = [{"dst": "0.0.0.0/0"}]  # type: ignore[assignment]
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "ptp", "ipam": ipam})
    netns = run(node, "web", None)

    def gateways() -> list[str]:
        return [route.get("dev", "") for route in node.ip("route", "show", "default", netns=netns)]

    assert gateways() == ["eth0"]

    ip, link = "10.90.0.1", '{"name": "blue", "default-route": ["%s"]}'
    edit(node, "web", f"[{link % ip}]")
    settles(node, netns, "web", {"net1": "blue"})
    assert gateways() == ["net1"]
    node.kill()
    node.start()
    edit(node, "web", "green")
    settles(node, netns, "web", {"net1": "green"})
    assert gateways() == ["eth0"]
    assert node.cni("CHECK", "c1", netns, "web").code == 0


@pytest.mark.parametrize("disturb", soak.DISTURBANCES)
def test_random_changes(disturb: str) -> None:
    """More of them: `python -m tests.soak.annotation`."""
    with soak.prepared("prefer", disturb) as (place, disturbance):
        outcome = soak.run(place, 40, disturbance, seed=random.randrange(1000))
    assert outcome.wrong == [], outcome.summary


def test_what_a_killed_daemon_cut_off_is_done_at_once_by_the_next(plugged: Node) -> None:
    """The annotation asks for the same, and the plugin's binary was killed with the daemon, or not yet begun."""
    node = plugged
    node.plugin("slow", "sleep 600; echo '{}'")
    node.network("slow", {"cniVersion": "1.0.0", "name": "slow", "type": "slow"}, "default")
    netns = run(node, "web", "blue")
    edit(node, "web", "slow,green")
    node.wait_until(lambda: "net2" in node.links(netns), "green is attached while the other is not")
    node.kill()
    node.plugin("slow", "echo '{}'")
    node.start()
    record = node.cni_dir / "attachments" / "c1.json"

    def holds() -> bool:
        items = json.loads(record.read_text().splitlines()[-1]).get("record", {}).get("attachments", ())
        return [item["name"] for item in items if "result" in item][1:] == ["default/slow", "default/green"]

    node.wait_until(holds, "both are attached", timeout=20)
    assert node.links(netns) == ["eth0", "lo", "net2"]
    assert node.cni("CHECK", "c1", netns, "web").code == 0


def test_the_demo() -> None:
    program = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "hotplug.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data0 is there again" in done.stdout
