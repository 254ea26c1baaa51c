"""Check which files are elected as the primary network's, and the reasons against the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multus_daemon.spec import netconf
from multus_daemon.spec.cni import conf


@pytest.mark.parametrize(
    "name",
    [
        "10-flannel.conflist", "10-calico.conflist", "05-cilium.conflist", "10-kindnet.conflist", "10-aws.conflist",
        "01-kube-ovn.conflist", "10-ovn-kubernetes.conf", "10-weave.conflist", "00-mycni.conf", "00-mult.conf",
        "10-podman-like.conf", "crio.conf", "zz.conf", "80-openshift-network.conf", "k8s_antrea.conflist",
    ],
)  # fmt: skip
def test_names_of_cluster_networks(name: str) -> None:
    assert netconf.name_problem(name) == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (".10-a.conf", "hidden"),
        (".#10-a.conf", "hidden"),
        ("10-a.json", "ends in neither .conf nor .conflist"),
        *((name, "ends in neither .conf nor .conflist") for name in (
            "10-a.conf.bak", "10-a.conflist~", "10-a.conf.rpmsave", "10-a.conf.rpmnew", "10-a.conf.dpkg-old",
            "10-a.conflist.dpkg-dist", "05-b.conflist.cilium_bak", "10-a.conf.multus_bak", "10-a.conf.swp", "10-a",
            "10-a.conf.tmp123", "calico-kubeconfig", "#10-a.conf#", "README.md", "10-a.CONF",
        )),
        ("00-multus.conf", "a configuration of Multus"),
        ("00-multus-old.conflist", "a configuration of Multus"),
        ("87-podman.conflist", "podman's default network"),
        ("87-podman-bridge.conflist", "podman's default network"),
        ("cni-podman0.conflist", "a network of podman"),
        ("nerdctl-bridge.conflist", "a network of nerdctl"),
        ("100-crio-bridge.conf", "CRI-O's default network"),
        ("100-crio-bridge.conflist", "CRI-O's default network"),
        ("10-crio-bridge.conflist", "CRI-O's default network"),
        ("11-crio-ipv4-bridge.conflist", "CRI-O's default network"),
        ("200-loopback.conf", "the loopback of CRI-O's package"),
        ("99-loopback.conflist", "the loopback of CRI-O's package"),
    ],
)  # fmt: skip
def test_names_that_are_passed_over(name: str, why: str) -> None:
    assert netconf.name_problem(name) == why


def read(config: dict[str, Any]) -> conf.NetworkConfig:
    return conf.parse(json.dumps({"cniVersion": "1.0.0", "name": "n", **config}).encode())


@pytest.mark.parametrize(
    "config",
    [
        {"type": "ptp"},
        {"type": "bridge", "bridge": "cni0"},
        {"plugins": [{"type": "calico"}, {"type": "portmap"}, {"type": "bandwidth"}]},
        {"name": "bridge", "plugins": [{"type": "bridge"}, {"type": "loopback"}]},
        {"type": "ovn-k8s-cni-overlay"},
    ],
)
def test_contents_of_cluster_networks(config: dict[str, Any]) -> None:
    assert netconf.content_problem(read(config), "multus-shim") == ""


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"type": "multus-shim"}, "a configuration of Multus (type multus-shim)"),
        ({"type": "multus"}, "a configuration of Multus (type multus)"),
        ({"type": "multus-other"}, "a configuration of Multus (type multus-other)"),
        ({"plugins": [{"type": "ptp"}, {"type": "multus"}]}, "a configuration of Multus (type multus)"),
        ({"type": "loopback"}, "its first plugin, loopback, makes no interface"),
        ({"plugins": [{"type": "loopback"}]}, "its first plugin, loopback, makes no interface"),
        ({"type": "istio-cni"}, "its first plugin, istio-cni, makes no interface"),
        ({"type": "portmap"}, "its first plugin, portmap, makes no interface"),
        ({"nerdctlID": "17f2", "type": "bridge"}, "a network of nerdctl"),
        ({"name": "podman", "type": "bridge"}, "podman's default network"),
        ({"plugins": [{"type": "bridge", "bridge": "cni-podman1"}]}, "a network of podman"),
        ({"name": "crio", "type": "bridge", "bridge": "cni0"}, "CRI-O's default network"),
        ({"name": "crio-bridge", "type": "bridge"}, "CRI-O's default network"),
    ],
)
def test_contents_that_are_passed_over(config: dict[str, Any], why: str) -> None:
    assert netconf.content_problem(read(config), "multus-other") == why


@pytest.mark.weak_spot(48)
def test_only_what_leads_back_is_refused_where_it_is_named() -> None:
    assert netconf.own_problem(read({"type": "multus-shim"}), "multus-shim") != ""
    assert netconf.own_problem(read({"name": "podman", "type": "bridge"}), "multus-shim") == ""
