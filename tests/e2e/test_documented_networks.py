"""Every example of the documentation with a network or a pod does what the page says.

A page's YAML blocks are the manifests of a standalone daemon, unchanged, and `multusctl sandbox` plays the runtime for
each pod. What needs hardware, a kernel module or a controller has `<!-- explain: WHAT -->` above it: `multusctl
explain` plans it then, with a program of the plugin's name on the node, which is never run.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from multus_daemon.spec.nad import selection
from tests.e2e.node import Node
from tests.fakes.kubelet import FakeKubelet, container
from tests.programs import needed, require

ROOT: Final = Path(__file__).resolve().parents[2]
NETWORKS: Final = "docs/networks.md"
WITH_NETWORKS: Final = "NetworkAttachmentDefinition"
BLOCK: Final = re.compile(r"(?m)^(?:<!-- explain: (?P<needs>.+) -->\n)?```yaml\n(?P<text>(?:.*\n)*?)```$")
CLUSTER_SUBNET: Final = "10.9.0.0/24"


@dataclass(frozen=True)
class Example:
    """A pod, or a workload with a template, in a block of a page."""

    page: str
    name: str
    block: str
    needs: str
    """Requirement that a test machine lacks; empty if the example can run."""

    def __str__(self) -> str:
        return f"{self.page}-{self.name}"


def blocks(page: str) -> list[tuple[str, list[dict[str, Any]], str]]:
    """Text, objects and need of each YAML block that is meant for a cluster's networks."""
    found = [(match["text"], match["needs"] or "") for match in BLOCK.finditer((ROOT / page).read_text())]
    # Some are parts of objects: a patch, a list of rules.
    read = [
        (text, [item for item in yaml.safe_load_all(text) if isinstance(item, dict)], needs) for text, needs in found
    ]
    return [
        (text, items, needs) for text, items, needs in read if any(is_network(item) or is_pod(item) for item in items)
    ]


def is_network(item: dict[str, Any]) -> bool:
    return item.get("kind") == WITH_NETWORKS


def is_pod(item: dict[str, Any]) -> bool:
    return item.get("kind") in ("Pod", "Deployment")


PAGES: Final = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    if blocks(str(path.relative_to(ROOT)))
]
EXAMPLES: Final = [
    Example(page, item["metadata"]["name"], text, needs)
    for page in PAGES
    for text, items, needs in blocks(page)
    for item in items
    if is_pod(item)
]


def in_subnet(subnet: str) -> Callable[[list[str]], bool]:
    network = ipaddress.ip_network(subnet)
    return lambda found: len(found) == 1 and ipaddress.ip_interface(found[0]).ip in network


def exactly(*addresses: str) -> Callable[[list[str]], bool]:
    return lambda found: sorted(found) == sorted(addresses)


@dataclass(frozen=True)
class Expected:
    """Expected networks of a running pod."""

    interfaces: dict[str, Callable[[list[str]], bool]]
    """The additional ones, and what their addresses are like."""
    macs: dict[str, str] = field(default_factory=dict)
    eth0: str = CLUSTER_SUBNET
    default_route: tuple[str, str] | None = None
    """Interface and gateway, where it is not the cluster network's."""
    rule: str = ""
    """A word of a rule of iptables on the node."""


