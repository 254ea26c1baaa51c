"""Capability arguments, keys for plugins only.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import json
from typing import Final

from multus_daemon.spec.cni import conf
from multus_daemon.spec.netconf import generate
from tests.reports.conftest import Site

PLAYS: Final = ("Calico", "k3s")

# --- annotations capability -------------------------------------------------------------------------------------------
# A runtime passed the pod's annotations as a capability that Multus did not know: the cluster network gets it.
# k8snetworkplumbingwg/multus-cni#869.


KEY = "io.kubernetes.cri.pod-annotations"


def test_any_capability_reaches_a_plugin_that_declares_it(site: Site) -> None:
    site.vendor("vpc", capabilities={KEY: True})
    site.add(default="vpc", stdin={"runtimeConfig": {KEY: {"a/b": "c"}, "portMappings": []}})
    assert site.given("vpc")["runtimeConfig"] == {KEY: {"a/b": "c"}}


# --- bandwidth of runtime ---------------------------------------------------------------------------------------------
# The bandwidth of a pod's annotation came to the runtime, and not to Calico's chain: the plugin that declares it
# gets it. k8snetworkplumbingwg/multus-cni#949.


LIMITS = {"ingressRate": 10_000_000, "ingressBurst": 1, "egressRate": 20_000_000, "egressBurst": 1}


def test_the_cluster_network_gets_it_and_others_do_not(site: Site) -> None:
    shaper = {"type": site.plugin("bandwidth", commands=""), "capabilities": {"bandwidth": True}}
    calico = {"type": site.plugin("calico"), "log_level": "info"}
    site.network("k8s-pod-network", {"cniVersion": "0.3.1", "name": "k8s-pod-network", "plugins": [calico, shaper]})
    site.vendor("second", capabilities={"bandwidth": True})
    site.add("second", default="k8s-pod-network", stdin={"runtimeConfig": {"bandwidth": LIMITS}})
    assert site.given("bandwidth")["runtimeConfig"] == {"bandwidth": LIMITS}
    assert "runtimeConfig" not in site.given("calico")
    assert "runtimeConfig" not in site.given("second")


# --- capabilities by plugin -------------------------------------------------------------------------------------------
# A list had `ips` on its first plugin and `mac` on its second: each gets the request that it declares.
# k8snetworkplumbingwg/multus-cni#387.


def test_each_plugin_gets_its_own(site: Site) -> None:
    plugins = [
        {"type": site.plugin("macvlan"), "capabilities": {"ips": True}},
        {"type": site.plugin("tuning", commands=""), "capabilities": {"mac": True}},
    ]
    site.network("runtimeconfig", {"cniVersion": "0.3.1", "plugins": plugins})
    site.add('[{"name": "runtimeconfig", "ips": ["192.168.2.205/24"], "mac": "CA:FE:C0:FF:EE:00"}]')
    assert site.given("macvlan")["runtimeConfig"] == {"ips": ["192.168.2.205/24"]}
    assert site.given("tuning")["runtimeConfig"] == {"mac": "CA:FE:C0:FF:EE:00"}


def test_ports_and_bandwidth_of_a_network(site: Site) -> None:
    plugins = [
        {"type": site.plugin("bridge")},
        {"type": site.plugin("portmap", commands=""), "capabilities": {"portMappings": True}},
        {"type": site.plugin("bandwidth", commands=""), "capabilities": {"bandwidth": True, "ips": False}},
    ]
    site.network("ports", {"cniVersion": "0.3.1", "name": "ports", "plugins": plugins})
    ports, limits = (
        {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
        {"ingressRate": 2048, "ingressBurst": 1600},
    )
    site.add(json.dumps([{"name": "ports", "portMappings": [ports], "bandwidth": limits}]))
    assert "runtimeConfig" not in site.given("bridge")
    assert site.given("portmap")["runtimeConfig"] == {"portMappings": [ports]}
    assert site.given("bandwidth")["runtimeConfig"] == {"bandwidth": limits}


# --- capabilities of the chain ----------------------------------------------------------------------------------------
# Host ports did nothing, as the generated configuration lacked the capabilities of Calico's list: it has those of
# all its plugins. k8snetworkplumbingwg/multus-cni#544.


PATH = "/host/etc/cni/net.d/10-calico.conflist"
PLUGINS = [
    {"type": "calico", "mtu": 0, "ipam": {"type": "calico-ipam"}, "policy": {"type": "k8s"}},
    {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}},
    {"type": "bandwidth", "capabilities": {"bandwidth": True}},
]


def test_the_runtime_passes_them() -> None:
    primary = conf.parse(json.dumps({"name": "k8s-pod-network", "cniVersion": "0.3.1", "plugins": PLUGINS}).encode())
    found = json.loads(generate({}, primary, PATH))
    assert found["capabilities"] == {"bandwidth": True, "portMappings": True}
    assert (found["clusterNetwork"], found["cniVersion"]) == (PATH, "0.3.1")


# --- capability missing -----------------------------------------------------------------------------------------------
# A pod asked for an address of a network whose plugin does not declare `ips`: CNI_ARGS have it, and the IPAM plugin
# takes it. harvester/harvester#210.


def test_the_address_is_set(site: Site) -> None:
    config = {"cniVersion": "0.3.1", "name": "bridge1", "type": "bridge", "bridge": f"br-{site.namespace}"}
    site.network("bridge-vlan1", {**config, "ipam": {"type": "static"}})
    site.add('[{"name": "bridge-vlan1", "ips": ["10.10.1.10/24"]}]')
    (link,) = site.node.ip("address", "show", "net1", netns=site.netns)
    assert "10.10.1.10" in [item["local"] for item in link["addr_info"]]


def test_the_arguments_are_those_of_upstream(site: Site) -> None:
    site.vendor("static")
    site.add('[{"name": "static", "ips": ["10.10.1.11/24"], "mac": "02:00:00:00:00:0b"}]')
    pairs = dict(item.split("=", 1) for item in site.variables("static")["CNI_ARGS"].split(";"))
    assert (pairs["IP"], pairs["MAC"]) == ("10.10.1.11/24", "02:00:00:00:00:0b")


# --- whereabouts paths ------------------------------------------------------------------------------------------------
# On k3s whereabouts needs paths in its `ipam`: keys that Multus does not know reach the plugin as they are.
# k3s-io/k3s#10869.


IPAM = {
    "range": "172.17.0.128/28",
    "configuration_path": "/var/lib/rancher/k3s/agent/etc/cni/net.d/whereabouts.d/whereabouts.conf",
    "kubernetes": {"kubeconfig": "/var/lib/rancher/k3s/agent/etc/cni/net.d/whereabouts.d/whereabouts.kubeconfig"},
}


def test_the_keys_are_the_same_at_add_and_del(site: Site) -> None:
    ipam = {"type": site.plugin("whereabouts", commands=""), **IPAM}
    site.vendor("macvlan", master="eth0", ipam=ipam)
    site.add("macvlan")
    assert site.call("DEL").code == 0
    assert site.given("macvlan")["ipam"] == site.given("macvlan", "DEL")["ipam"] == ipam
