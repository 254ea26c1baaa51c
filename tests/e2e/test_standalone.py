"""The runtime's view of a node without a cluster: shim, daemon, built-in and reference plugins, real namespaces."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


@pytest.mark.weak_spot(5)
def test_check_finds_what_is_missing(node: Node) -> None:
    node.ptp("storage", "10.81.1.0/24", namespace="default")
    node.pod("hello", "storage")
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    node.ip("link", "delete", "net1", netns=netns)
    answer = node.cni("CHECK", "c1", netns, "hello")
    assert answer.code == 1
    assert "net1" in answer.json["msg"]
    assert "default/storage" in answer.json["msg"]


def test_check_of_an_unknown_container_is_code_3(node: Node) -> None:
    node.pod("hello")
    node.start()
    answer = node.cni("CHECK", "c1", node.add_netns(), "hello")
    assert (answer.code, answer.json["code"]) == (1, 3)


@pytest.mark.weak_spot(6)
def test_a_repeated_add_returns_the_stored_result_and_destroys_nothing(node: Node) -> None:
    node.ptp("storage", "10.81.1.0/24", namespace="default")
    node.pod("hello", "storage")
    node.start()
    netns = node.add_netns()
    first = node.cni("ADD", "c1", netns, "hello")
    links = addresses(node, netns)
    second = node.cni("ADD", "c1", netns, "hello")
    assert (first.code, second.code) == (0, 0)
    assert second.stdout == first.stdout
    assert addresses(node, netns) == links
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert node.leftovers() == []


@pytest.mark.npwg("7.2a")
def test_one_network_fails_and_all_are_undone_with_the_cause_first(node: Node) -> None:
    node.ptp("storage", "10.81.1.0/24", namespace="default")
    node.ptp("full", "10.81.3.0/30", namespace="default")
    node.pod("one", "full")
    node.pod("two", "storage,full")
    node.start()
    before = node.links()
    assert node.cni("ADD", "c1", node.add_netns(), "one").code == 0
    between, held = node.links(), node.leftovers()
    netns = node.add_netns()
    answer = node.cni("ADD", "c2", netns, "two")
    assert answer.code == 1
    assert "no IP addresses available" in answer.json["msg"]
    assert "default/full" in answer.json["msg"]
    assert "default/two" in answer.json["msg"]
    assert node.links(netns) == ["lo"]
    assert node.links() == between
    assert node.links() != before
    assert node.leftovers() == held


@pytest.mark.parametrize(
    ("networks", "words"),
    [
        ("nope", ["default/nope", "does not exist"]),
        ("[null]", ["null"]),
        ('[{"name": 7}]', ["name", "string"]),
        ("broken", ["default/broken"]),
        ("typeless", ["default/typeless", "type"]),
        ("unknown-plugin", ["no-such-plugin"]),
        ("storage@eth0", ["eth0", "taken"]),
        ("storage@averyveryverylongname", ["averyveryverylongname", "too long"]),
    ],
)
def test_bad_requests_name_the_cause_and_attach_nothing(node: Node, networks: str, words: list[str]) -> None:
    node.ptp("storage", "10.81.1.0/24", namespace="default")
    node.network("broken", "{", "default")
    node.network("typeless", {"cniVersion": "1.0.0", "name": "typeless"}, "default")
    node.network("unknown-plugin", {"cniVersion": "1.0.0", "name": "x", "type": "no-such-plugin"}, "default")
    node.pod("bad", networks)
    node.start()
    before = node.links()
    netns = node.add_netns()
    answer = node.cni("ADD", "c1", netns, "bad")
    assert answer.code == 1
    text = answer.json["msg"] + answer.json.get("details", "")
    assert all(word in text for word in words), text
    assert "default/bad" in text
    assert (node.links(netns), node.links(), node.leftovers()) == (["lo"], before, [])
    assert node.get("/healthz")[0] == 200


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


@pytest.mark.conformance("e2e-1")
def test_a_pod_declared_just_now_is_known(node: Node) -> None:
    node.start()
    node.pod("late")
    assert node.cni("ADD", "c1", node.add_netns(), "late").code == 0


def test_a_pod_that_is_not_declared_is_refused_with_its_name(node: Node) -> None:
    node.start()
    netns = node.add_netns()
    answer = node.cni("ADD", "c1", netns, "ghost")
    assert (answer.code, answer.json["code"]) == (1, 11)
    assert answer.json["msg"].startswith("pod default/ghost is not known")
    assert node.links(netns) == ["lo"]


@pytest.mark.parametrize("version", ["0.2.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_the_result_has_the_version_that_the_runtime_asked_for(make_node: Callable[..., Node], version: str) -> None:
    node = make_node(cni_version=version)
    node.ptp("cluster", "10.81.0.0/24", cniVersion="0.4.0")
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    answer = node.cni("ADD", "c1", netns, "hello")
    assert answer.code == 0, answer.stdout
    assert answer.json["cniVersion"] == version
    address = answer.json["ip4"]["ip"] if version == "0.2.0" else answer.json["ips"][0]["address"]
    assert address == "10.81.0.2/24"
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert node.leftovers() == []


def test_a_del_without_a_daemon_is_spooled_and_succeeds(node: Node) -> None:
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    node.kill()
    answer = node.cni("DEL", "c1", netns, "hello")
    assert (answer.code, answer.stdout) == (0, b"")
    (spooled,) = (node.cni_dir / "spool").iterdir()
    assert json.loads(spooled.read_bytes())["env"]["CNI_CONTAINERID"] == "c1"


@pytest.mark.weak_spot(3)
def test_a_spooled_del_is_replayed_when_the_daemon_is_back(node: Node) -> None:
    node.pod("hello")
    node.start()
    before = node.links()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    node.kill()
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert "eth0" in node.links(netns)
    node.start()
    node.wait_until(lambda: not node.leftovers(), "the spool, the record and the address are gone")
    assert (node.links(netns), node.links()) == (["lo"], before)


@pytest.mark.weak_spot(41)
def test_a_stopping_daemon_finishes_what_runs(node: Node) -> None:
    node.plugin("slow", "sleep 0.5; echo '{}'")
    node.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "type": "slow"})
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    with ThreadPoolExecutor() as pool:
        adding = pool.submit(node.cni, "ADD", "c1", netns, "hello")
        node.wait_until(lambda: (node.cni_dir / "attachments" / "c1.json").exists(), "the ADD has begun")
        assert node.stop() == 0
        assert adding.result().code == 0


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


@pytest.mark.parametrize(
    ("setting", "keys"),
    [("fallback", {}), ("off", {}), ("prefer", {"vendorKey": 5})],
    ids=["fallback", "off", "prefer-unknown-key"],
)
def test_a_binary_comes_before_the_built_in_of_its_name(
    make_node: Callable[..., Node], setting: str, keys: dict[str, Any]
) -> None:
    node = make_node(settings={"builtinPlugins": setting})
    node.plugin("host-local", "exit 1")
    node.ptp("cluster", "10.81.0.0/24", **keys)
    node.plugin("ptp", """echo '{"code": 117, "msg": "the binary was asked"}'; exit 1""")
    node.pod("hello")
    node.start()
    answer = node.cni("ADD", "c1", node.add_netns(), "hello")
    assert (answer.code, answer.json["code"]) == (1, 117)
    assert answer.json["msg"].startswith("the binary was asked")


def test_a_built_in_comes_before_a_binary_and_the_log_says_so(node: Node) -> None:
    node.plugin("ptp", "exit 1")
    node.plugin("vendor", "exit 1")
    node.pod("hello")
    node.start()
    assert node.cni("ADD", "c1", node.add_netns(), "hello").code == 0
    node.wait_for_log("builtinPlugins: prefer")
    (line,) = [line for line in node.log.read_text().splitlines() if "builtinPlugins: prefer" in line]
    assert line.endswith(str(node.bin_dir / "ptp"))


def test_the_binary_of_an_excepted_type_comes_first(node: Node, reference: Path) -> None:
    """The others stay built in: `ptp` here, which calls the binary for its addresses."""
    node.settings["builtinPluginsExcept"] = ["host-local", "macvlan"]
    calls = node.root / "calls"
    binary = node.bin_dir / "host-local"
    binary.write_text(f'#!/bin/sh\necho "$CNI_COMMAND" >>{calls}\nexec {reference}/host-local\n')
    binary.chmod(0o755)
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    for verb in ("ADD", "CHECK", "DEL"):
        answer = node.cni(verb, "c1", netns, "hello")
        assert answer.code == 0, answer.stdout
    assert calls.read_text().split() == ["ADD", "CHECK", "DEL"]
    assert node.leftovers() == []
    node.wait_for_log("builtinPluginsExcept")
    [line] = [line for line in node.log.read_text().splitlines() if "builtinPluginsExcept" in line]
    assert line.endswith("networks of these types can't be attached: macvlan")


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
    node.wait_for_log("pluginEnv: not in the daemon's environment, so plugins do not have them: NOT_SET")


@pytest.mark.parametrize("cluster_network", [True, False])
def test_too_long_a_name_is_refused_before_anything_runs(make_node: Callable[..., Node], cluster_network: bool) -> None:
    node = make_node(settings={"builtinPlugins": "off"})
    node.plugin("noop", f"echo $CNI_COMMAND >>{node.root}/calls; echo '{{}}'")
    for name in ("cluster", "long"):
        own = "n" * 250 if (name == "cluster") is cluster_network else name
        config = {"cniVersion": "1.0.0", "name": own, "type": "noop"}
        node.network(name, config, "kube-system" if name == "cluster" else "default")
    node.pod("hello", "long")
    node.start()
    netns = node.add_netns()
    answer = node.cni("ADD", "c1", netns, "hello")
    assert (answer.code, answer.json["code"]) == (1, 7)
    most = 255 - len("-c1-") - len("eth0" if cluster_network else "net1")
    assert answer.json["msg"].startswith(f"network name is too long: 250 bytes, and {most} is the most here")
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert not (node.root / "calls").exists()
    assert node.leftovers() == []


@pytest.mark.conformance("e2e-5")
def test_sixteen_pods_at_once(node: Node) -> None:
    node.ptp("storage", "10.81.1.0/24", namespace="default")
    for number in range(16):
        node.pod(f"p{number}", "storage")
    node.start()
    before = node.links()
    spaces = [node.add_netns() for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        added = list(pool.map(lambda n: node.cni("ADD", f"c{n}", spaces[n], f"p{n}"), range(16)))
        assert [answer.code for answer in added] == [0] * 16
        assert len({answer.json["ips"][0]["address"] for answer in added}) == 16
        deleted = list(pool.map(lambda n: node.cni("DEL", f"c{n}", spaces[n], f"p{n}"), range(16)))
        assert [answer.code for answer in deleted] == [0] * 16
    assert node.links() == before
    assert node.leftovers() == []
