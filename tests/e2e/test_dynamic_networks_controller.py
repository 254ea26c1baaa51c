"""Scenarios of multus-dynamic-networks-controller: the real one with `/delegate`, and `hotplug` in its place."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest

from multus_daemon import deadlines
from tests.e2e.apiserver import ApiServer
from tests.e2e.dynamic_networks import DynamicNetworksController, program
from tests.e2e.node import Node, ping
from tests.e2e.test_kubernetes import NETWORKS, Cluster
from tests.fakes.cri import FakeRuntime

RUNS: Final = ("multus-dynamic-networks-controller",)
pytest_plugins = ["tests.e2e.kube_fixtures"]


class Plugged:
    """A cluster whose running pods get and lose networks, by whichever program follows their annotations."""

    def __init__(self, cluster: Cluster, runtime: FakeRuntime) -> None:
        self.cluster, self.node, self.runtime = cluster, cluster.node, runtime

    def element(self, name: str, interface: str, **more: Any) -> dict[str, Any]:
        """One network of the annotation; the controller wants an interface in each."""
        return {"name": name, "namespace": self.cluster.namespace, "interface": interface, **more}

    def run(self, pod: str, *elements: dict[str, Any]) -> str:
        """Start a pod; its namespace."""
        self.cluster.pod(pod, json.dumps(elements))
        netns = self.node.add_netns()
        self.runtime.sandboxes[self.cluster.uids[pod]] = (f"c-{pod}", netns)
        answer = self.cluster.cni("ADD", pod, netns)
        assert answer.code == 0, answer.stdout
        self.settles(pod, netns, *elements)
        return netns

    def annotate(self, pod: str, *elements: dict[str, Any]) -> None:
        """Change the annotation of the running pod."""
        path = f"/api/v1/namespaces/{self.cluster.namespace}/pods/{pod}"
        patch = {"metadata": {"annotations": {NETWORKS: json.dumps(elements)}}}
        self.cluster.server.client.merge(path, patch)

    def shown(self, pod: str) -> dict[str, str]:
        """Name of each network in the network-status, by interface."""
        return {entry["interface"]: entry["name"] for entry in self.cluster.status(pod)}

    def settles(self, pod: str, netns: str, *elements: dict[str, Any]) -> None:
        """Kernel and network-status have these networks beside the cluster's."""
        namespace = self.cluster.namespace
        due = {"eth0": f"{namespace}/cluster"}
        due |= {item["interface"]: f"{namespace}/{item['name']}" for item in elements}
        links = sorted({"lo", *due})
        self.node.wait_until(
            lambda: self.node.links(netns) == links and self.shown(pod) == due, f"{due} in kernel and status", 30
        )

    def ends(self, pod: str, netns: str) -> None:
        """DEL; nothing is left of the pod."""
        answer = self.cluster.cni("DEL", pod, netns)
        assert answer.code == 0, answer.stdout
        assert self.node.links(netns) == ["lo"]
        assert self.node.leftovers() == []


@pytest.fixture
def make(api_server: ApiServer, api_namespace: str, make_node: Callable[..., Node]) -> Iterator[Callable[..., Plugged]]:
    """Start a daemon with these settings, and the controller if it is asked for."""
    with ExitStack() as stack:

        def made(*, controller: bool, **settings: Any) -> Plugged:
            if controller:
                program()
            cluster = Cluster(api_server, make_node(standalone=False, settings=settings), api_namespace)
            cluster.prepare()
            for number, name in enumerate(("blue", "green", "red"), 86):
                cluster.network(name, f"10.{number}.0.0/24")
            stack.enter_context(api_server.reachable_in(cluster.node.host))
            stack.callback(cluster.node.kill)
            runtime = stack.enter_context(FakeRuntime(cluster.node.root / "cri.sock"))
            cluster.node.start()
            if controller:
                program_of_node = DynamicNetworksController(api_server, cluster.node, runtime.socket).process
                program_of_node.start()
                stack.callback(program_of_node.stop)
            return Plugged(cluster, runtime)

        yield made


@pytest.fixture(params=["controller", "daemon"])
def plugged(request: pytest.FixtureRequest, make: Callable[..., Plugged]) -> Plugged:
    """Annotations are followed by the controller, or by our daemon alone."""
    if request.param == "controller":
        return make(controller=True)
    return make(controller=False, hotplug="on")


def test_a_network_is_attached_and_detached(plugged: Plugged) -> None:
    blue, green = plugged.element("blue", "net1"), plugged.element("green", "net2")
    netns = plugged.run("web", blue)
    kept = plugged.node.ip("link", "show", "net1", netns=netns)[0]["ifindex"]
    plugged.annotate("web", blue, green)
    plugged.settles("web", netns, blue, green)
    assert ping(netns, "10.87.0.1", "net2")
    plugged.annotate("web", blue)
    plugged.settles("web", netns, blue)
    assert plugged.node.ip("link", "show", "net1", netns=netns)[0]["ifindex"] == kept
    plugged.ends("web", netns)


def test_two_networks_are_attached_at_once_and_go_with_the_pod(plugged: Plugged) -> None:
    elements = [plugged.element(name, f"data{number}") for number, name in enumerate(("blue", "green", "red"))]
    netns = plugged.run("web", elements[0])
    plugged.annotate("web", *elements)
    plugged.settles("web", netns, *elements)
    for number in (87, 88):
        assert ping(netns, f"10.{number}.0.1")
    plugged.ends("web", netns)


def test_one_network_takes_the_place_of_another(plugged: Plugged) -> None:
    blue, green = plugged.element("blue", "net1"), plugged.element("green", "net2")
    netns = plugged.run("web", blue)
    plugged.annotate("web", green)
    plugged.settles("web", netns, green)
    plugged.ends("web", netns)


