"""Chains and versions of what a pod gets: the auxiliary chain, forceCNIVersion, lists that name no version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.pod import record_format
from multus_daemon.spec.attachment import Attachment
from multus_daemon.spec.cni import conf
from multus_daemon.spec.cni.errors import IncompatibleVersionError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Interface, Result
from multus_daemon.spec.nad.selection import DEFAULT_NETWORK_ANNOTATION
from tests.unit.pod.conftest import NETNS, Engine, definition

LIST = json.dumps({"name": "listed", "plugins": [{"type": "a"}, {"type": "b"}]})
SINGLE = json.dumps({"name": "single", "type": "a"})


def write(path: Path, fields: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


@pytest.fixture
def node(engine: Engine, tmp_path: Path) -> Path:
    """The engine's cluster network is a file in this directory, and `aux` is the auxiliary chain's name."""
    path = write(tmp_path / "10-main.conf", {"cniVersion": "1.0.0", "name": "main", "type": "fake"})
    engine.overlay |= {"clusterNetwork": str(path), "auxiliaryCNIChainName": "aux", "confDir": str(tmp_path / "conf.d")}
    engine.files = NodeConfFiles()  # type: ignore[assignment]  # a real one serves as well
    engine.verbs = engine.make_verbs()
    return tmp_path


def attachments(engine: Engine) -> tuple[Attachment, ...]:
    engine.verbs.add(engine.request())
    return engine.store.records["c1"].attachments


def auxiliary(engine: Engine) -> Attachment:
    *_, last = attachments(engine)
    assert last.auxiliary
    return last


class TestAuxiliaryChain:
    def test_runs_last_on_the_runtimes_interface(self, engine: Engine, node: Path) -> None:
        engine.declare("n1,n2")
        write(node / "aux" / "20.conf", {"type": "tuning", "mtu": 1400})
        write(node / "aux" / "10.conf", {"type": "sysctl"})
        assert [(item.name, item.ifname, item.auxiliary) for item in attachments(engine)] == [
            ("main", "eth0", False),
            ("web/n1", "net1", False),
            ("web/n2", "net2", False),
            ("aux", "eth0", True),
        ]
        assert json.loads(engine.store.records["c1"].attachments[-1].config.raw) == {
            "cniVersion": "1.0.0",
            "name": "aux",
            "plugins": [
                {"type": "passthru", "name": "passthru-cni"},
                {"type": "sysctl"},
                {"type": "tuning", "mtu": 1400},
            ],
        }

    @pytest.mark.weak_spot(21)
    def test_its_interface_is_there_already_and_no_status_tells_of_it(self, engine: Engine, node: Path) -> None:
        write(node / "aux" / "10.conf", {"type": "tuning"})
        engine.interface("eth0", "main", "10.0.0.2/24")
        engine.runner.results["aux"] = Result((Interface("eth0", sandbox=NETNS),))
        engine.verbs.add(engine.request())
        assert [item["name"] for item in json.loads(engine.cluster.statuses["web/p1"])] == ["main"]
        assert [reason for _, _, reason, _ in engine.cluster.events] == ["AddedInterface"]

    def test_a_repeated_add_finds_it_alive_check_checks_it_and_del_deletes_it_first(
        self, engine: Engine, node: Path
    ) -> None:
        engine.declare("n1")
        write(node / "aux" / "10.conf", {"type": "tuning"})
        # It reports the cluster network's result, whose liveness is judged there.
        engine.runner.results["aux"] = Result((Interface("eth0", sandbox=NETNS),))
        engine.verbs.add(engine.request())
        engine.verbs.add(engine.request())
        engine.overlay["strictCheck"] = True
        engine.verbs.check(engine.request("CHECK"))
        engine.verbs.delete(engine.request("DEL"))
        names = ["main", "web/n1", "aux"]
        assert engine.runner.order == [
            *(("ADD", name) for name in names),
            *(("CHECK", name) for name in names),
            *(("DEL", name) for name in reversed(names)),
        ]

    def test_the_record_on_disk_has_it_whole(self, engine: Engine, node: Path) -> None:
        path = write(node / "aux" / "10.conf", {"type": "tuning", "mtu": 1400})
        found = auxiliary(engine)
        path.unlink()
        stored = record_format.decode(record_format.encode(engine.store.records["c1"]))
        assert stored.attachments[-1] == found

    @pytest.mark.parametrize(
        ("top_level", "expected"), [("", "0.3.1"), ("0.2.0", "0.3.1"), ("0.3.0", "0.3.0"), ("1.1.0", "1.1.0")]
    )
    def test_its_version_is_ours(self, engine: Engine, node: Path, top_level: str, expected: str) -> None:
        write(node / "aux" / "10.conf", {"type": "tuning"})
        engine.overlay["cniVersion"] = top_level
        assert auxiliary(engine).config.cni_version == expected

    def test_the_folder_of_a_directory(self, engine: Engine, node: Path) -> None:
        write(node / "aux" / "10.conf", {"type": "tuning"})
        engine.overlay["clusterNetwork"] = str(node)
        assert auxiliary(engine).name == "aux"

    @pytest.mark.parametrize("others", [(), ("10.conflist", "10.json", "README")])
    def test_none_without_a_file(self, engine: Engine, node: Path, others: tuple[str, ...]) -> None:
        for name in others:
            write(node / "aux" / name, {"type": "never"})
        assert [item.name for item in attachments(engine)] == ["main"]

    def test_a_pods_own_default_network_has_it_too_on_its_interface(self, engine: Engine, node: Path) -> None:
        write(node / "aux" / "10.conf", {"type": "tuning"})
        chosen = json.dumps([{"name": "n1", "namespace": "web", "interface": "first0"}])
        engine.declare(annotations={DEFAULT_NETWORK_ANNOTATION: chosen})
        assert [(item.name, item.ifname) for item in attachments(engine)] == [
            ("web/n1", "first0"),
            ("aux", "first0"),
        ]

    def test_what_the_runtime_maps_is_not_mapped_twice(self, engine: Engine, node: Path) -> None:
        write(node / "aux" / "10.conf", {"type": "portmap", "capabilities": {"portMappings": True}})
        engine.overlay["runtimeConfig"] = {"portMappings": [{"hostPort": 80, "containerPort": 80}]}
        assert auxiliary(engine).capability_args == {}

    def test_needs_a_path(self, engine: Engine, node: Path) -> None:
        engine.overlay["clusterNetwork"] = "cluster"
        with pytest.raises(InvalidNetworkConfigError, match=r"clusterNetwork must be a path .* it is 'cluster'"):
            engine.verbs.add(engine.request())

    @pytest.mark.parametrize("name", ["..", "../conf.d", "/etc", "a b", ".aux"])
    def test_its_name_is_a_networks_name(self, engine: Engine, node: Path, name: str) -> None:
        engine.overlay["auxiliaryCNIChainName"] = name
        with pytest.raises(InvalidNetworkConfigError, match="invalid characters found in network name") as caught:
            engine.verbs.add(engine.request())
        assert f"auxiliaryCNIChainName {name!r}" in caught.value.msg

    def test_the_cluster_networks_own_folder_is_refused(self, engine: Engine, node: Path) -> None:
        write(node / "10-main.conf", {"cniVersion": "1.0.0", "name": "aux", "type": "fake"})
        write(node / "aux" / "10.conf", {"type": "tuning"})
        with pytest.raises(InvalidNetworkConfigError, match="has the name of the cluster network"):
            engine.verbs.add(engine.request())

    def test_not_with_delegates(self, engine: Engine, node: Path) -> None:
        write(node / "aux" / "10.conf", {"type": "tuning"})
        engine.overlay |= {"clusterNetwork": "", "delegates": [json.loads(SINGLE)]}
        assert [item.name for item in attachments(engine)] == ["single"]

    def test_hot_plug_leaves_it_alone(self, engine: Engine, node: Path) -> None:
        write(node / "aux" / "10.conf", {"type": "tuning"})
        engine.verbs.add(engine.request())
        engine.links.namespaces[NETNS] = {"lo", "eth0"}
        engine.verbs.add_network(engine.plug(ifname="net5"))
        with pytest.raises(InvalidNetworkConfigError, match="auxiliary chain of pod web/p1"):
            engine.verbs.remove_network(engine.plug("DEL", ifname="eth0", network="aux"))
        with pytest.raises(InvalidNetworkConfigError, match="belongs to network main"):
            engine.verbs.add_network(engine.plug(ifname="eth0", network="other"))
        assert [item.name for item in engine.store.records["c1"].attachments] == ["main", "aux", "web/hot"]


class TestForcedVersion:
    @pytest.mark.weak_spot(30)
    @pytest.mark.conformance("node-9")
    @pytest.mark.parametrize("raw", [SINGLE, LIST, '{"cniVersion":"0.4.0","name":"x","type":"a"}'])
    @pytest.mark.parametrize("version", ["0.3.1", "1.1.0"])
    def test_the_cluster_network_speaks_ours(self, engine: Engine, node: Path, raw: str, version: str) -> None:
        path = write(node / "10-main.conf", raw)
        engine.overlay |= {"forceCNIVersion": True, "cniVersion": version, "defaultNetworks": ["cluster"]}
        first, other = attachments(engine)
        assert (first.config.cni_version, other.config.cni_version) == (version, "1.0.0")
        assert first.config.raw == path.read_bytes() == raw.encode()
        again = record_format.decode(record_format.encode(engine.store.records["c1"]))
        assert again.attachments[0].config.cni_version == version

    def test_the_first_of_delegates_too(self, engine: Engine) -> None:
        delegates = [json.loads(SINGLE), {"cniVersion": "0.4.0", "name": "y", "type": "a"}]
        engine.overlay |= {"clusterNetwork": "", "delegates": delegates, "forceCNIVersion": True, "cniVersion": "1.1.0"}
        assert [item.config.cni_version for item in attachments(engine)] == ["1.1.0", "0.4.0"]

    def test_a_network_that_the_pod_chooses_keeps_its_own(self, engine: Engine, node: Path) -> None:
        engine.overlay |= {"forceCNIVersion": True, "cniVersion": "0.3.1"}
        engine.declare(annotations={DEFAULT_NETWORK_ANNOTATION: "web/n1"})
        assert [item.config.cni_version for item in attachments(engine)] == ["1.0.0"]

    @pytest.mark.parametrize("version", ["", "0.5.0", "1", "next"])
    def test_it_must_be_one_that_there_is(self, engine: Engine, node: Path, version: str) -> None:
        engine.overlay |= {"forceCNIVersion": True, "cniVersion": version}
        with pytest.raises(IncompatibleVersionError, match=f"forceCNIVersion is set, and cniVersion is {version!r}"):
            engine.verbs.add(engine.request())


@pytest.mark.weak_spot(13)
class TestListWithoutVersion:
    """CNI SPEC: lists came with 0.3.0, so one without a version is not one of 0.1.0."""

    @pytest.mark.weak_spot(13)
    @pytest.mark.parametrize(
        ("top_level", "expected"), [("", "0.3.1"), ("0.1.0", "0.3.1"), ("0.3.0", "0.3.0"), ("1.1.0", "1.1.0")]
    )
    @pytest.mark.parametrize("way", ["path", "confDir", "definition", "selected", "selected-file", "delegates"])
    def test_it_speaks_ours(self, engine: Engine, node: Path, way: str, top_level: str, expected: str) -> None:
        ways: dict[str, dict[str, Any]] = {
            "path": {"clusterNetwork": str(write(node / "list.conflist", LIST))},
            "confDir": {"clusterNetwork": "listed", "confDir": str(write(node / "c" / "1.conflist", LIST).parent)},
            "definition": {"clusterNetwork": "cluster"},
            "selected": {},
            "selected-file": {"confDir": str(node / "c")},
            "delegates": {"clusterNetwork": "", "delegates": [json.loads(LIST)]},
        }
        engine.overlay |= {"auxiliaryCNIChainName": "", "cniVersion": top_level} | ways[way]
        engine.cluster.put_network(definition("kube-system", "cluster", LIST))
        engine.cluster.put_network(definition("web", "listed", "" if way == "selected-file" else LIST))
        engine.declare("listed" if way.startswith("selected") else None)
        found = [item for item in attachments(engine) if item.config.name == "listed"]
        assert [item.config.cni_version for item in found] == [expected]
        again = record_format.decode(record_format.encode(engine.store.records["c1"])).attachments
        assert [item.config.cni_version for item in again if item.config.name == "listed"] == [expected]

    def test_one_that_names_a_version_keeps_it(self, engine: Engine) -> None:
        engine.cluster.put_network(definition("web", "n1", json.dumps({"cniVersion": "0.2.0"} | json.loads(LIST))))
        engine.declare("n1")
        assert attachments(engine)[1].config.cni_version == "0.2.0"

    def test_a_single_configuration_is_of_the_first_version(self, engine: Engine) -> None:
        engine.cluster.put_network(definition("web", "n1", SINGLE))
        engine.declare("n1")
        config = attachments(engine)[1].config
        fields = conf.plugin_fields(config, config.plugins[0])
        assert json.loads(conf.plugin_stdin(fields, None))["cniVersion"] == "0.1.0"

    def test_plugged_in_there_is_no_top_level(self, engine: Engine) -> None:
        engine.overlay["cniVersion"] = "1.1.0"
        engine.verbs.add_network(engine.plug(network="listed", config=LIST))
        engine.verbs.remove_network(engine.plug("DEL", network="listed", config=LIST))
        assert [(call.verb, call.attachment.config.cni_version) for call in engine.runner.calls] == [
            (verb, "0.3.1") for verb in ("ADD", "DEL")
        ]
