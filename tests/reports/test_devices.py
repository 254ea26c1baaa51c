"""Devices of a pod.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from multus_daemon.cluster.devices import read_checkpoint
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad import device_info, network_status
from tests.reports.conftest import RESOURCE, Site

PLAYS: Final = ("KubeVirt", "sriov-network-device-plugin")

# --- checkpoint by numa -----------------------------------------------------------------------------------------------
# Kubernetes 1.21 lists the ids of a pod's devices by NUMA node, and older ones in one list: both are read.
# k8snetworkplumbingwg/multus-cni#665.


@pytest.mark.parametrize("ids", [["d1", "d0"], {"0": ["d1"], "1": ["d0"]}, {"-1": ["d0", "d1"], "0": None}])
def test_both_shapes(tmp_path: Path, ids: object) -> None:
    entry = {
        "PodUID": "u1",
        "ContainerName": "c",
        "ResourceName": "intel.com/sriov",
        "DeviceIDs": ids,
        "AllocResp": "Cg==",
    }
    data = {"PodDeviceEntries": [entry], "RegisteredDevices": {"intel.com/sriov": ["d0", "d1"]}}
    path = tmp_path / "kubelet_internal_checkpoint"
    path.write_text(json.dumps({"Data": data, "Checksum": 1}))
    pod = Pod(Namespace("default"), PodName("p"), PodUid("u1"))
    assert sorted(read_checkpoint(path, pod)) == [("intel.com/sriov", "d0"), ("intel.com/sriov", "d1")]


# --- host device allocation -------------------------------------------------------------------------------------------
# host-device knows a device by `pciBusID` and not by `deviceID`: a device plugin's choice is in both.
# k8snetworkplumbingwg/sriov-network-device-plugin#188.


def test_both_keys_name_the_device(site: Site) -> None:
    site.vendor("host-device")
    config = {"cniVersion": "0.3.1", "type": site.plugin("host-device"), "ipam": {}}
    site.network("sriov-host", config, **{RESOURCE: "intel.com/pool_a"})
    site.allocate({"intel.com/pool_a": ["0000:00:07.0"], "intel.com/pool_b": ["0000:00:08.0"]})
    site.add("sriov-host")
    given = site.given("host-device")
    assert (given["deviceID"], given["pciBusID"], given["ipam"]) == ("0000:00:07.0", "0000:00:07.0", {})


# --- no device allocated ----------------------------------------------------------------------------------------------
# A pod did not ask for the resource of its network, and the plugin complained of an address: the missing resource
# is named. k8snetworkplumbingwg/sriov-network-device-plugin#258.


def test_the_error_of_the_plugin_names_the_resource(site: Site) -> None:
    fails = """echo '{"cniVersion":"1.0.0","code":100,"msg":"VF pci addr is required"}'; exit 1"""
    config = {"cniVersion": "0.3.1", "type": site.plugin("sriov", commands=fails)}
    site.network("sriov", config, **{RESOURCE: "intel.com/sriov_netdevice"})
    site.allocate({"nvidia.com/gpu": ["g0"]})
    message = site.refused("sriov")
    assert "VF pci addr is required" in message
    assert "no device of intel.com/sriov_netdevice" in message
    assert "nvidia.com/gpu" in message


# --- resource of a marker ---------------------------------------------------------------------------------------------
# KubeVirt's networks name the resource of a bridge, which the node's status counts and no device plugin serves: the
# pod starts without a device. kubevirt/cluster-network-addons-operator#244.


def test_a_built_in_bridge_is_called_without_a_device(site: Site) -> None:
    plugins = [{"type": "bridge", "bridge": f"br-{site.namespace}", "ipam": {}}, {"type": "tuning"}]
    config = {"cniVersion": "0.3.1", "plugins": plugins}
    site.network("br1", config, **{RESOURCE: "bridge.network.kubevirt.io/br1"})
    site.allocate({})
    site.add("br1,br1")
    assert site.links() == ["eth0", "net1", "net2"]
    assert site.call("CHECK").code == 0
    assert site.call("DEL").code == 0


@pytest.mark.parametrize("others", [{}, {"nvidia.com/gpu": ["g0"]}])
def test_a_binary_gets_the_configuration_of_its_network(site: Site, others: dict[str, list[str]]) -> None:
    config = {"cniVersion": "0.3.1", "type": site.plugin("ovs"), "bridge": "br1", "vlan": 100}
    site.network("ovs-conf", config, **{RESOURCE: "ovs-cni.network.kubevirt.io/br1"})
    site.allocate(others)
    site.add("ovs-conf")
    assert site.given("ovs") == {**config, "name": "ovs-conf"}


# --- user space device ------------------------------------------------------------------------------------------------
# A host device with a driver of user space has no link, and its entry had no interface: the entry has the name of
# the call. containernetworking/plugins#1147.


def test_the_entry_has_the_interface_and_the_device() -> None:
    pci = device_info.parse(b'{"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:07:00.0"}}')
    (entry,) = network_status.entries_for("sriramy/net-a", "net1", Result(), cluster_network=False, device_info=pci)
    assert entry["interface"] == "net1"
    assert entry["device-info"]["pci"] == {"pci-address": "0000:07:00.0"}