def test_the_mac_address_that_is_asked_for_is_given(plugged: Plugged) -> None:
    definition = {
        "cniVersion": "1.0.0",
        "name": "fixed",
        "type": "bridge",
        "bridge": "fixed0",
        "capabilities": {"mac": True, "ips": True},
        "ipam": {"type": "static"},
    }
    plugged.cluster.definition("fixed", json.dumps(definition))
    fixed = plugged.element("fixed", "data0", mac="02:00:00:00:86:01", ips=["10.99.0.7/24"])
    blue = plugged.element("blue", "net1")
    netns = plugged.run("web", blue)
    plugged.annotate("web", blue, fixed)
    plugged.settles("web", netns, blue, fixed)
    (link,) = plugged.node.ip("address", "show", "data0", netns=netns)
    assert link["address"] == "02:00:00:00:86:01"
    assert [item["local"] for item in link["addr_info"] if item["family"] == "inet"] == ["10.99.0.7"]
    plugged.annotate("web", blue)
    plugged.settles("web", netns, blue)
    plugged.ends("web", netns)


def test_a_network_that_fails_is_undone_and_the_others_stay(plugged: Plugged) -> None:
    plugged.cluster.definition("bad", json.dumps({"cniVersion": "1.0.0", "name": "bad", "type": "no-such-plugin"}))
    blue, bad = plugged.element("blue", "net1"), plugged.element("bad", "net2")
    netns = plugged.run("web", blue)
    held = plugged.node.leftovers()
    plugged.annotate("web", blue, bad)
    events = plugged.cluster.events
    plugged.node.wait_until(
        lambda: any(item["reason"] == "FailedAddingInterface" for item in events("web")), "an Event says so", 30
    )
    assert plugged.node.links(netns) == ["eth0", "lo", "net1"]
    assert plugged.node.leftovers() == held
    assert ping(netns, "10.86.0.1")
    plugged.annotate("web", blue)
    plugged.settles("web", netns, blue)
    plugged.ends("web", netns)


def controllers_pod(cluster: Cluster) -> None:
    """The pod of the controller's DaemonSet on the node, as its manifest has it, but for what an image needs."""
    volume = {"name": "multus-server-socket", "hostPath": {"path": "/run/multus/multus.sock", "type": "Socket"}}
    name = "dynamic-networks-controller-ds-x7k2p"
    cluster.server.create_pod(name, namespace=cluster.namespace, node=cluster.name, volumes=[volume])


def test_the_daemon_steps_back_while_the_controller_is_on_the_node_and_says_so(make: Callable[..., Plugged]) -> None:
    plugged = make(controller=False, hotplug="on")
    blue, green = plugged.element("blue", "net1"), plugged.element("green", "net2")
    netns = plugged.run("web", blue)
    controllers_pod(plugged.cluster)
    pods = f"/api/v1/namespaces/{plugged.cluster.namespace}/pods"
    plugged.annotate("web", blue, green)
    plugged.node.wait_for_log("annotations are not followed (hotplug)")
    # By then the first comparison of the new pod is over.
    time.sleep(1.5 * deadlines.KEEP_YOUNG_SECONDS)
    assert plugged.node.links(netns) == ["eth0", "lo", "net1"]
    plugged.cluster.server.request("DELETE", f"{pods}/dynamic-networks-controller-ds-x7k2p", gracePeriodSeconds=0)
    plugged.settles("web", netns, blue, green)
    plugged.node.wait_for_log("this daemon follows the annotations of pods again")
    plugged.ends("web", netns)


def test_both_together_attach_once(make: Callable[..., Plugged]) -> None:
    plugged = make(controller=True, hotplug="on")
    controllers_pod(plugged.cluster)
    blue, green = plugged.element("blue", "net1"), plugged.element("green", "net2")
    netns = plugged.run("web", blue)
    plugged.annotate("web", blue, green)
    plugged.settles("web", netns, blue, green)
    # Only the controller's have this reason.
    events = plugged.cluster.events
    plugged.node.wait_until(
        lambda: any("net2" in item["message"] and item["reason"] == "AddedInterface" for item in events("web")),
        "the controller's Event",
    )
    assert "NetworkAttached" not in {item["reason"] for item in events("web")}
    plugged.annotate("web", blue)
    plugged.settles("web", netns, blue)
    plugged.ends("web", netns)


def test_kubevirts_sequence(make: Callable[..., Plugged]) -> None:
    """virt-controller plugs an interface into a virt-launcher pod, waits for the network-status, and takes it out.

    The names are a hash of the network's name in the VirtualMachineInstance (VEP 140).
    """
    plugged = make(controller=False, hotplug="on")
    blue = plugged.element("blue", "pod16477688c0e")
    red = plugged.element("red", "podb1f51a511f1", mac="02:00:00:00:88:01")
    definition = {"cniVersion": "1.0.0", "type": "bridge", "bridge": "br-red", "capabilities": {"mac": True}}
    plugged.cluster.definition("red", json.dumps({**definition, "name": "red"}))
    netns = plugged.run("virt-launcher-vm1-abcde", blue)
    pod = "virt-launcher-vm1-abcde"
    plugged.annotate(pod, blue, red)
    plugged.settles(pod, netns, blue, red)
    (entry,) = [item for item in plugged.cluster.status(pod) if item["interface"] == "podb1f51a511f1"]
    assert entry["mac"] == "02:00:00:00:88:01"
    assert plugged.node.ip("link", "show", "podb1f51a511f1", netns=netns)[0]["address"] == entry["mac"]
    plugged.annotate(pod, blue)
    plugged.settles(pod, netns, blue)
    plugged.annotate(pod, blue, red)
    plugged.settles(pod, netns, blue, red)
    plugged.ends(pod, netns)
