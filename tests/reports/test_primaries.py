"""Configurations of primary networks.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.node.primary.election import Election
from multus_daemon.spec.netconf import generate
from tests.reports.conftest import Site

PLAYS: Final = ("Amazon VPC CNI", "Azure CNI", "flannel", "GKE's list")


def elected(file: Path, config: dict[str, Any], capabilities: dict[str, bool]) -> None:
    """Check that the file's network is the primary, and that what is generated has its capabilities and version."""
    file.write_text(json.dumps(config))
    election = Election(
        file.parent, NodeConfFiles(), named="", plugin_type="multus-shim", clock=lambda: 0.0, ours="00-multus.conf"
    )
    primary = election.primary()
    found = json.loads(generate({}, primary.config, str(primary.path)))
    assert (found["capabilities"], found["cniVersion"]) == (capabilities, config["cniVersion"])


# --- aws conflist -----------------------------------------------------------------------------------------------------
# The list of Amazon's VPC plugin has an egress plugin of its own and host ports: it is the primary network.
# k8snetworkplumbingwg/multus-cni#688.


CONFIG = {
    "cniVersion": "0.4.0",
    "name": "aws-cni",
    "disableCheck": True,
    "plugins": [
        {
            "name": "aws-cni",
            "type": "aws-cni",
            "vethPrefix": "eni",
            "mtu": "9001",
            "podSGEnforcingMode": "strict",
            "pluginLogFile": "/var/log/aws-routed-eni/plugin.log",
            "pluginLogLevel": "DEBUG",
        },
        {
            "name": "egress-cni",
            "type": "egress-cni",
            "mtu": "9001",
            "enabled": "false",
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "fd00::ac:00/118"}]]},
        },
        {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True},
    ],
}


def test_it_is_elected_and_its_capabilities_are_passed(tmp_path: Path) -> None:
    elected(tmp_path / "10-aws.conflist", CONFIG, {"portMappings": True})


# --- azure conflist ---------------------------------------------------------------------------------------------------
# Azure's list has capitals in `dns`, a capability `dns`, and an IPAM that is inside the plugin: pods get it.
# Azure/azure-container-networking#2281.


AZURE_CONFLIST_CONFIG: dict[str, Any] = {
    "cniVersion": "0.3.0",
    "name": "azure",
    "adapterName": "",
    "plugins": [
        {
            "type": "azure-vnet",
            "mode": "bridge",
            "bridge": "azure0",
            "capabilities": {"portMappings": True, "dns": True},
            "ipam": {"type": "azure-cns", "mode": "overlay"},
            "dns": {"Nameservers": ["10.0.0.10"], "Search": ["svc.cluster.local"]},
        }
    ],
}


def test_it_is_elected_and_its_capabilities_are_passed_azure_conflist(tmp_path: Path) -> None:
    elected(tmp_path / "10-azure.conflist", AZURE_CONFLIST_CONFIG, {"dns": True, "portMappings": True})


def test_an_ipam_that_is_not_a_binary(site: Site) -> None:
    config = {
        "cniVersion": "0.3.0",
        "name": "azure",
        "plugins": [{**AZURE_CONFLIST_CONFIG["plugins"][0], "type": site.plugin("azure")}],
    }
    site.network("azure", config)
    site.add(default="azure")
    assert site.links() == ["eth0"]
    assert site.given("azure")["ipam"] == {"type": "azure-cns", "mode": "overlay"}
    assert site.call("DEL").code == 0


# --- flannel conflist -------------------------------------------------------------------------------------------------
# Flannel's list, as its package ships it, is the primary network. k8snetworkplumbingwg/multus-cni#392.


FLANNEL_CONFLIST_CONFIG = {
    "name": "cbr0",
    "cniVersion": "0.3.1",
    "plugins": [
        {"type": "flannel", "delegate": {"hairpinMode": True, "isDefaultGateway": True}},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


def test_it_is_elected_and_its_capabilities_are_passed_flannel_conflist(tmp_path: Path) -> None:
    elected(tmp_path / "10-flannel.conflist", FLANNEL_CONFLIST_CONFIG, {"portMappings": True})


# --- gke conflist -----------------------------------------------------------------------------------------------------
# GKE's list uses ptp with an MTU, and host ports: it is the primary network. k8snetworkplumbingwg/multus-cni#628.


GKE_CONFLIST_CONFIG = {
    "name": "k8s-pod-network",
    "cniVersion": "0.3.1",
    "plugins": [
        {
            "type": "ptp",
            "mtu": 1460,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.8.1.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]},
        },
        {"type": "portmap", "capabilities": {"portMappings": True}, "noSnat": True},
    ],
}


def test_it_is_elected_and_its_capabilities_are_passed_gke_conflist(tmp_path: Path) -> None:
    elected(tmp_path / "10-gke-ptp.conflist", GKE_CONFLIST_CONFIG, {"portMappings": True})
