"""The runtime's view of a node without a cluster: shim, daemon, built-in and reference plugins, real namespaces."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.e2e.node import Node, ping
from tests.programs import needed


def status_of(node: Node, pod: str) -> list[dict[str, object]]:
    text = (node.manifests / "status" / "default" / f"{pod}.yaml").read_text()
    annotations = yaml.safe_load(text)["metadata"]["annotations"]
    status: list[dict[str, object]] = json.loads(annotations["k8s.v1.cni.cncf.io/network-status"])
    return status


def addresses(node: Node, netns: str) -> list[tuple[object, ...]]:
    """Every link with its MAC and its IPv4 addresses; link-local IPv6 comes and settles by itself."""
    return [
        (link["ifname"], link["address"], [item["local"] for item in link["addr_info"] if item["family"] == "inet"])
        for link in node.ip("address", netns=netns)
    ]


@pytest.mark.conformance("server-8", "pods-18")
def test_a_pod_gets_three_networks_and_leaves_nothing(node: Node) -> None:
    node.ptp("storage", "10.81.1.0/24", namespace="default")
    node.ptp("metrics", "10.81.2.0/24", namespace="default")
    node.pod("hello", "storage,metrics@probe0")
    node.start()
    before = node.links()
    netns = node.add_netns()

    added = node.cni("ADD", "c1", netns, "hello")
    assert added.code == 0, added.stdout
    assert added.json["cniVersion"] == "1.0.0"
    assert [item["name"] for item in added.json["interfaces"] if "sandbox" in item] == ["eth0"]
    assert set(node.links(netns)) == {"lo", "eth0", "net1", "probe0"}
    assert [(item["name"], item["interface"], item.get("default", False)) for item in status_of(node, "hello")] == [
        ("kube-system/cluster", "eth0", True),
        ("default/storage", "net1", False),
        ("default/metrics", "probe0", False),
    ]
    for ifname, gateway in (("eth0", "10.81.0.1"), ("net1", "10.81.1.1"), ("probe0", "10.81.2.1")):
        assert ping(netns, gateway, ifname)
    assert node.cni("CHECK", "c1", netns, "hello").code == 0

    deleted = node.cni("DEL", "c1", netns, "hello")
    assert (deleted.code, deleted.stdout) == (0, b"")
    assert node.links(netns) == ["lo"]
    assert node.links() == before
    assert node.leftovers() == []
    assert node.cni("DEL", "c1", netns, "hello").code == 0, "DEL can be repeated"


@pytest.mark.npwg("3.2c")
@pytest.mark.conformance("verbs-15")
def test_the_reference_plugins_as_single_conf_and_as_list_with_portmap(
    make_node: Callable[..., Node], reference: Path
) -> None:
    node = make_node(settings={"binDir": str(reference), "builtinPlugins": "off"})
    ipam = {"type": "host-local", "subnet": "10.82.0.0/24", "dataDir": str(node.networks_dir)}
    node.network(
        "cluster",
        {
            "cniVersion": "1.0.0",
            "name": "cluster",
            "plugins": [
                {"type": "bridge", "bridge": "mb0", "isGateway": True, "ipMasq": False, "ipam": ipam},
                {"type": "portmap", "capabilities": {"portMappings": True}, "snat": False},
            ],
        },
    )
    node.ptp("storage", "10.82.1.0/24", namespace="default")
    node.pod("hello", "storage")
    node.start()
    netns = node.add_netns()
    config = json.loads(node.stdin)
    mapping = {"hostPort": 18099, "containerPort": 80, "protocol": "tcp"}
    config |= {"capabilities": {"portMappings": True}, "runtimeConfig": {"portMappings": [mapping]}}
    stdin = json.dumps(config).encode()
    added = node.cni("ADD", "c1", netns, "hello", stdin=stdin)
    assert added.code == 0, added.stdout
    assert set(node.links(netns)) == {"lo", "eth0", "net1"}
    assert ping(netns, "10.82.0.1", "eth0")
    assert ping(netns, "10.82.1.1", "net1")
    assert "18099" in nat_rules(node)
    assert node.cni("DEL", "c1", netns, "hello", stdin=stdin).code == 0
    assert node.links(netns) == ["lo"]
    assert "18099" not in nat_rules(node)
    # portmap 1.1.1 looks for the IPv4 rule among those for IPv6 too, so its CHECK fails wherever it mapped a port.
    assert node.cni("ADD", "c2", netns, "hello").code == 0
    assert node.cni("CHECK", "c2", netns, "hello").code == 0
    assert node.cni("DEL", "c2", netns, "hello").code == 0
    assert node.leftovers() == []


def nat_rules(node: Node) -> str:
    command = [needed("ip"), "netns", "exec", Path(node.host).name, "iptables", "-t", "nat", "-S"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.weak_spot(29)
def test_the_socket_is_private_and_its_directory_is_left_alone(node: Node) -> None:
    node.socket.parent.mkdir(mode=0o755)
    foreign = node.socket.parent / "kubeconfig"
    foreign.write_text("not ours")
    node.start()
    assert stat.S_IMODE(node.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(node.socket.parent.stat().st_mode) == 0o700
    assert foreign.read_text() == "not ours"
    node.kill()
    assert node.socket.exists(), "a killed daemon leaves its socket"
    node.start()
    assert node.stop() == 0
    assert not node.socket.exists()
    assert foreign.exists()


def test_metrics_tell_of_verbs_and_delegates(make_node: Callable[..., Node]) -> None:
    node = make_node(settings={"metricsPort": 9900})
    node.ptp("cluster", "10.81.0.0/24")
    node.pod("hello")
    node.start()
    for container in ("c0", "c1"):
        assert node.cni("ADD", container, node.add_netns(), "hello").code == 0
    node.get("/healthz")
    text = node.metrics(9900)
    assert 'multus_server_request_total{code="200",handler="/cni",method="post"} 2.0' in text
    assert 'multus_server_request_total{code="200",handler="/healthz",method="get"} 1.0' in text
    assert 'multus_cni_request_duration_seconds_count{outcome="success",verb="ADD"} 2.0' in text
    for plugin in ("ptp", "host-local"):
        assert f'multus_plugin_duration_seconds_count{{outcome="success",plugin="{plugin}",verb="ADD"}} 2.0' in text
    for stage in ("queue", "record", "gather", "plan", "plugin", "keep", "publish"):
        assert f'multus_cni_stage_duration_seconds_count{{stage="{stage}",verb="ADD"}} 2.0' in text
    network = 'network="kube-system/cluster"'
    assert f'multus_network_add_duration_seconds_count{{{network},outcome="success"}} 2.0' in text
    assert f"multus_attachments{{{network}}} 2.0" in text
    # 254 addresses, of which one is the gateway's.
    assert f"multus_ipam_used_ratio{{{network}}} {2 / 253!r}" in text
    for condition in ("socket", "manifests"):
        assert f'multus_ready{{condition="{condition}"}} 1.0' in text


def test_a_built_in_comes_before_a_binary_and_the_log_says_so(node: Node) -> None:
    node.plugin("ptp", "exit 1")
    node.plugin("vendor", "exit 1")
    node.pod("hello")
    node.start()
    assert node.cni("ADD", "c1", node.add_netns(), "hello").code == 0
    node.wait_for_log("builtinPlugins is prefer")
    (line,) = [line for line in node.log.read_text().splitlines() if "builtinPlugins is prefer" in line]
    assert line.endswith(str(node.bin_dir / "ptp"))


def test_plugins_get_those_variables_of_the_daemon_that_are_named(node: Node) -> None:
    node.settings |= {"builtinPlugins": "off", "pluginEnv": ["VENDOR_MODE", "PATH", "NOT_SET"]}
    # A comparison by the daemon itself runs CHECK, too.
    node.settings["keep"] = "off"
    node.wrapper = ("env", "VENDOR_MODE=fast", "VENDOR_SECRET=s", f"PATH=/mine:{os.environ['PATH']}")
    node.plugin("noop", f"env >{node.root}/env; echo '{{}}'")
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "noop"})
    node.pod("hello")
    node.start()
    assert node.cni("ADD", "c1", node.add_netns(), "hello").code == 0
    found = dict(line.partition("=")[::2] for line in (node.root / "env").read_text().splitlines())
    assert (found["VENDOR_MODE"], found["LC_ALL"], found["CNI_COMMAND"]) == ("fast", "C", "ADD")
    assert found["PATH"].startswith("/mine:")
    assert "VENDOR_SECRET" not in found
    node.wait_for_log(
        "pluginEnv: these variables are not set in the daemon's environment, so plugins do not get them: NOT_SET"
    )