LEFT: Final = in_subnet("10.10.2.0/24")
RUN: Final = {
    ("README.md", "hello"): Expected({"net1": in_subnet("10.10.1.0/24")}),
    (NETWORKS, "first"): Expected({"net1": in_subnet("10.10.1.0/24")}),
    (NETWORKS, "short"): Expected({"net1": LEFT, "data0": in_subnet("10.10.3.0/24"), "net3": LEFT}),
    (NETWORKS, "namespace"): Expected({"net1": in_subnet("10.10.4.0/24")}),
    (NETWORKS, "interface"): Expected({"video0": in_subnet("10.10.5.0/24")}),
    (NETWORKS, "ips"): Expected({"net1": exactly("10.10.6.20/24", "fd10:6::20/64")}),
    (NETWORKS, "mac"): Expected({"net1": in_subnet("10.10.7.0/24")}, {"net1": "02:23:45:67:89:01"}),
    (NETWORKS, "port-mappings"): Expected({"net1": in_subnet("10.10.8.0/24")}, rule="18080"),
    (NETWORKS, "cni-args"): Expected({"net1": exactly("10.10.10.77/24")}, {"net1": "02:00:0a:0a:0a:4d"}),
    (NETWORKS, "default-route"): Expected({"net1": in_subnet("10.10.11.0/24")}, default_route=("net1", "10.10.11.1")),
    (NETWORKS, "default-network"): Expected({}, eth0="10.10.13.0/24", default_route=("eth0", "10.10.13.1")),
    (NETWORKS, "status"): Expected(
        {"net1": exactly("10.10.15.20/24")}, {"net1": "02:00:0a:0a:0f:14"}, default_route=("net1", "10.10.15.1")
    ),
}
# The plugin whose configuration shows it, and what it has to have.
EXPLAINED: Final[dict[tuple[str, str], tuple[str, dict[str, Any]]]] = {
    (NETWORKS, "infiniband-guid"): (
        "ib-sriov",
        {"runtimeConfig": {"infinibandGUID": "c2:11:22:33:44:55:66:77"}, "deviceID": "0000:3b:00.2"},
    ),
    (NETWORKS, "bandwidth"): (
        "bandwidth",
        {
            "runtimeConfig": {
                "bandwidth": {
                    "ingressRate": 10000000,
                    "ingressBurst": 1000000,
                    "egressRate": 5000000,
                    "egressBurst": 500000,
                }
            }
        },
    ),
    (NETWORKS, "device-id"): (
        "host-device",
        {
            "runtimeConfig": {"deviceID": "0000:3b:02.1"},
            "deviceID": "0000:3b:02.1",
            "pciBusID": "0000:3b:02.1",
        },
    ),
    (NETWORKS, "ipam-claim-reference"): ("ovn-k8s-cni-overlay", {"netAttachDefName": "default/tenant"}),
    (NETWORKS, "resource-name"): ("sriov", {"deviceID": "0000:3b:02.2", "pciBusID": "0000:3b:02.2", "vlan": 100}),
}
# Programs that `explain` must find. None of them is run.
STAND_INS: Final = ("ib-sriov", "host-device", "ovn-k8s-cni-overlay", "sriov")


def test_every_example_is_expected_to_do_something() -> None:
    named = [(example.page, example.name) for example in EXAMPLES]
    assert len(named) == len(set(named)), "each pod of a page has a name of its own"
    assert {(item.page, item.name) for item in EXAMPLES if not item.needs} == RUN.keys()
    assert {(item.page, item.name) for item in EXAMPLES if item.needs} == EXPLAINED.keys()


