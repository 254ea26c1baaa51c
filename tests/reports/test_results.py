"""Results of third parties.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
import yaml

from multus_daemon.spec.cni import result
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from multus_daemon.spec.nad import network_status
from tests.reports.conftest import Site

PLAYS: Final = ("Amazon VPC CNI", "Calico", "Kube-OVN", "OpenShift SDN", "KubeVirt")

# --- calico status ----------------------------------------------------------------------------------------------------
# Calico named its host link only, without sandbox and indexes: its addresses are the pod's.
# k8snetworkplumbingwg/network-attachment-definition-client#72.


PRINTED = {
    "cniVersion": "0.3.1",
    "interfaces": [{"name": "cali05f4a1849c5"}],
    "ips": [{"version": "4", "address": "10.244.196.152/32"}, {"version": "6", "address": "fd10:244::c497/128"}],
    "dns": {},
}


def test_both_addresses_are_shown_and_the_host_link_is_not() -> None:
    decoded = result.decode(json.dumps(PRINTED).encode(), "0.3.1")
    (entry,) = network_status.entries_for("k8s-pod-network", "eth0", decoded, cluster_network=True)
    assert entry["ips"] == ["10.244.196.152", "fd10:244::c497"]
    assert entry["default"] is True
    assert entry.get("interface") != "cali05f4a1849c5"


# --- dummy of eks -----------------------------------------------------------------------------------------------------
# The VPC plugin of EKS reports a link `dummy` and digits in the sandbox `0`, with a MAC `0`: eth0 stays the
# default. aws/amazon-vpc-cni-k8s#2961.


DUMMY_OF_EKS_PRINTED = {
    "cniVersion": "0.4.0",
    "interfaces": [
        {"name": "pod7240c55beb0"},
        {"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"},
        {"name": "dummy7240c55beb0", "mac": "0", "sandbox": "0"},
    ],
    "ips": [{"version": "4", "interface": 1, "address": "10.24.136.194/32"}],
    "dns": {},
}


def test_the_pod_starts_and_its_result_is_whole(site: Site) -> None:
    site.network(
        "aws-cni", {"cniVersion": "0.4.0", "name": "aws-cni", "type": site.plugin("aws-cni", DUMMY_OF_EKS_PRINTED)}
    )
    result = site.add(default="aws-cni", stdin={"cniVersion": "0.4.0"})
    assert [item["name"] for item in result["interfaces"]] == ["pod7240c55beb0", "eth0", "dummy7240c55beb0"]
    assert [entry["interface"] for entry in site.status if entry["default"]] == ["eth0"]
    assert site.status[0]["ips"] == ["10.24.136.194"]
    assert site.call("DEL").code == 0


# --- empty result -----------------------------------------------------------------------------------------------------
# A VF of DPDK has no address and its plugin an empty result, and the status failed: the pod starts and the network
# is listed. k8snetworkplumbingwg/multus-cni#211.


NULLS = '{"cniVersion": "0.3.1", "interfaces": null, "ips": null, "routes": null, "dns": null}'


@pytest.mark.parametrize("printed", ["{}", "null", '{"cniVersion": "0.3.1", "dns": {}}', NULLS])
def test_the_network_is_listed(site: Site, printed: str) -> None:
    config = {"cniVersion": "0.3.1", "type": site.plugin("sriov", printed, commands="")}
    site.network("dpdk", config)
    site.add("dpdk")
    assert site.status[1]["name"] == f"{site.namespace}/dpdk"
    assert not site.status[1].get("ips")


# --- host link first --------------------------------------------------------------------------------------------------
# The host's end came first in the result, and no entry was the default: links of the host do not count.
# k8snetworkplumbingwg/network-attachment-definition-client#71.


HOST_LINK_FIRST_PRINTED = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "veth12"}, {"name": "eth0", "sandbox": "/n"}, {"name": "eth1", "sandbox": "/n"}],
    "ips": [{"address": "10.0.0.2/24", "gateway": "10.0.0.1", "interface": 1}],
}


def test_the_first_link_of_the_pod_is_the_default() -> None:
    decoded = result.decode(json.dumps(HOST_LINK_FIRST_PRINTED).encode(), "1.0.0")
    entries = network_status.entries_for("net", "eth0", decoded, cluster_network=True)
    assert [(entry["interface"], entry["default"]) for entry in entries] == [("eth0", True), ("eth1", False)]


# --- interface minus one ----------------------------------------------------------------------------------------------
# A plugin marked an address of no interface with the index -1: the address is shown, and the pod starts.
# cni-genie/CNI-Genie#139.


INTERFACE_MINUS_ONE_PRINTED = {
    "interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
    "ips": [{"address": "10.1.0.2/24", "interface": -1}],
}


def test_the_address_is_not_lost(site: Site) -> None:
    site.vendor("net", INTERFACE_MINUS_ONE_PRINTED)
    result = site.add(default="net")
    assert result["ips"][0]["address"] == "10.1.0.2/24"
    assert site.status[0]["ips"] == ["10.1.0.2"]
    assert site.call("DEL").code == 0


# --- interface out of range -------------------------------------------------------------------------------------------
# A plugin left out an interface that its addresses refer to: the pod starts and ends, and its other networks are
# listed. danm-cni/danm#255.


INTERFACE_OUT_OF_RANGE_PRINTED = {
    "interfaces": [{"name": "cali1"}, {"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
    "ips": [{"address": "10.1.0.2/24", "interface": 7}, {"address": "10.1.0.3/24", "interface": 1}],
}


def test_the_pod_starts_and_ends(site: Site) -> None:
    site.vendor("net", INTERFACE_OUT_OF_RANGE_PRINTED)
    site.add("net")
    assert "10.1.0.3" in site.status[1]["ips"]
    assert site.call("CHECK").code == 0
    assert site.call("DEL").code == 0


# --- interface zero ---------------------------------------------------------------------------------------------------
# An address of interface 0 lost its index on the way, as 0 was taken for absent: it is in the result of each
# version. containernetworking/cni#434.


INTERFACE_ZERO_PRINTED = {
    "interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
    "ips": [{"address": "10.1.0.2/24", "interface": 0}],
}


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_the_index_is_there(site: Site, version: str) -> None:
    site.vendor("net", INTERFACE_ZERO_PRINTED)
    result = site.add(default="net", stdin={"cniVersion": version})
    assert result["ips"][0]["interface"] == 0


# --- ips without index ------------------------------------------------------------------------------------------------
# A result had a host link, a link of the pod, and an address of neither: the pod's link has it.
# k8snetworkplumbingwg/network-attachment-definition-client#74.


IPS_WITHOUT_INDEX_PRINTED = {
    "cniVersion": "0.3.1",
    "interfaces": [{"name": "cali1"}, {"name": "eth0", "sandbox": "/var/run/netns/p"}],
    "ips": [{"version": "4", "address": "10.10.66.36/32"}],
}


def test_the_address_is_not_lost_ips_without_index() -> None:
    decoded = result.decode(json.dumps(IPS_WITHOUT_INDEX_PRINTED).encode(), "0.3.1")
    (entry,) = network_status.entries_for("calico", "eth0", decoded, cluster_network=True)
    assert (entry["interface"], entry["ips"], entry["default"]) == ("eth0", ["10.10.66.36"], True)


# --- list without interfaces ------------------------------------------------------------------------------------------
# A network of a list left addresses and no links in its result, and had no entry: it has one, by its name.
# k8snetworkplumbingwg/network-attachment-definition-client#75.


LIST_WITHOUT_INTERFACES_PRINTED = {
    "cniVersion": "0.3.1",
    "ips": [{"version": "4", "address": "11.11.11.2/24"}],
    "dns": {},
}


def test_the_network_has_an_entry_with_its_address() -> None:
    decoded = result.decode(json.dumps(LIST_WITHOUT_INTERFACES_PRINTED).encode(), "0.3.1")
    (entry,) = network_status.entries_for("default/ipvlan-net", "net1", decoded, cluster_network=False)
    assert (entry["name"], entry["ips"], entry["default"]) == ("default/ipvlan-net", ["11.11.11.2"], False)


# --- mac without interface --------------------------------------------------------------------------------------------
# Kube-OVN reported a MAC address of no link of the pod, which consumers took for eth0's: it is shown with its
# interface only. kubeovn/kube-ovn#1636.


def test_no_mac_without_an_interface() -> None:
    found = Result((Interface("", mac="00:00:00:be:39:e2"),), (IpConfig("21.100.0.33/16"),))
    (entry,) = network_status.entries_for("kube-ovn", "eth0", found, cluster_network=True)
    assert entry["ips"] == ["21.100.0.33"]
    assert "mac" not in entry


def test_it_is_shown_with_one() -> None:
    found = Result((Interface("eth0", mac="00:00:00:be:39:e2", sandbox="/n"),), (IpConfig("21.100.0.33/16"),))
    (entry,) = network_status.entries_for("kube-ovn", "eth0", found, cluster_network=True)
    assert (entry["interface"], entry["mac"]) == ("eth0", "00:00:00:be:39:e2")


# --- other link names -------------------------------------------------------------------------------------------------
# A plugin made tap1 although eth1 was asked for: the status shows the links that the result names.
# k8snetworkplumbingwg/multus-cni#901.


OTHER_LINK_NAMES_PRINTED = {
    "cniVersion": "0.4.0",
    "interfaces": [{"name": "tap1", "mac": "02:aa:bb:cc:dd:01", "sandbox": "/n"}],
    "ips": [{"version": "4", "interface": 0, "address": "20.1.1.5/24"}],
}


def test_the_link_of_the_result_is_shown() -> None:
    decoded = result.decode(json.dumps(OTHER_LINK_NAMES_PRINTED).encode(), "0.4.0")
    (entry,) = network_status.entries_for("default/orange", "eth1", decoded, cluster_network=False)
    assert (entry["interface"], entry["ips"], entry["mac"]) == ("tap1", ["20.1.1.5"], "02:aa:bb:cc:dd:01")


# --- result of an old version -----------------------------------------------------------------------------------------
# A plugin of CNI 0.2.0 has no interfaces in its result, and the network had no event and no status: both families
# are listed. k8snetworkplumbingwg/multus-cni#1095.


RESULT_OF_AN_OLD_VERSION_PRINTED = """{"cniVersion": "0.2.0", "dns": {},
 "ip4": {"ip": "10.1.1.2/24", "gateway": "10.1.1.1", "routes": [{"dst": "0.0.0.0/0"}]}, "ip6": {"ip": "fd11::2/64"}}"""


def test_the_network_is_listed_with_its_addresses(site: Site) -> None:
    site.network(
        "weave",
        {"cniVersion": "0.2.0", "name": "weave", "type": site.plugin("weave", RESULT_OF_AN_OLD_VERSION_PRINTED)},
    )
    site.add("weave")
    entry = site.status[1]
    assert (entry["name"], entry["interface"]) == (f"{site.namespace}/weave", "net1")
    assert entry["ips"] == ["10.1.1.2", "fd11::2"]


# --- routes without gateway -------------------------------------------------------------------------------------------
# OpenShift SDN's routes had no gateway for multicast, and the status crashed: only gateways of default routes are
# shown. k8snetworkplumbingwg/multus-cni#481.


ROUTES_WITHOUT_GATEWAY_PRINTED = {
    "cniVersion": "0.3.1",
    "interfaces": [{"name": "eth0", "sandbox": "/proc/20411/ns/net"}],
    "ips": [{"version": "4", "interface": 0, "address": "10.129.0.18/23"}],
    "routes": [{"dst": "0.0.0.0/0", "gw": "10.129.0.1"}, {"dst": "224.0.0.0/4"}, {"dst": "::/0"}],
    "dns": {},
}


@pytest.mark.weak_spot(22)
def test_the_gateway_is_shown_and_nothing_for_routes_without() -> None:
    decoded = result.decode(json.dumps(ROUTES_WITHOUT_GATEWAY_PRINTED).encode(), "0.3.1")
    (entry,) = network_status.entries_for("openshift-sdn", "eth0", decoded, cluster_network=True)
    assert entry["gateway"] == ["10.129.0.1"]
    assert "nil" not in network_status.render([entry])


# --- several defaults -------------------------------------------------------------------------------------------------
# The cluster network made two links in the pod, and both were its default: one entry is.
# k8snetworkplumbingwg/network-attachment-definition-client#69.


SEVERAL_DEFAULTS_PRINTED = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "eth0", "sandbox": "/n"}, {"name": "ovn-udn1", "sandbox": "/n"}],
    "ips": [
        {"address": "10.244.1.9/24", "gateway": "10.244.1.1", "interface": 0},
        {"address": "10.128.0.7/16", "gateway": "10.128.0.1", "interface": 1},
    ],
}


def test_one_is_the_default() -> None:
    decoded = result.decode(json.dumps(SEVERAL_DEFAULTS_PRINTED).encode(), "1.0.0")
    entries = network_status.entries_for("ovn-kubernetes", "eth0", decoded, cluster_network=True)
    assert [(entry["interface"], entry["ips"], entry["default"]) for entry in entries] == [
        ("eth0", ["10.244.1.9"], True),
        ("ovn-udn1", ["10.128.0.7"], False),
    ]


# --- status written once ----------------------------------------------------------------------------------------------
# The status was in two annotations, one with a misspelt key: it is in that of the specification only.
# k8snetworkplumbingwg/multus-cni#468.


def test_one_annotation(site: Site) -> None:
    site.add()
    path = site.node.manifests / "status" / site.namespace / f"{site.pod}.yaml"
    written = yaml.safe_load(path.read_text())["metadata"]["annotations"]
    assert list(written) == ["k8s.v1.cni.cncf.io/network-status"]


# --- two of eth0 ------------------------------------------------------------------------------------------------------
# The passt binding of KubeVirt reports eth0 a second time, as another network: both entries stay as they are.
# kubevirt/community#324.


def entry(name: str, default: bool) -> list[dict[str, Any]]:
    found = Result((Interface("eth0", sandbox="/n"),), (IpConfig("10.244.1.9/24", interface=0),))
    return network_status.entries_for(name, "eth0", found, cluster_network=default)


def test_the_status_does_not_change_by_itself() -> None:
    own = entry("cluster-network", True) + entry("default/binding-passt", False)
    assert [item["default"] for item in own] == [True, False]
    shown = network_status.parse(network_status.render(own))
    assert network_status.brought_up_to_date(shown, own, there={"eth0"}) is None


# --- vlan children ----------------------------------------------------------------------------------------------------
# One ADD made a link and VLANs on it, and all addresses were shown on one: each link has its own.
# k8snetworkplumbingwg/network-attachment-definition-client#36.


VLAN_CHILDREN_PRINTED = {
    "cniVersion": "1.0.0",
    "interfaces": [
        {"name": "vethab", "mac": "02:00:00:00:00:01"},
        {"name": "net1", "mac": "02:00:00:00:00:02", "sandbox": "/n"},
        {"name": "net1.100", "mac": "02:00:00:00:00:02", "sandbox": "/n"},
    ],
    "ips": [{"address": "10.1.0.2/24", "interface": 1}, {"address": "10.1.100.2/24", "interface": 2}],
}


def test_each_link_has_an_entry() -> None:
    decoded = result.decode(json.dumps(VLAN_CHILDREN_PRINTED).encode(), "1.0.0")
    entries = network_status.entries_for("default/trunk", "net1", decoded, cluster_network=False)
    assert [(entry["interface"], entry["ips"]) for entry in entries] == [
        ("net1", ["10.1.0.2"]),
        ("net1.100", ["10.1.100.2"]),
    ]
