"""Verb x version of our configuration x version of a delegate: what plugins read and what the runtime gets.

`golden/` is typed in from the specifications; each file says from which section. A delegate of any version may be
under a configuration of any other: `delegate.<version>.json` has what its plugins print and what they must read,
`runtime.json` has what the runtime is answered, by facts and by the runtime's version; facts are named by the first
version in which a plugin can express them. `IFNAME` stands for the interface's name.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.api.app import UnixServer
from multus_daemon.api.cni import CniApi
from multus_daemon.metrics import Metrics
from multus_daemon.spec.cni import versions
from tests.unit.api.harness import Reply, exchange
from tests.unit.pod.conftest import NETNS, Engine, definition

GOLDEN = Path(__file__).parent / "golden"
ALL = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
# The facts that a delegate's version can express: mtu needs 1.1.0, interfaces need 0.3.0.
FACTS = {"0.1.0": "0.1.0", "0.2.0": "0.1.0", "1.1.0": "1.1.0"}
PORTS = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]


def golden(name: str, ifname: str) -> Any:
    return json.loads((GOLDEN / name).read_text().replace("IFNAME", ifname))


def plugin_objects(version: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The list `listed` and the single configuration `alone`, as they are written in a cluster."""
    listed = {
        "cniVersion": version,
        "name": "listed",
        "plugins": [{"type": "first", "bridge": "br0"}, {"type": "second", "capabilities": {"portMappings": True}}],
    }
    return listed, {"cniVersion": version, "name": "alone", "type": "alone", "capabilities": {"mac": True}}


class Node:
    """The socket, with everything behind it but the plugins."""

    def __init__(self, directory: Path) -> None:
        self.engine = Engine()
        self.plugins = self.engine.use_files(directory)
        # CHECK is that of the SPEC, which calls the plugins.
        self.engine.overlay |= {
            "clusterNetwork": "listed",
            "runtimeConfig": {"portMappings": PORTS},
            "strictCheck": True,
        }
        self.engine.verbs = self.engine.make_verbs()
        metrics = Metrics()
        self.server = UnixServer(CniApi(self.engine.verbs, metrics), self.engine.gates, metrics, directory / "run")

    def declare(self, version: str, **header: Any) -> None:
        """The cluster network `listed`, and `alone` which the pod asks for; their plugins print what is golden."""
        listed, alone = plugin_objects(version)
        self.engine.cluster.put_network(definition("kube-system", "listed", json.dumps(listed | header)))
        self.engine.cluster.put_network(definition("web", "alone", json.dumps(alone)))
        self.engine.declare(json.dumps([{"name": "alone", "mac": "02:00:00:00:00:02"}]))
        for plugin, ifname in (("first", "eth0"), ("second", "eth0"), ("alone", "net1")):
            printed = golden(f"delegate.{version}.json", ifname)["prints"][plugin]
            self.plugins.answers[plugin, "ADD"] = json.dumps(printed).encode()

    async def call(self, verb: str, version: str) -> Reply:
        """One verb of a runtime whose configuration is of `version`; the type of the answer is that for stdout."""
        request = self.engine.request(verb)
        env = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": "c1",
            "CNI_NETNS": NETNS,
            "CNI_IFNAME": request.ifname,
            "CNI_ARGS": "K8S_POD_NAMESPACE=web;K8S_POD_NAME=p1;K8S_POD_UID=u1",
        }
        stdin = json.dumps({"cniVersion": version, "name": "multus", "type": "multus-shim"}).encode()
        body = json.dumps({"env": env, "config": base64.b64encode(stdin).decode()}).encode()
        self.plugins.calls.clear()
        if verb == "CHECK":
            # The interfaces that the plugins reported: below 0.4.0 the kernel is asked in place of the plugins.
            self.engine.links.namespaces[NETNS] |= {"eth0", "net1"}
        return await exchange(self.server, "POST", "/cni", body, native=True)

    def read(self) -> list[tuple[str, Any]]:
        """(plugin, what it read) of the calls since the last verb."""
        return [(call.plugin_type, call.config) for call in self.plugins.calls]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    await node.server.start()
    yield node
    await node.server.stop(1)


