"""Files of the node, the state of the node and of the pod's namespace.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.spec import netconf
from tests.reports.conftest import Site

PLAYS: Final = ("Istio CNI", "Talos")

# --- file of the node -------------------------------------------------------------------------------------------------
# A network's object had no configuration, and a file of the node had: the file of that name is used.
# k8snetworkplumbingwg/multus-cni#716.


def test_the_file_is_found_by_the_name_in_it(site: Site) -> None:
    directory = site.node.root / "conf.d"
    directory.mkdir(exist_ok=True)
    config = {"cniVersion": "1.0.0", "name": f"{site.namespace}-lan", "type": site.plugin("macvlan")}
    (directory / f"{site.namespace}.conf").write_text(json.dumps(config))
    site.network(f"{site.namespace}-lan", "")
    site.add(f"{site.namespace}-lan")
    assert site.links() == ["eth0", "net1"]


# --- host link net1 ---------------------------------------------------------------------------------------------------
# The host had a link net1, and a pod got none of that name: names are counted in the pod.
# k8snetworkplumbingwg/multus-cni#353.


def test_the_pod_has_its_own_net1(site: Site) -> None:
    site.node.ip("link", "add", "net1", "type", "bridge")
    try:
        site.network("lan", {"cniVersion": "1.0.0", "type": "ptp", "ipam": site.ipam("10.61.0.0/24")})
        site.add("lan")
        assert site.links() == ["eth0", "net1"]
    finally:
        site.node.ip("link", "delete", "net1")


# --- interface lo -----------------------------------------------------------------------------------------------------
# A runtime asked for an interface `lo`, which the pod has: the ADD fails and names it, and `lo` stays.
# harvester/harvester#210.


def test_the_name_is_taken(site: Site) -> None:
    site.declare()
    answer = site.call("ADD", CNI_IFNAME="lo")
    assert answer.code == 1
    assert "lo" in answer.json["msg"]
    assert site.call("DEL", CNI_IFNAME="lo").code == 0
    assert "lo" in site.node.links(site.netns)


# --- ipv6 disabled ----------------------------------------------------------------------------------------------------
# The runtime had switched IPv6 off in the pod, and an address of both families failed with `Permission denied`:
# both are set. k8snetworkplumbingwg/multus-cni#1141.


def test_both_addresses_are_set(site: Site) -> None:
    site.inside("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1")
    site.network("lan", {"cniVersion": "0.3.1", "type": "ptp", "ipam": site.ipam("10.62.0.0/24", "fd62::/64")})
    site.add("lan")
    (link,) = site.node.ip("address", "show", "net1", netns=site.netns)
    found = {item["local"] for item in link["addr_info"] if item["scope"] == "global"}
    assert found == set(site.status[1]["ips"])
    assert len(found) == 2


# --- name of a file ---------------------------------------------------------------------------------------------------
# `clusterNetwork` was the name of a file, not of the network in it: no network has that name.
# k8snetworkplumbingwg/multus-cni#560.


def test_networks_are_found_by_the_name_in_the_file(tmp_path: Path) -> None:
    config = {"cniVersion": "0.3.1", "name": "mynet", "plugins": [{"type": "bridge"}]}
    (tmp_path / "10-kuberouter.conflist").write_text(json.dumps(config))
    files = NodeConfFiles()
    assert files.by_name(str(tmp_path), "10-kuberouter") is None
    network = files.by_name(str(tmp_path), "mynet")
    assert network == files.at_path(str(tmp_path / "10-kuberouter.conflist"))


# --- namespace not mounted --------------------------------------------------------------------------------------------
# On Talos the daemon did not see the pods' namespaces, and the error spoke of an interface name: the path is named,
# code 8. k8snetworkplumbingwg/multus-cni#1260.


def test_the_path_is_named_and_no_plugin_runs(site: Site) -> None:
    site.vendor("lan")
    site.declare("lan")
    path = "/var/run/netns/cni-e05e22ed-dadf-c935-5239-7eb8b4e13169"
    answer = site.call("ADD", CNI_NETNS=path)
    assert answer.json["code"] == 8
    assert path in answer.json["msg"] + answer.json.get("details", "")
    assert not site.called("lan", "ADD")


# --- network beside multus --------------------------------------------------------------------------------------------
# `clusterNetwork` names a network in the directory of the runtime, where Multus has its own file, and a system
# namespace is empty. Cray-HPE/docs-csm#5956.


def test_the_network_is_found_by_its_name(tmp_path: Path) -> None:
    own: dict[str, object] = {
        "name": "multus-cni-network",
        "cniVersion": "0.3.1",
        "type": "multus",
        "clusterNetwork": "cilium",
    }
    own |= {"confDir": str(tmp_path), "systemNamespaces": [""]}
    (tmp_path / "00-multus.conf").write_text(json.dumps(own))
    cilium = {"type": "cilium-cni", "enable-debug": False, "log-file": "/var/run/cilium/cilium-cni.log"}
    config = {"cniVersion": "0.3.1", "name": "cilium", "plugins": [cilium]}
    (tmp_path / "05-cilium.conflist").write_text(json.dumps(config))
    (tmp_path / "10-weave.conflist.cilium_bak").write_text("{")
    found = netconf.load(json.dumps(own).encode(), {})
    assert found.system_namespaces == ("",)
    network = NodeConfFiles().by_name(found.conf_dir, found.cluster_network)
    assert network is not None
    assert network.type == "cilium-cni"


# --- sidecar injection ------------------------------------------------------------------------------------------------
# Istio's network has no configuration in its object and makes no link: the node's file is used, and the pod is
# healthy. k8snetworkplumbingwg/multus-cni#1238.


def test_add_check_and_del_succeed(site: Site) -> None:
    directory = site.node.root / "conf.d"
    directory.mkdir(exist_ok=True)
    name = f"istio-{site.namespace}"
    config = {"cniVersion": "1.0.0", "name": name, "type": site.plugin("istio-cni", "{}", commands="")}
    (directory / f"YYY-{name}.conf").write_text(json.dumps(config))
    site.network(name, "")
    site.vendor("macvlan")
    site.add(f"macvlan,{site.namespace}/{name}")
    assert site.links() == ["eth0", "net1"]
    assert site.variables("istio-cni")["CNI_IFNAME"] == "net2"
    check = site.call("CHECK")
    assert check.code == 0, check.stdout
    assert site.call("DEL").code == 0
    assert site.called("istio-cni", "DEL")
