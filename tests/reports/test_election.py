"""The choice of the primary network, networks that lead back to Multus.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election, NoPrimaryError
from tests.reports.conftest import Site

PLAYS: Final = ("Calico", "Cilium", "Kube-OVN", "podman")

# --- exclusive cilium -------------------------------------------------------------------------------------------------
# Cilium renamed every other file of the directory, that of Multus too: its own is the primary network.
# k8snetworkplumbingwg/multus-cni#972.


def test_renamed_files_and_those_of_engines_are_passed_over(tmp_path: Path) -> None:
    def put(name: str, network: str, plugin: str) -> None:
        config = {"cniVersion": "0.3.1", "name": network, "plugins": [{"type": plugin}]}
        (tmp_path / name).write_text(json.dumps(config))

    put("00-multus.conf.cilium_bak", "multus-cni-network", "multus-shim")
    put("01-crio-bridge.conflist.cilium_bak", "crio", "bridge")
    put("02-weave.conflist.cilium_bak", "weave", "weave-net")
    put("05-cilium.conflist", "cilium", "cilium-cni")
    (tmp_path / "multus.d").mkdir()
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    assert election.primary().path.name == "05-cilium.conflist"


# --- file of a later number -------------------------------------------------------------------------------------------
# Calico's file sorts behind Cilium's, which is only for additional networks: the operator names the primary one.
# k8snetworkplumbingwg/multus-cni#911.


def test_the_named_file_is_the_primary(tmp_path: Path) -> None:
    for name in ("05-cilium.conf", "10-calico.conf"):
        config = {"cniVersion": "0.3.1", "name": name[3:-5], "type": name[3:-5]}
        (tmp_path / name).write_text(json.dumps(config))
    election = Election(
        tmp_path,
        NodeConfFiles(),
        named="10-calico.conf",
        plugin_type="multus-shim",
        clock=lambda: 0.0,
        ours="00-multus.conf",
    )
    assert election.primary().config.type == "calico"


# --- half written file ------------------------------------------------------------------------------------------------
# The primary network's file was empty or half written when it was read, and 00-multus.conf was left empty: it is
# waited for. k8snetworkplumbingwg/multus-cni#1155.


@pytest.mark.parametrize("content", ["", "{", '{"cniVersion": "0.3.1", "name": "cbr0", "plugins": ['])
def test_it_is_no_primary_until_it_is_whole(tmp_path: Path, content: str) -> None:
    path = tmp_path / "10-flannel.conflist"
    path.write_text(content)
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    with pytest.raises(NoPrimaryError, match="10-flannel.conflist"):
        election.primary()
    path.write_text(json.dumps({"cniVersion": "0.3.1", "name": "cbr0", "plugins": [{"type": "flannel"}]}))
    assert election.primary().config.name == "cbr0"


# --- later file wins the race -----------------------------------------------------------------------------------------
# At boot Kube-OVN wrote its file before Cilium, whose sorts first: the first by name is taken, and a named one at
# once. k8snetworkplumbingwg/multus-cni#1499.


def put(directory: Path, name: str) -> None:
    config = {"cniVersion": "0.3.1", "name": name[3:], "plugins": [{"type": name[3:]}]}
    (directory / f"{name}.conflist").write_text(json.dumps(config))


def test_the_order_of_writing_does_not_count(tmp_path: Path) -> None:
    now = [1000.0]
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: now[0], ours="00-multus.conf"
    )
    put(tmp_path, "10-kube-ovn")
    assert election.primary().path.name == "10-kube-ovn.conflist"
    put(tmp_path, "05-cilium")
    election.primary()
    now[0] += 60
    assert election.primary().path.name == "05-cilium.conflist"


def test_a_named_file_is_waited_for(tmp_path: Path) -> None:
    election = Election(
        tmp_path,
        NodeConfFiles(),
        named="05-cilium.conflist",
        plugin_type="multus-shim",
        clock=lambda: 0.0,
        ours="00-multus.conf",
    )
    put(tmp_path, "10-kube-ovn")
    with pytest.raises(NoPrimaryError, match="05-cilium.conflist"):
        election.primary()


# --- multus under another name ----------------------------------------------------------------------------------------
# An earlier installation left a file of Multus under another name, which became the primary network and called
# itself: it is passed over. k8snetworkplumbingwg/multus-cni#1200.


def test_a_file_of_multus_is_never_the_primary(tmp_path: Path) -> None:
    for name, plugin in (("05-old.conf", "multus"), ("07-shim.conf", "multus-shim"), ("10-flannel.conf", "flannel")):
        config = {"cniVersion": "0.3.1", "name": "multus-cni-network", "type": plugin, "delegates": []}
        (tmp_path / name).write_text(json.dumps(config))
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    assert election.primary().path.name == "10-flannel.conf"


# --- network of multus ------------------------------------------------------------------------------------------------
# A network's plugin was the shim itself, so that each pod asked the daemon again: it is refused by name.
# k8snetworkplumbingwg/multus-cni#1099.


@pytest.mark.parametrize("plugin_type", ["multus-shim", "multus"])
def test_multus_is_not_a_plugin_of_multus(site: Site, plugin_type: str) -> None:
    site.network("inner", {"cniVersion": "0.3.0", "type": plugin_type, "delegate": {"isDefaultGateway": True}})
    message = site.refused("inner")
    assert plugin_type in message
    assert f"{site.namespace}/inner" in message


# --- podman on the node -----------------------------------------------------------------------------------------------
# podman had a network on the node before the cluster's came, and pods got that: networks of engines are never the
# primary one. rancher/rke2#10360.


def test_the_clusters_network_is_waited_for(tmp_path: Path) -> None:
    podman = {"type": "bridge", "bridge": "cni-podman0", "isGateway": True}
    for name, network in (("05-podman.conflist", "podman"), ("cni-podman1.conflist", "mine")):
        config = {"cniVersion": "0.4.0", "name": network, "plugins": [{**podman, "bridge": network}]}
        (tmp_path / name).write_text(json.dumps(config))
    election = Election(
        tmp_path, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    with pytest.raises(NoPrimaryError, match="05-podman.conflist"):
        election.primary()
    config = {"cniVersion": "0.3.1", "name": "k8s-pod-network", "plugins": [{"type": "calico"}]}
    (tmp_path / "99-calico.conflist").write_text(json.dumps(config))
    assert election.primary().path.name == "99-calico.conflist"
