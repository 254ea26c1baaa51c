"""Keys and values of a selection element, namespaces of networks.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

from typing import Final

import pytest

from multus_daemon.spec import netconf
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection
from tests.reports.conftest import Site

PLAYS: Final = ("KubeVirt", "InfiniBand plugins")

# --- address of each family -------------------------------------------------------------------------------------------
# One element asked for an IPv4 and an IPv6 address of a network of both: the pod has both.
# k8snetworkplumbingwg/multus-cni#647.


def test_both_are_given(site: Site) -> None:
    config = {"cniVersion": "1.0.0", "type": "ptp", "capabilities": {"ips": True}}
    site.network("dual", {**config, "ipam": site.ipam("10.254.0.0/24", "fd17:d84:5c7::/64")})
    site.add('[{"name": "dual", "interface": "net1", "ips": ["10.254.0.22", "fd17:d84:5c7::8"]}]')
    assert site.status[1]["ips"] == ["10.254.0.22", "fd17:d84:5c7::8"]


# --- cni args ---------------------------------------------------------------------------------------------------------
# Values for a plugin's `args.cni` were wanted for one pod: they join those of the network.
# containernetworking/plugins#361.


def test_they_are_merged(site: Site) -> None:
    site.vendor("sample", args={"cni": {"ips": ["192.168.122.177"], "kept": 1}, "labels": []})
    site.add('[{"name": "sample", "cni-args": {"ips": ["192.168.122.178"], "vlan": 5}}]')
    assert site.given("sample")["args"] == {
        "cni": {"ips": ["192.168.122.178"], "kept": 1, "vlan": 5},
        "labels": [],
    }


# --- global namespaces ------------------------------------------------------------------------------------------------
# An operator's networks live in a namespace of their own while isolation is on: listed namespaces are open to all.
# k8snetworkplumbingwg/multus-cni#567.


ISOLATED = {"clusterNetwork": "x", "namespaceIsolation": True}


@pytest.mark.parametrize(
    ("listed", "target", "allowed"),
    [
        ("", "default", True),
        ("", "openshift-multus", False),
        ("default,openshift-multus", "openshift-multus", True),
        ("default, openshift-sriov-network-operator", "openshift-sriov-network-operator", True),
        ("openshift-multus", "default", False),
        ("openshift-multus", "foo", True),
    ],
)
def test_a_pod_of_foo(listed: str, target: str, allowed: bool) -> None:
    rules = netconf.load(b"{}", {**ISOLATED, **({"globalNamespaces": listed} if listed else {})})
    assert rules.allows("foo", target) is allowed


# --- guid -------------------------------------------------------------------------------------------------------------
# InfiniBand ports are known by 8-byte GUIDs, which `mac` cannot hold: the key of their own is a capability.
# k8snetworkplumbingwg/multi-net-spec#4.


GUID = "02:00:00:00:00:00:00:01"


def test_a_guid_is_passed_on() -> None:
    (found,) = selection.parse(f'[{{"name": "ib", "infiniband-guid": "{GUID}"}}]', pod_namespace="default")
    assert found.capability_args() == {"infinibandGUID": GUID}


def test_an_ethernet_address_is_no_guid() -> None:
    with pytest.raises(CniError, match="8 bytes"):
        selection.parse('[{"name": "ib", "infiniband-guid": "02:00:00:00:00:01"}]', pod_namespace="default")


# --- hashed names -----------------------------------------------------------------------------------------------------
# KubeVirt asks for interfaces named by a hash of the network, in any order: each network has the name it was given.
# kubevirt/kubevirt#8899.


NAMES = {"blue": "pod16477688c0e", "red": "podb1f51a511f1"}


def test_each_has_its_name(site: Site) -> None:
    elements = [
        f'{{"name": "{name}", "namespace": "{site.namespace}", "interface": "{link}"}}' for name, link in NAMES.items()
    ]
    for name in NAMES:
        site.vendor(name)
    site.add(f"[{','.join(elements)}]")
    shown = {entry["name"]: entry["interface"] for entry in site.status[1:]}
    assert shown == {f"{site.namespace}/{name}": link for name, link in NAMES.items()}
    assert site.links() == ["eth0", *sorted(NAMES.values())]


# --- ipam claim -------------------------------------------------------------------------------------------------------
# A persistent address was wanted from an IPAMClaim: the reference is taken, and excludes addresses.
# rook/rook#16840.


CLAIM = '"ipam-claim-reference": "mon-a"'


def test_the_reference_is_read() -> None:
    (found,) = selection.parse(f'[{{"name": "public", {CLAIM}}}]', pod_namespace="rook")
    assert (found.ipam_claim_reference, found.unknown) == ("mon-a", ())


def test_addresses_exclude_it() -> None:
    with pytest.raises(CniError, match="exclude each other"):
        selection.parse(f'[{{"name": "public", "ips": ["10.0.0.5/24"], {CLAIM}}}]', pod_namespace="rook")


# --- mac request ------------------------------------------------------------------------------------------------------
# Elements of before the specification had `interfaceRequest`, which works, and `macRequest`, which never did: the
# key is named. k8snetworkplumbingwg/multus-cni#266.


def test_the_interface_counts_and_the_other_key_is_named() -> None:
    text = '[{"name": "macvlan", "interfaceRequest": "mgmt", "macRequest": "aa:bb:cc:dd:ee:ff"}]'
    (found,) = selection.parse(text, pod_namespace="default")
    assert (found.interface, found.mac) == ("mgmt", "")
    assert len(found.unknown) == 1
    assert "macRequest" in found.unknown[0]


# --- same network twice -----------------------------------------------------------------------------------------------
# A pod named one network twice, which is also its default network: each mention is an interface.
# k8snetworkplumbingwg/multus-cni#618.


def test_each_mention_is_an_interface(site: Site) -> None:
    site.vendor("lan")
    site.add("lan,lan", default="lan")
    assert site.links() == ["eth0", "net1", "net2"]
    assert [(entry["name"], entry["interface"]) for entry in site.status] == [
        (f"{site.namespace}/lan", name) for name in ("eth0", "net1", "net2")
    ]


# --- type in element --------------------------------------------------------------------------------------------------
# An element had two addresses, two gateways and a key `type` that no specification has: both families are kept.
# k8snetworkplumbingwg/multus-cni#847.


def test_both_families_are_requested() -> None:
    text = (
        '[{"ips":["2605:d9c0:6:2003::5675/64","198.32.43.120/27"],'
        '"default-route":["2605:d9c0:6:2003::1","198.32.43.97"],"name":"v2003","type":"multus"}]'
    )
    (found,) = selection.parse(text, pod_namespace="default")
    assert found.capability_args() == {"ips": ["2605:d9c0:6:2003::5675/64", "198.32.43.120/27"]}
    assert found.default_route == ("2605:d9c0:6:2003::1", "198.32.43.97")
    assert len(found.unknown) == 1


# --- underscore interface ---------------------------------------------------------------------------------------------
# An interface name with an underscore was refused as if it were a DNS label: the kernel's rules hold.
# k8snetworkplumbingwg/multus-cni#1243.


@pytest.mark.parametrize("name", ["uplink_p0", "Eth1", "bond0.100", "a-b_c@d"])
def test_the_kernel_decides(name: str) -> None:
    (found,) = selection.parse(f'[{{"name": "sriov", "interface": "{name}"}}]', pod_namespace="default")
    assert found.interface == name


@pytest.mark.parametrize("name", ["a" * 16, "a/b", "a b", ".."])
def test_what_no_link_can_have(name: str) -> None:
    with pytest.raises(CniError, match="interface"):
        selection.parse(f'[{{"name": "sriov", "interface": "{name}"}}]', pod_namespace="default")
