"""Configurations of the daemon.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import json

import pytest

from multus_daemon import settings
from multus_daemon.spec import netconf

# --- delegates of flannel ---------------------------------------------------------------------------------------------
# A configuration by hand has delegates with a list of CNI 0.2.0, an indicator, and no version of its own: it is
# read. k8snetworkplumbingwg/multus-cni#491.


def test_the_list_is_the_cluster_network() -> None:
    flannel = {"type": "flannel", "delegate": {"hairpinMode": True, "isDefaultGateway": True}}
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    config = {
        "name": "multus-cni-network",
        "type": "multus",
        "readinessindicatorfile": "/var/run/flannel/subnet.env",
        "delegates": [{"cniVersion": "0.2.0", "name": "cbr0", "plugins": [flannel, portmap]}],
        "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig",
    }
    found = netconf.load(json.dumps(config).encode(), {})
    assert [(item.name, item.cni_version, item.type) for item in found.delegates] == [("cbr0", "0.2.0", "flannel")]
    assert found.delegates[0].capabilities == {"portMappings"}


# --- k3s configuration ------------------------------------------------------------------------------------------------
# A daemon on k3s had the paths of its container, `kubeconfig` and `clusterNetwork` as a file in its configuration:
# all are taken. k8snetworkplumbingwg/multus-cni#1071.


def test_every_key_counts() -> None:
    given = {
        "chrootDir": "/hostroot",
        "confDir": "/host/etc/cni/net.d",
        "logLevel": "debug",
        "socketDir": "/host/run/multus/",
        "cniVersion": "1.0.0",
        "cniConfigDir": "/host/etc/cni/net.d",
        "multusConfigFile": "auto",
        "multusAutoconfigDir": "/host/etc/cni/net.d",
        "clusterNetwork": "/host/etc/cni/net.d/10-flannel.conflist",
        "kubeconfig": "/host/etc/cni/net.d/multus.d/multus.kubeconfig",
    }
    found = settings.from_object(given, "daemon-config.json")
    assert found.warnings == ()
    assert {key: found.effective()[key] for key in given} == given
    assert found.overlay["clusterNetwork"] == given["clusterNetwork"]


# --- keys in any case -------------------------------------------------------------------------------------------------
# Configurations of the first releases have `LogLevel` and `LogFile` with capitals: keys match in any case, and so
# does the level. k8snetworkplumbingwg/multus-cni#211.


@pytest.mark.parametrize("level", ["debug", "DEBUG", "Debug"])
def test_log_level_and_file(level: str) -> None:
    found = settings.parse(f'{{"LogLevel": "{level}", "LogFile": "/var/log/multus.log"}}'.encode(), "test")
    assert (found.logs.level, found.logs.file) == ("debug", "/var/log/multus.log")


# --- openshift configuration ------------------------------------------------------------------------------------------
# OpenShift's daemon isolates namespaces, lists those that are open, and waits for the file of OVN-Kubernetes: every
# key counts. openshift/cluster-network-operator#2721.


def test_every_key_counts_openshift_configuration() -> None:
    given = {
        "cniVersion": "0.3.1",
        "chrootDir": "/hostroot",
        "logToStderr": True,
        "logLevel": "verbose",
        "binDir": "/var/lib/cni/bin",
        "cniConfigDir": "/host/etc/cni/net.d",
        "multusConfigFile": "auto",
        "multusAutoconfigDir": "/host/run/multus/cni/net.d",
        "namespaceIsolation": True,
        "globalNamespaces": "default,openshift-multus,openshift-sriov-network-operator",
        "readinessindicatorfile": "/host/run/multus/cni/net.d/10-ovn-kubernetes.conf",
        "daemonSocketDir": "/run/multus/socket",
        "socketDir": "/host/run/multus/socket",
    }
    found = settings.from_object(given, "daemon-config.json")
    assert found.warnings == ()
    assert {key: found.effective()[key] for key in given} == given
    rules = netconf.load(b"{}", found.overlay)
    assert rules.allows("mine", "openshift-multus")
    assert not rules.allows("mine", "other")
