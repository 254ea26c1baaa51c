"""Check the plugin calls for a whole pod: engine, chain, record and result cache together, over fake plugins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.spec.cni import result, versions
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from tests.unit.pod.conftest import NETNS, Engine

HAS_CHECK = ("0.4.0", "1.0.0", "1.1.0")

every_version = pytest.mark.parametrize("version", versions.SUPPORTED)


class Node:
    """An engine with the real store, and a plugin for every type; `weave` and `other` report an interface."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engine = Engine()
        self.plugins = self.engine.use_files(directory)
        self.engine.files = NodeConfFiles()  # type: ignore[assignment]  # a real one serves as well
        self.engine.verbs = self.engine.make_verbs()

    def delegates(self, *configs: dict[str, Any]) -> None:
        self.engine.overlay |= {"clusterNetwork": "", "delegates": list(configs)}

    def prints(self, plugin: str, version: str, ifname: str, address: str) -> Result:
        """Let the ADD of `plugin` report an interface with this address."""
        made = Result((Interface(ifname, sandbox=NETNS),), (IpConfig(address),))
        self.plugins.answers[plugin, "ADD"] = result.to_stdout(made, version)
        return made

    def call(self, verb: str, **options: Any) -> Any:
        self.plugins.calls.clear()
        verbs = self.engine.verbs
        serve = {"ADD": verbs.add, "CHECK": verbs.check, "DEL": verbs.delete}[verb]
        return serve(self.engine.request(verb, **options))

    def calls(self) -> list[tuple[str, str, str]]:
        """(plugin, verb, CNI_IFNAME) of the calls since the last request."""
        return [(call.plugin_type, call.verb, call.invocation.ifname) for call in self.plugins.calls]

    def read(self) -> list[dict[str, Any]]:
        """Return the configuration that each call read, without prevResult."""
        return [
            {key: value for key, value in call.config.items() if key != "prevResult"} for call in self.plugins.calls
        ]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def single(name: str, plugin: str, version: str = "1.0.0", **more: Any) -> dict[str, Any]:
    return {"cniVersion": version, "name": name, "type": plugin, **more}


# --- delegates of the configuration ----------------------------------------------------------------------------------


@pytest.mark.conformance("verbs-2", "verbs-3", "pods-18", "config-8")
@every_version
def test_delegates_are_called_in_order_and_deleted_in_reverse(node: Node, version: str) -> None:
    configs = [single("weave1", "weave", version), single("other1", "other", version, extra={"a": [1.5]})]
    node.delegates(*configs)
    node.engine.overlay["strictCheck"] = True
    first = node.prints("weave", version, "eth0", "10.1.0.2/24")
    node.prints("other", version, "net1", "10.2.0.2/24")
    assert node.call("ADD").ips == first.ips
    assert node.calls() == [("weave", "ADD", "eth0"), ("other", "ADD", "net1")]
    assert node.read() == configs
    # Below 0.4.0 the kernel is asked in place of the plugins.
    node.engine.links.namespaces[NETNS] |= {"eth0", "net1"}
    node.call("CHECK")
    assert node.calls() == ([("weave", "CHECK", "eth0"), ("other", "CHECK", "net1")] if version in HAS_CHECK else [])
    node.call("DEL")
    assert node.calls() == [("other", "DEL", "net1"), ("weave", "DEL", "eth0")]
    assert node.read() == configs[::-1]
    assert ["prevResult" in call.config for call in node.plugins.calls] == [version in HAS_CHECK] * 2


@pytest.mark.conformance("verbs-4")
@every_version
def test_a_plugin_without_an_interface(node: Node, version: str) -> None:
    """Its result has nothing in it."""
    node.delegates(single("weave1", "weave", version), single("other1", "silent", version))
    first = node.prints("weave", version, "eth0", "10.1.0.2/24")
    node.plugins.answers["silent", "ADD"] = json.dumps({"cniVersion": version}).encode()
    assert node.call("ADD").ips == first.ips
    node.call("DEL")
    assert node.calls() == [("silent", "DEL", "net1"), ("weave", "DEL", "eth0")]


# --- networks of the cluster -----------------------------------------------------------------------------------------


@pytest.mark.weak_spot(19)
@pytest.mark.conformance("config-17", "verbs-22")
@pytest.mark.parametrize("uid", ["u1", ""])
def test_the_variables_of_a_delegate(node: Node, uid: str) -> None:
    node.call("ADD", uid=uid)
    invocation = node.plugins.calls[0].invocation
    assert invocation.args == (
        "IgnoreUnknown=true;K8S_POD_NAMESPACE=web;K8S_POD_NAME=p1;K8S_POD_INFRA_CONTAINER_ID="
        f";K8S_POD_UID={uid};EXTRA=kept"
    )
    assert (invocation.container_id, invocation.netns, invocation.path) == ("c1", NETNS, "/bin")


@pytest.mark.conformance("pods-9", "pods-12")
@pytest.mark.parametrize("way", ["definition", "name of a file", "path", "path of a list", "directory"])
def test_every_way_to_name_the_cluster_network(node: Node, way: str) -> None:
    directory = node.directory / "net.d"
    directory.mkdir()
    (directory / "10-a.conf").write_text(json.dumps(single("on-disk", "from-file")))
    (directory / "20-b.conflist").write_text(
        json.dumps({"cniVersion": "1.0.0", "name": "on-disk-list", "plugins": [{"type": "from-list"}]})
    )
    reference, plugin = {
        "definition": ("cluster", "fake"),
        "name of a file": ("on-disk", "from-file"),
        "path": (f"{directory}/10-a.conf", "from-file"),
        "path of a list": (f"{directory}/20-b.conflist", "from-list"),
        "directory": (f"{directory}/", "from-file"),
    }[way]
    node.engine.overlay |= {"clusterNetwork": reference, "confDir": str(directory)}
    node.call("ADD")
    assert node.calls() == [(plugin, "ADD", "eth0")]


# --- what is stored --------------------------------------------------------------------------------------------------


@pytest.mark.conformance("verbs-24")
@every_version
def test_a_lost_record_is_made_good_by_the_cached_results(node: Node, version: str) -> None:
    """Not by the pod's present annotation: it may name others, and the pod may be gone."""
    configs = [single("weave1", "weave", version), single("other1", "other", version)]
    node.delegates(*configs)
    node.prints("weave", version, "eth0", "10.1.0.2/24")
    node.prints("other", version, "net1", "10.2.0.2/24")
    node.call("ADD")
    (node.directory / "cni" / "attachments" / "c1.json").unlink()
    node.engine.cluster.pods.clear()
    node.delegates(single("present", "present", version))
    node.call("DEL")
    assert sorted(node.calls()) == [("other", "DEL", "net1"), ("weave", "DEL", "eth0")]
    assert sorted(node.read(), key=str) == sorted(configs, key=str)
    assert list((node.directory / "cni" / "results").iterdir()) == []
    node.call("DEL")
    assert node.calls() == []
