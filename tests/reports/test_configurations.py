"""Incomplete and malformed configurations.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import pytest

from multus_tools import validate
from tests.reports.conftest import RESOURCE, Site

# --- colon in key -----------------------------------------------------------------------------------------------------
# The second plugin of a list had the key `type:`: the list is refused at that plugin, before the first one runs.
# k8snetworkplumbingwg/multus-cni#1351.


def test_the_plugin_is_named_and_nothing_ran(site: Site) -> None:
    plugins = [{"type": site.plugin("bridge")}, {"type:": "vrf", "vrfname": "blue"}]
    site.network("br0", {"cniVersion": "0.3.1", "name": "br0", "plugins": plugins})
    assert "plugins[1]: 'type' is missing" in site.refused("br0")
    assert not site.called("bridge", "ADD")


# --- comma missing ----------------------------------------------------------------------------------------------------
# A configuration lacked a comma between two keys, and the address in it seemed ignored: the place of the fault is
# named. k8snetworkplumbingwg/multus-cni#278.


def test_line_and_network_are_named(site: Site) -> None:
    site.network("macvlan-1g", '{\n  "cniVersion": "0.3.0",\n  "name": "macvlan-1g"\n  "type": "macvlan"\n}')
    message = site.refused("macvlan-1g")
    assert "line 4" in message
    assert f"{site.namespace}/macvlan-1g" in message


# --- config without name ----------------------------------------------------------------------------------------------
# A configuration had no name, and its plugin refused it: it has that of its object. redhat-nfvpe/kube-ansible#232.


def test_the_plugin_gets_the_name_of_the_object(site: Site) -> None:
    site.network("macvlan-conf", {"cniVersion": "0.3.0", "type": site.plugin("macvlan")})
    site.add("macvlan-conf")
    assert site.given("macvlan")["name"] == "macvlan-conf"


# --- configuration as object ------------------------------------------------------------------------------------------
# `spec.config` was YAML instead of a text, which the API server refuses without a reason: the check says it.
# Mellanox/network-operator#100.


NETWORK = b"""
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {name: antrea}
spec:
  config: {cniVersion: 0.3.0, name: antrea, plugins: [{type: antrea}]}
"""


def test_a_text_is_asked_for() -> None:
    (finding,) = validate.of([("net.yaml", NETWORK)]).findings
    assert (finding.severity, finding.key, finding.place.line) == ("error", "spec.config", 6)


# --- device in list ---------------------------------------------------------------------------------------------------
# A device was allocated for a network whose configuration is a list without a version: each plugin gets it.
# k8snetworkplumbingwg/multus-cni#289.


DEVICE = "0000:03:02.3"


def test_the_first_plugin_gets_the_device(site: Site) -> None:
    plugins = [{"type": site.plugin("sriov")}]
    site.network("sriov-net1", {"name": "sriov-network", "plugins": plugins}, **{RESOURCE: "intel.com/sriov"})
    site.allocate({"intel.com/sriov": [DEVICE]})
    site.add("sriov-net1")
    assert (site.given("sriov")["deviceID"], site.given("sriov")["pciBusID"]) == (DEVICE, DEVICE)


# --- no ipam ----------------------------------------------------------------------------------------------------------
# A virtual machine has its address from cloud-init, so that `ipam` is an empty object: the link has none.
# kubevirt/kubevirt#4564.


def test_the_link_is_a_port_without_address(site: Site) -> None:
    bridge = f"br-{site.namespace}"
    site.network("vlan", {"cniVersion": "0.3.1", "name": "vlan", "type": "bridge", "bridge": bridge, "ipam": {}})
    site.add("vlan")
    assert site.links() == ["eth0", "net1"]
    assert not site.status[1].get("ips")
    assert site.call("DEL").code == 0


# --- plugged without name ---------------------------------------------------------------------------------------------
# A network whose configuration has no name was hot-plugged into a pod without networks, and could not be taken out:
# both work. k8snetworkplumbingwg/multus-dynamic-networks-controller#52.


def test_it_comes_and_goes(site: Site) -> None:
    site.network("tenant", {"cniVersion": "0.3.1", "type": site.plugin("tenant")})
    site.add()
    status, body = site.plug("ADD", "tenant", "ens58")
    assert status == 200, body
    assert site.plug("DEL", "tenant", "ens58")[0] == 200
    assert site.called("tenant", "DEL")


# --- range of five numbers --------------------------------------------------------------------------------------------
# A range began at an address of five numbers: the ADD fails with the value, and leaves nothing.
# k8snetworkplumbingwg/multus-cni#240.


def test_the_value_is_named(site: Site) -> None:
    ipam = {"type": "host-local", "subnet": "10.205.28.0/24", "rangeStart": "10.205.28.14.200"}
    site.network("lan", {"cniVersion": "0.3.0", "type": "bridge", "bridge": "br-range", "ipam": ipam})
    assert "10.205.28.14.200" in site.refused("lan")
    assert "br-range" not in site.node.links()


# --- trailing comma in config -----------------------------------------------------------------------------------------
# A configuration ended with a comma, or had a comment or a byte order mark: Go's JSON has none, and the place is
# named. k8snetworkplumbingwg/multus-cni#731.


PLUGIN = '"cniVersion": "0.4.0", "type": "ovs", "bridge": "br1"'


@pytest.mark.parametrize(
    "text",
    [f"{{{PLUGIN},}}", f"{{ // a bridge\n{PLUGIN}}}", f"\ufeff{{{PLUGIN}}}", f"{{{PLUGIN}}} x", "{'type': 'ovs'}"],
)
def test_the_network_and_the_place_are_named(site: Site, text: str) -> None:
    site.network("bgp", text)
    message = site.refused("bgp")
    assert f"{site.namespace}/bgp" in message
    assert "column" in message


# --- whole runtime config ---------------------------------------------------------------------------------------------
# A runtime without a version in the configuration of Multus found no network: a version is implied.
# k8snetworkplumbingwg/multus-cni#654.


def test_the_pod_starts_and_ends(site: Site) -> None:
    printed = {
        "interfaces": [{"name": "eth0", "sandbox": "$CNI_NETNS"}],
        "ips": [{"address": "10.5.0.2/24", "interface": 0}],
    }
    site.vendor("flannel", printed)
    result = site.add(default="flannel", stdin={"cniVersion": None})
    assert result["ip4"]["ip"] == "10.5.0.2/24"
    assert site.call("DEL", {"cniVersion": None}).code == 0
