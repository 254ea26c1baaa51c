"""Chains that files make: the cluster network's folder, the auxiliary chain, and lists in every version."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.node import Node, ping
from tests.programs import needed

FAKE = Path(__file__).parents[1] / "fakes" / "plugin.py"
GOLDEN = Path(__file__).parents[1] / "spec" / "golden"
VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
VERBS = ("ADD", "CHECK", "DEL", "STATUS", "GC")


@pytest.fixture
def folder(make_node: Callable[..., Node]) -> Node:
    """A node whose cluster network is `net.d/10-cluster.conflist`: a ptp list, with a folder beside it."""
    settings = {"clusterNetwork": "filled in", "auxiliaryCNIChainName": "", "strictCheck": True}
    node = make_node(settings=settings)
    directory = node.root / "net.d"
    node.settings["clusterNetwork"] = str(directory / "10-cluster.conflist")
    write(directory / "10-cluster.conflist", {"cniVersion": "1.0.0", "name": "cluster", "plugins": [ptp(node)]})
    for name in ("base", "alpha", "beta", "gamma"):
        install(node, name)
    return node


def ptp(node: Node) -> dict[str, Any]:
    ipam = {"type": "host-local", "subnet": "10.83.0.0/24", "dataDir": str(node.networks_dir)}
    return {"type": "ptp", "ipam": ipam}


def write(path: Path, fields: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


def install(node: Node, name: str) -> None:
    """A steerable plugin of this name."""
    (node.bin_dir / name).write_bytes(FAKE.read_bytes())
    (node.bin_dir / name).chmod(0o755)


def recording(node: Node, name: str, **fields: Any) -> dict[str, Any]:
    """A plugin object that writes its calls down and changes nothing."""
    steer = {verb: {"record": str(node.root / "calls")} for verb in VERBS}
    return {"type": name, "steer": steer, **fields}


def calls(node: Node, verb: str) -> list[tuple[str, str, Any]]:
    """(plugin, CNI_IFNAME, what it read less prevResult and steer) of each call of `verb`, in order."""
    path = node.root / "calls"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        (Path(call["argv"][0]).name, call["env"]["CNI_IFNAME"], less(json.loads(call["stdin"])))
        for call in found
        if call["env"]["CNI_COMMAND"] == verb
    ]


def less(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in ("prevResult", "steer")}


@pytest.mark.weak_spot(1)
@pytest.mark.conformance("e2e-6", "verbs-31")
def test_a_folder_completes_the_cluster_network_and_del_goes_by_what_add_found(folder: Node) -> None:
    directory = folder.root / "net.d" / "cluster"
    inline = {"cniVersion": "1.0.0", "name": "cluster", "plugins": [recording(folder, "base")]}
    path = write(folder.root / "net.d" / "10-cluster.conflist", inline)
    write(directory / "20-b.conf", recording(folder, "beta", level=7, large=2**60))
    write(directory / "10-a.conf", recording(folder, "alpha", capabilities={"portMappings": True}))
    for other in ("05.json", "06.conflist", "07.conf.bak"):
        write(directory / other, "{ not read")
    folder.pod("hello")
    folder.start()
    netns = folder.add_netns()
    mapping = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
    stdin = json.loads(folder.stdin) | {"runtimeConfig": {"portMappings": [mapping]}}
    added = folder.cni("ADD", "c1", netns, "hello", stdin=json.dumps(stdin).encode())
    assert added.code == 0, added.stdout
    made = calls(folder, "ADD")
    ours = {"cniVersion": "1.0.0", "name": "cluster"}
    ports = {"capabilities": {"portMappings": True}, "runtimeConfig": {"portMappings": [mapping]}}
    assert made == [
        ("base", "eth0", {"type": "base"} | ours),
        ("alpha", "eth0", {"type": "alpha"} | ports | ours),
        ("beta", "eth0", {"type": "beta", "level": 7, "large": 2**60} | ours),
    ]

    shutil.rmtree(directory)
    write(directory / "00.conf", recording(folder, "gamma"))
    write(path, "{ broken")
    assert folder.stop() == 0
    folder.start()
    # The runtime's CHECK and DEL know nothing of the ports any more.
    assert folder.cni("CHECK", "c1", netns, "hello").code == 0
    assert folder.cni("DEL", "c1", netns, "hello").code == 0
    assert calls(folder, "CHECK") == made
    assert calls(folder, "DEL") == made[::-1]
    assert folder.leftovers() == []


@pytest.mark.conformance("e2e-6", "e2e-7")
@pytest.mark.parametrize("chain", ["cluster", "vendor-cni-chain"], ids=["folder", "auxiliary"])
def test_tuning_in_a_folder_reaches_the_pods_own_interface(folder: Node, reference: Path, chain: str) -> None:
    if chain != "cluster":
        folder.settings |= {"auxiliaryCNIChainName": chain}
    folder.settings |= {"builtinPlugins": "fallback"}
    (folder.bin_dir / "tuning").symlink_to(reference / "tuning")
    sysctl = {"net.ipv4.conf.eth0.arp_filter": "1"}
    write(folder.root / "net.d" / chain / "tuning.conf", {"type": "tuning", "name": "tuning", "sysctl": sysctl})
    folder.pod("hello")
    folder.start()
    netns = folder.add_netns()
    added = folder.cni("ADD", "c1", netns, "hello")
    assert added.code == 0, added.stdout
    assert arp_filter(netns, "eth0") == "1"
    assert folder.cni("CHECK", "c1", netns, "hello").code == 0
    assert folder.cni("DEL", "c1", netns, "hello").code == 0
    assert folder.leftovers() == []


def test_a_network_of_the_cluster_has_no_folder(folder: Node) -> None:
    folder.network("cluster", {"cniVersion": "1.0.0", "name": "cluster", "plugins": [ptp(folder)]})
    folder.settings |= {"clusterNetwork": "cluster", "confDir": str(folder.root / "net.d")}
    write(folder.root / "net.d" / "cluster" / "10.conf", recording(folder, "alpha"))
    folder.pod("hello")
    folder.start()
    assert folder.cni("ADD", "c1", folder.add_netns(), "hello").code == 0
    assert calls(folder, "ADD") == []


@pytest.mark.weak_spot(21)
@pytest.mark.conformance("e2e-7")
def test_the_auxiliary_chain_tunes_the_pods_own_interface(folder: Node, reference: Path) -> None:
    folder.settings |= {"auxiliaryCNIChainName": "policy"}
    folder.settings |= {"builtinPlugins": "fallback"}
    (folder.bin_dir / "tuning").symlink_to(reference / "tuning")
    sysctl = {"net.ipv4.conf.IFNAME.arp_filter": "1"}
    path = write(folder.root / "net.d" / "policy" / "10.conf", {"type": "tuning", "sysctl": sysctl})
    write(folder.root / "net.d" / "policy" / "20.conf", recording(folder, "alpha"))
    folder.ptp("storage", "10.83.1.0/24", namespace="default")
    folder.pod("hello", "storage")
    folder.start()
    netns = folder.add_netns()
    added = folder.cni("ADD", "c1", netns, "hello")
    assert added.code == 0, added.stdout
    assert set(folder.links(netns)) == {"lo", "eth0", "net1"}
    assert [arp_filter(netns, name) for name in ("eth0", "net1")] == ["1", "0"]
    assert ping(netns, "10.83.0.1", "eth0")
    assert calls(folder, "ADD") == [("alpha", "eth0", {"type": "alpha", "cniVersion": "1.0.0", "name": "policy"})]
    assert "policy" not in (folder.manifests / "status" / "default" / "hello.yaml").read_text()
    again = folder.cni("ADD", "c1", netns, "hello")
    assert (again.code, again.stdout) == (0, added.stdout)
    # No CHECK: tuning 1.1.1 replaces IFNAME on ADD only.
    path.unlink()
    assert folder.cni("DEL", "c1", netns, "hello").code == 0
    assert [name for name, _, _ in calls(folder, "DEL")] == ["alpha"]
    assert folder.links(netns) == ["lo"]
    assert folder.leftovers() == []


def arp_filter(netns: str, ifname: str) -> str:
    command = [needed("ip"), "netns", "exec", Path(netns).name, "cat", f"/proc/sys/net/ipv4/conf/{ifname}/arp_filter"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.npwg("7.1")
def test_real_processes_read_what_the_specification_says_in_every_version(make_node: Callable[..., Node]) -> None:
    """Shim, daemon and plugins as programs; all combinations of versions are in tests/spec/test_versions.py."""
    node = make_node(settings={"strictCheck": True})
    for name in ("first", "second", "alone"):
        install(node, name)
    for version in VERSIONS:
        declare(node, version)
    node.start()
    for version in VERSIONS:
        (node.root / "calls").unlink(missing_ok=True)
        pod, netns = f"v{version.replace('.', '-')}", node.add_netns()
        stdin = json.loads(node.stdin) | {"cniVersion": version}
        stdin["runtimeConfig"] = {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}
        has_check = version in ("0.4.0", "1.0.0", "1.1.0")
        for verb in ("ADD", "CHECK", "DEL") if has_check else ("ADD", "DEL"):
            answer = node.cni(verb, f"c{pod}", netns, pod, stdin=json.dumps(stdin).encode())
            assert answer.code == 0, answer.stdout
            if verb == "ADD":
                facts = {"0.1.0": "0.1.0", "0.2.0": "0.1.0", "1.1.0": "1.1.0"}.get(version, "0.3.0")
                assert answer.json == golden("runtime.json", "eth0")[facts][version]["stdout"]
        read = [json.loads(line) for line in (node.root / "calls").read_text().splitlines()]
        for verb in ("ADD", "CHECK", "DEL"):
            found = [json.loads(call["stdin"]) for call in read if call["env"]["CNI_COMMAND"] == verb]
            assert [without_steer(item) for item in found] == [
                golden(f"delegate.{version}.json", "net1" if item["type"] == "alone" else "eth0")["stdin"][verb][index]
                for index, item in enumerate(golden(f"delegate.{version}.json", "eth0")["stdin"][verb])
            ]
    assert node.leftovers() == []


def golden(name: str, ifname: str) -> Any:
    text = (GOLDEN / name).read_text().replace("/run/netns/p1", "NETNS")
    return json.loads(text.replace("IFNAME", ifname))


def without_steer(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != "steer"}


def declare(node: Node, version: str) -> None:
    """A pod and its two networks, all of whose plugins speak `version`."""
    pod = f"v{version.replace('.', '-')}"

    def plugin(name: str, ifname: str, **fields: Any) -> dict[str, Any]:
        made = recording(node, name, **fields)
        made["steer"]["ADD"]["stdout"] = json.dumps(golden(f"delegate.{version}.json", ifname)["prints"][name])
        return made

    plugins = [
        plugin("first", "eth0", bridge="br0"),
        plugin("second", "eth0", capabilities={"portMappings": True}),
    ]
    node.network(f"listed-{pod}", {"cniVersion": version, "name": "listed", "plugins": plugins}, "default")
    alone = plugin("alone", "net1", capabilities={"mac": True})
    node.network(f"alone-{pod}", alone | {"cniVersion": version, "name": "alone"}, "default")
    annotations = {
        "v1.multus-cni.io/default-network": json.dumps([{"name": f"listed-{pod}", "namespace": "default"}]),
        "k8s.v1.cni.cncf.io/networks": json.dumps([{"name": f"alone-{pod}", "mac": "02:00:00:00:00:02"}]),
    }
    metadata = {"namespace": "default", "name": pod, "uid": f"uid-{pod}", "annotations": annotations}
    fields = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}}
    (node.manifests / f"pod-{pod}.yaml").write_text(yaml.safe_dump(fields))