class Cluster:
    """A standalone daemon with the manifests of one page."""

    def __init__(self, node: Node, page: str) -> None:
        self.node = node
        for number, (text, _, _) in enumerate(blocks(page)):
            (node.manifests / f"{number}.yaml").write_text(text)

    def multusctl(self, *words: str) -> dict[str, Any]:
        """On the node, outside the daemon's container, as a runtime. The JSON object of the answer."""
        inside = [needed("nsenter"), f"--net={self.node.host}"]
        command = [sys.executable, "-m", "multus_tools.ctl", *words, "--config", str(self.node.config), "--json"]
        done = subprocess.run([*inside, *command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr or done.stdout
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def sandbox(self, verb: str, name: str) -> dict[str, Any]:
        root = self.node.root
        places = {"--standalone": self.node.manifests, "--state-dir": root / "state", "--netns-dir": root / "netns"}
        words = [str(word) for option in places.items() for word in option]
        return self.multusctl("sandbox", verb, f"default/{name}", *words)


@contextlib.contextmanager
def shared(directory: Path) -> Iterator[None]:
    """Make a directory whose mounts the daemon sees when they are made later, as /run/netns is one."""
    directory.mkdir()
    subprocess.run(["mount", "--bind", directory, directory], check=True)
    subprocess.run(["mount", "--make-shared", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", directory], check=True)


@pytest.fixture(scope="module", params=PAGES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The daemon's /var/lib/cni, host-local's usual place, is its own and goes with its mount namespace."""
    require("nsenter")
    fresh = "mkdir -p /var/lib/cni && mount -t tmpfs tmpfs /var/lib/cni"
    with Node(preparation=fresh) as node, shared(node.root / "netns"), FakeKubelet(node.root / "kubelet") as kubelet:
        node.settings["kubeletDir"] = str(node.root / "kubelet")
        kubelet.add("resource-name", container("app", {"example.com/fast": ["0000:3b:02.2"]}), namespace="default")
        routes = [{"dst": "0.0.0.0/0"}]
        ipam = {"type": "host-local", "subnet": CLUSTER_SUBNET, "dataDir": str(node.networks_dir), "routes": routes}
        node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "ptp", "ipam": ipam})
        for name in STAND_INS:
            node.plugin(name, "exit 1")
        made = Cluster(node, request.param)
        node.start()
        yield made


def addresses(interface: dict[str, Any]) -> list[str]:
    """Without those that the kernel gives by itself."""
    return [item for item in interface["addresses"] if not ipaddress.ip_interface(item).is_link_local]


def rules(node: Node) -> str:
    command = [needed("ip"), "netns", "exec", Path(node.host).name, "iptables", "-t", "nat", "-S"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def of_page(examples: list[Example], *, explained: bool) -> list[Any]:
    """Each with its page for the fixture, so that one daemon serves a page."""
    return [pytest.param(item.page, item, id=str(item)) for item in examples if bool(item.needs) is explained]


@pytest.mark.parametrize(("cluster", "example"), of_page(EXAMPLES, explained=False), indirect=["cluster"])
def test_a_pod_has_what_the_page_says(cluster: Cluster, example: Example, reference: Path) -> None:
    expected = RUN[example.page, example.name]
    for plugin in ("portmap",) if expected.rule else ():
        if not (reference / plugin).exists():
            pytest.skip(f"needs the reference plugin {plugin}: apt-get install containernetworking-plugins")
        shutil.copy(reference / plugin, cluster.node.bin_dir)
    up = cluster.sandbox("up", example.name)
    try:
        found = {item["name"]: item for item in up["pod"]["interfaces"]}
        assert found.keys() == {"eth0", *expected.interfaces}
        assert in_subnet(expected.eth0)(addresses(found["eth0"]))
        for name, fits in expected.interfaces.items():
            assert fits(addresses(found[name])), (name, found[name])
        assert {name: found[name]["mac"] for name in expected.macs} == expected.macs
        default = [(item["interface"], item["gw"]) for item in up["pod"]["routes"] if item["dst"] == "0.0.0.0/0"]
        assert default == [expected.default_route or ("eth0", "10.9.0.1")]
        assert {item["interface"] for item in up["networkStatus"]} == found.keys()
        assert expected.rule in rules(cluster.node)
        # portmap 1.1.1 looks for the IPv4 rule among those for IPv6 too, so its CHECK fails wherever it mapped a port.
        if not expected.rule:
            cluster.sandbox("check", example.name)
    finally:
        cluster.sandbox("down", example.name)
    assert not expected.rule or expected.rule not in rules(cluster.node)
    assert cluster.node.leftovers() == []


@pytest.mark.parametrize(("cluster", "example"), of_page(EXAMPLES, explained=True), indirect=["cluster"])
def test_what_needs_more_than_a_kernel_is_planned_as_the_page_says(cluster: Cluster, example: Example) -> None:
    plugin, due = EXPLAINED[example.page, example.name]
    file = cluster.node.root / f"{example.name}.yaml"
    file.write_text(example.block)
    answer = cluster.multusctl("explain", "--file", str(file))
    assert answer["problem"] == ""
    own, network = answer["networks"]
    assert (own["network"], own["interface"], network["interface"]) == ("kube-system/cluster", "eth0", "net1")
    assert network["unsupported"] == []
    (config,) = [item["config"] for item in network["plugins"] if item["type"] == plugin]
    assert {key: config.get(key) for key in due} == due


@pytest.mark.parametrize("cluster", [NETWORKS], indirect=True)
def test_the_status_is_the_one_on_the_page(cluster: Cluster) -> None:
    text = (ROOT / NETWORKS).read_text()
    ((name, shown),) = re.findall(r"<!-- status: (\S+) -->\n```json\n((?:.*\n)*?)```", text)
    up = cluster.sandbox("up", name)
    cluster.sandbox("down", name)
    own, *others = up["networkStatus"]
    own_shown, *others_shown = json.loads(shown)
    assert others == others_shown
    # The address and the hardware address of the first interface are drawn.
    assert own | {"ips": [], "mac": ""} == own_shown | {"ips": [], "mac": ""}


def test_every_key_of_the_annotation_has_its_example() -> None:
    """This test covers the keys of the specification. The other two forms of the annotation have their own examples."""
    documented = set(re.findall(r"(?m)^\| \[`([\w-]+)`\]", (ROOT / NETWORKS).read_text()))
    assert documented == set(selection.KEYS) - {"interfaceRequest"}
    used: set[str] = set()
    for example in EXAMPLES:
        if example.page != NETWORKS:
            continue
        for item in yaml.safe_load_all(example.block):
            annotation = item["metadata"].get("annotations", {}).get(selection.NETWORKS_ANNOTATION, "")
            used |= {key for element in json.loads(annotation) for key in element} if "{" in annotation else set()
    assert used == documented
