"""STATUS and GC as the runtime sees them: real shim, daemon and namespaces, reference plugins and a steerable one."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import multus_shim
from tests.e2e.node import Answer, Node

FAKE = Path(__file__).parents[1] / "fakes" / "plugin.py"


def ask(node: Node, verb: str, listed: Sequence[str] | None = None, **more: Any) -> Answer:
    """The shim as libcni runs it for a verb without a container; `listed`: the runtime's containers."""
    config = json.loads(node.stdin) | {"cniVersion": "1.1.0"} | more
    if listed is not None:
        pairs = [{"containerID": container, "ifname": "eth0"} for container in listed]
        config |= {"cni.dev/valid-attachments": pairs, "cni.dev/attachments": pairs}
    environment = node.environment(verb, "", "", "") | {"CNI_ARGS": "", "CNI_IFNAME": ""}
    node.environment = lambda *_: environment  # type: ignore[method-assign]  # of this object only
    try:
        return node.cni(verb, "", "", "", stdin=json.dumps(config).encode())
    finally:
        del node.environment


def fake_plugin(node: Node, **steer: Any) -> dict[str, Any]:
    """A plugin object of the fake plugin; `steer` by verb. It records its calls in `calls-VERB`."""
    shutil.copy(FAKE, node.bin_dir / "told")
    (node.bin_dir / "told").chmod(0o755)
    told = {verb: {"record": str(node.root / f"calls-{verb}")} | steer.get(verb, {}) for verb in ("STATUS", "GC")}
    return {"type": "told", "steer": told | {"ADD": {"stdout": '{"cniVersion":"1.1.0"}'}}}


def calls(node: Node, verb: str) -> list[dict[str, Any]]:
    path = node.root / f"calls-{verb}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def addresses(node: Node) -> list[str]:
    """Every address that host-local has given out."""
    return sorted(path.name for path in node.networks_dir.rglob("*") if path.is_file() and path.name[0].isdecimal())


@pytest.mark.weak_spot(1, 12)
@pytest.mark.parametrize(
    ("plugins", "version"),
    # Debian's reference plugins end at 1.0.0.
    [("reference", "0.3.1"), ("reference", "1.0.0"), ("built-in", "0.3.1"), ("built-in", "1.1.0")],
)
def test_no_address_is_left_after_del_nor_after_gc(
    make_node: Callable[..., Node], request: pytest.FixtureRequest, plugins: str, version: str
) -> None:
    node = make_node()
    if plugins == "reference":
        node.settings["builtinPlugins"] = "off"
        for name in ("ptp", "host-local"):
            (node.bin_dir / name).symlink_to(request.getfixturevalue("reference") / name)
    # As a distribution lays it out: a file, with the ranges in keys of the plugin's own.
    ipam = {"type": "host-local", "ranges": [[{"subnet": "10.83.0.0/24"}]], "dataDir": str(node.networks_dir)}
    path = node.root / "10-cluster.conflist"
    path.write_text(json.dumps({"cniVersion": version, "name": "cbr0", "plugins": [{"type": "ptp", "ipam": ipam}]}))
    node.settings["clusterNetwork"] = str(path)
    node.pod("hello")
    node.start()
    before = node.links()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    assert addresses(node) == ["10.83.0.2"]
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert addresses(node) == []

    assert node.cni("ADD", "c2", netns, "hello").code == 0
    gone = node.add_netns()
    assert node.cni("ADD", "c3", gone, "hello").code == 0
    assert len(addresses(node)) == 2
    node.remove_netns_and_links(gone)
    assert ask(node, "GC", ["c2", "c3"]).code == 0
    assert len(addresses(node)) == 2
    answer = ask(node, "GC", [])
    assert (answer.code, answer.stdout) == (0, b"")
    assert addresses(node) == []
    assert node.leftovers() == []
    assert (node.links(netns), node.links()) == (["lo"], before)


@pytest.mark.weak_spot(12)
@pytest.mark.conformance("server-7", "verbs-29", "verbs-30")
def test_a_plugin_learns_what_is_attached_under_both_names(make_node: Callable[..., Node]) -> None:
    node = make_node(cni_version="1.1.0")
    node.network("cluster", {"cniVersion": "1.1.0", "name": "cluster", **fake_plugin(node)})
    node.pod("hello", "old@lan0")
    node.network("old", {"cniVersion": "1.0.0", "name": "old", **fake_plugin(node)}, "default")
    node.start()
    assert ask(node, "GC", []).code == 0, "a fresh node"
    living, gone = node.add_netns(), node.add_netns()
    for container, netns in (("c1", living), ("c2", gone)):
        assert node.cni("ADD", container, netns, "hello").code == 0
    node.remove_netns(gone)
    assert ask(node, "GC", ["c1"]).code == 0
    fresh, later = calls(node, "GC")
    attached = [{"containerID": "c1", "ifname": "eth0"}]
    for call, expected in ((fresh, []), (later, attached)):
        config = json.loads(call["stdin"])
        assert config["cni.dev/valid-attachments"] == config["cni.dev/attachments"] == expected
        assert (config["name"], config["cniVersion"]) == ("cluster", "1.1.0")
        assert not {"prevResult", "runtimeConfig"} & config.keys()
        assert {call["env"][f"CNI_{key}"] for key in ("CONTAINERID", "NETNS", "IFNAME", "ARGS")} == {""}