def expected(verb: str, version: str) -> list[tuple[str, Any]]:
    on_eth0, on_net1 = (golden(f"delegate.{version}.json", ifname)["stdin"][verb] for ifname in ("eth0", "net1"))
    return [
        (eth0["type"], net1 if eth0["type"] == "alone" else eth0) for eth0, net1 in zip(on_eth0, on_net1, strict=True)
    ]


def test_there_is_an_answer_for_each_version_and_no_other() -> None:
    assert versions.SUPPORTED == ALL
    names = {"runtime.json", *(f"delegate.{version}.json" for version in ALL)}
    assert {path.name for path in GOLDEN.iterdir()} == names
    answers = golden("runtime.json", "eth0")
    assert {facts: tuple(answers[facts]) for facts in answers} == dict.fromkeys(("0.1.0", "0.3.0", "1.1.0"), ALL)


@pytest.mark.npwg("7.1")
@pytest.mark.conformance("server-8", "node-13", "verbs-6")
@pytest.mark.parametrize("delegate", ALL)
@pytest.mark.parametrize("runtime", ALL)
async def test_add_check_and_del(node: Node, runtime: str, delegate: str) -> None:
    node.declare(delegate)
    added = await node.call("ADD", runtime)
    assert added.status == 200, added.body
    assert node.read() == expected("ADD", delegate)
    assert added.json == golden("runtime.json", "eth0")[FACTS.get(delegate, "0.3.0")][runtime]["stdout"]
    for verb in ("CHECK", "DEL"):
        answer = await node.call(verb, runtime)
        assert (answer.status, answer.body) == (200, b"")
        assert node.read() == expected(verb, delegate)


@pytest.mark.parametrize("delegate", ALL)
async def test_check_and_del_after_a_restart_without_libcnis_cache(node: Node, delegate: str, tmp_path: Path) -> None:
    """The record alone is enough."""
    node.declare(delegate)
    assert (await node.call("ADD", "1.0.0")).status == 200
    for path in (tmp_path / "cni" / "results").iterdir():
        path.unlink()
    node.engine.cluster.networks.clear()
    for verb in ("CHECK", "DEL"):
        assert (await node.call(verb, "1.0.0")).status == 200
        assert node.read() == expected(verb, delegate)


@pytest.mark.parametrize("delegate", ["0.4.0", "1.0.0", "1.1.0"])
@pytest.mark.parametrize(
    ("flag", "skipped"), [(True, True), ("true", True), ("TRUE", True), (False, False), ("false", False), (None, False)]
)
async def test_disable_check(node: Node, delegate: str, flag: object, skipped: bool) -> None:
    """CNI SPEC 0.4.0 has it as a string, 1.0.0 as a boolean."""
    node.declare(delegate, disableCheck=flag)
    assert (await node.call("ADD", "1.0.0")).status == 200
    assert (await node.call("CHECK", "1.0.0")).status == 200
    listed = [item for item in expected("CHECK", delegate) if item[0] != "alone"]
    assert node.read() == expected("CHECK", delegate)[len(listed) if skipped else 0 :]


@pytest.mark.weak_spot(13)
@pytest.mark.parametrize(("runtime", "version"), [("0.2.0", "0.3.1"), ("0.3.0", "0.3.0"), ("1.1.0", "1.1.0")])
async def test_a_list_without_a_version_has_that_of_our_configuration(node: Node, runtime: str, version: str) -> None:
    """CNI SPEC: lists came with 0.3.0."""
    node.declare(version, cniVersion=None)
    assert (await node.call("ADD", runtime)).status == 200
    assert node.read() == expected("ADD", version)
    for verb in ("CHECK", "DEL"):
        # The result does not depend on the runtime's later configuration.
        assert (await node.call(verb, "1.0.0")).status == 200
        assert node.read() == expected(verb, version)