@pytest.mark.weak_spot(32)
def test_what_another_daemon_left_is_collected(node: Node) -> None:
    """Cached results by the hundred, and the lists of containers whose ADD failed."""
    results = node.cni_dir / "results"
    results.mkdir(parents=True)
    ipam = {"type": "host-local", "subnet": "10.84.0.0/24", "dataDir": str(node.networks_dir)}
    config = json.dumps({"cniVersion": "0.3.1", "name": "gone-net", "type": "ptp", "ipam": ipam}).encode()
    pool = node.networks_dir / "gone-net"
    pool.mkdir(parents=True)
    for number in range(200):
        container = f"{number:064x}"
        (pool / f"10.84.0.{number + 2}").write_text(f"{container}\r\neth0")
        entry = {
            "kind": "cniCacheV1",
            "containerId": container,
            "config": base64.b64encode(config).decode(),
            "ifName": "eth0",
            "networkName": "gone-net",
            "netns": f"/run/netns/gone-{number}",
            "result": {"cniVersion": "0.3.1"},
        }
        (results / f"gone-net-{container}-eth0").write_text(json.dumps(entry))
    (node.cni_dir / "failed").write_text(json.dumps([{"Name": "x", "Bytes": base64.b64encode(config).decode()}]))
    node.start()
    assert ask(node, "GC", [f"{7:064x}"]).code == 0
    assert [path.name for path in results.iterdir()] == [f"gone-net-{7:064x}-eth0"]
    assert addresses(node) == ["10.84.0.9"]
    assert not (node.cni_dir / "failed").exists()


@pytest.mark.weak_spot(11)
@pytest.mark.conformance("verbs-27")
@pytest.mark.parametrize("code", [50, 51])
def test_the_code_of_a_plugins_status_arrives_at_the_runtime(make_node: Callable[..., Node], code: int) -> None:
    node = make_node(cni_version="1.1.0")
    said = json.dumps({"cniVersion": "1.1.0", "code": code, "msg": "no addresses left", "details": "ask the admin"})
    node.network(
        "cluster", {"cniVersion": "1.1.0", "name": "cluster", **fake_plugin(node, STATUS={"stdout": said, "exit": 1})}
    )
    node.start()
    answer = ask(node, "STATUS")
    assert (answer.code, answer.json["code"]) == (1, code)
    assert answer.json["details"].startswith("ask the admin")
    assert answer.json["msg"] == 'no addresses left (plugin type="told" network="cluster", STATUS)'


@pytest.mark.weak_spot(42)
def test_status_of_a_node_that_is_ready_and_of_one_that_is_not(make_node: Callable[..., Node]) -> None:
    node = make_node(cni_version="1.1.0")
    node.start()
    answer = ask(node, "STATUS")
    assert (answer.code, answer.json["code"]) == (1, 50)
    assert answer.json["msg"].startswith("clusterNetwork 'cluster' does not exist")
    node.network("cluster", {"cniVersion": "1.1.0", "name": "cluster", **fake_plugin(node)})
    node.wait_until(lambda: ask(node, "STATUS").code == 0, "the cluster network is there")
    assert set(json.loads(calls(node, "STATUS")[-1]["stdin"])) == {"cniVersion", "name", "type", "steer"}
    node.kill()
    answer = ask(node, "STATUS")
    assert (answer.code, answer.json["code"]) == (1, 50)
    assert answer.seconds < 30


@pytest.mark.conformance("server-5", "server-6")
@pytest.mark.parametrize("arguments", [{}, {"CNI_ARGS": ""}], ids=["unset", "empty"])
@pytest.mark.parametrize("verb", ["STATUS", "GC"])
def test_a_verb_of_the_node_needs_no_variable_of_a_container(
    make_node: Callable[..., Node], verb: str, arguments: dict[str, str]
) -> None:
    """CNI SPEC, section 2: `CNI_PATH` is the only one; plugins older than 1.1.0 are not asked."""
    node = make_node(cni_version="1.1.0")
    node.network("cluster", {"cniVersion": "0.4.0", "name": "cluster", **fake_plugin(node)})
    node.start()
    environment = {"CNI_COMMAND": verb, "CNI_PATH": str(node.bin_dir), **arguments}
    config = json.loads(node.stdin) | {"cni.dev/valid-attachments": []}
    shim = [str(multus_shim.binary())]
    done = subprocess.run(shim, env=environment, input=json.dumps(config).encode(), capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, b"")
    assert calls(node, verb) == []
