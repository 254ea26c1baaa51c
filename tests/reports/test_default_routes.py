"""Default routes, the pod's own default network.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import json
from typing import Final

import pytest

from tests.reports.conftest import LINK, Site

PLAYS: Final = ("Calico",)

# --- default network address ------------------------------------------------------------------------------------------
# A pod wanted a fixed address on its default network: the element form of the annotation asks for it.
# k8snetworkplumbingwg/multus-cni#873.


def test_the_address_reaches_the_plugin_of_eth0(site: Site) -> None:
    site.vendor("macvlan", capabilities={"ips": True, "mac": True})
    asked = {"ips": ["185.2.28.7/24"], "mac": "02:00:00:00:00:07"}
    site.add(default=json.dumps([{"name": "macvlan", "namespace": site.namespace, **asked}]))
    assert site.links() == ["eth0"]
    assert site.given("macvlan")["runtimeConfig"] == asked


# --- default network elsewhere ----------------------------------------------------------------------------------------
# A pod named its default network without the namespace, which is that of Multus and not the pod's: the error says
# which to write. kubevirt/kubevirt#3069.


def test_the_namespace_is_in_the_error(site: Site) -> None:
    site.vendor("access")
    site.declare(others={"v1.multus-cni.io/default-network": "access"})
    answer = site.call("ADD")
    assert answer.code == 1
    assert "kube-system/access" in answer.json["msg"]
    assert f"{site.namespace}/access" in answer.json["details"]


# --- default network missing ------------------------------------------------------------------------------------------
# The pod's own default network could not be read, and the pod got the cluster's: the ADD fails instead.
# k8snetworkplumbingwg/multus-cni#492.


def test_no_other_network_takes_its_place(site: Site) -> None:
    site.vendor("net1")
    message = site.refused(
        '[{"name": "net1", "interface": "eth1"}]',
        '[{"interface": "eth0", "namespace": "kube-system", "name": "calico"}]',
    )
    assert "kube-system/calico" in message
    assert site.links() == []


# --- default route dual -----------------------------------------------------------------------------------------------
# Gateways of both families were asked for, and none was set: each family has its own.
# k8snetworkplumbingwg/multus-cni#906.


def test_both_families_move(site: Site) -> None:
    site.routed()
    site.add(
        '[{"default-route": ["10.0.4.1", "2001:db8:4::1"], "interface": "main", "name": "lan"}]', default="cluster"
    )
    assert site.default_routes() == [("main", "10.0.4.1")]
    assert site.default_routes("-6") == [("main", "2001:db8:4::1")]
    shown = {entry["interface"]: entry.get("gateway") for entry in site.status}
    assert shown == {"eth0": None, "main": ["10.0.4.1", "2001:db8:4::1"]}


# --- default route empty ----------------------------------------------------------------------------------------------
# An element had an empty `default-route`, and eth0 lost its own: an empty list asks for nothing.
# k8snetworkplumbingwg/multus-cni#1011.


@pytest.mark.parametrize("value", ["[]", "null"])
def test_eth0_keeps_its_default_route(site: Site, value: str) -> None:
    site.routed()
    site.add(f'[{{"name": "lan", "default-route": {value}}}]', default="cluster")
    assert site.default_routes() == [("eth0", "10.244.1.1")]
    assert [device for device, _ in site.default_routes("-6")] == ["eth0"]


# --- default route moves ----------------------------------------------------------------------------------------------
# A network asked for the default route, and the pod had two: it has the one that was asked for.
# k8snetworkplumbingwg/multus-cni#1444.


def test_the_pod_has_one(site: Site) -> None:
    site.routed()
    site.add('[{"name": "lan", "default-route": ["10.0.4.1"]}]', default="cluster")
    assert site.default_routes() == [("net1", "10.0.4.1")]
    assert [device for device, _ in site.default_routes("-6")] == ["eth0"]


# --- default route of calico ------------------------------------------------------------------------------------------
# Calico's IPv6 default route has a link-local gateway, and the pod kept it beside another: it has the one asked
# for. projectcalico/cni-plugin#429.


COMMANDS = f"""{LINK}
in="ip -n $(basename "$CNI_NETNS")"
$in link set "$CNI_IFNAME" address ee:ee:ee:ee:ee:e1 up
$in -6 route add default via fe80::ecee:eeff:feee:eeee dev "$CNI_IFNAME" onlink metric 1024"""


@pytest.mark.parametrize(
    ("asked", "route"),
    [("", ("eth0", "fe80::ecee:eeff:feee:eeee")), (', "default-route": ["2001:db8:4::1"]', ("net1", "2001:db8:4::1"))],
)
def test_the_pod_has_one_default_route_of_calico(site: Site, asked: str, route: tuple[str, str]) -> None:
    site.routed()
    config = {"cniVersion": "1.0.0", "name": "calico", "type": site.plugin("calico", commands=COMMANDS)}
    site.network("calico", config)
    site.add(f'[{{"name": "lan"{asked}}}]', default="calico")
    assert site.default_routes("-6") == [route]


# --- default route unreachable ----------------------------------------------------------------------------------------
# A gateway was asked for that the network does not reach: the ADD fails with it, and nothing is left.
# k8snetworkplumbingwg/multus-cni#847.


def test_the_gateway_is_named(site: Site) -> None:
    site.routed()
    message = site.refused('[{"name": "lan", "default-route": ["198.32.43.97"]}]', default="cluster")
    assert "198.32.43.97" in message
    assert site.links() == []


# --- gateway without route --------------------------------------------------------------------------------------------
# A network had a gateway and a route to one prefix, and the pod a second default route: a gateway alone makes none.
# k8snetworkplumbingwg/multus-cni#749.


def test_the_default_route_stays_with_eth0(site: Site) -> None:
    site.routed()
    ipam = site.ipam(
        "fd5d:d50a:8c17:2030::/64", routes=[{"dst": "fd5d:d50a:8c17:2040::/64", "gw": "fd5d:d50a:8c17:2030::ff"}]
    )
    ipam["ranges"][0][0]["gateway"] = "fd5d:d50a:8c17:2030::ff"
    bridge = {"type": "bridge", "bridge": f"br-{site.namespace}", "ipam": ipam}
    site.network("v6", {"cniVersion": "0.3.1", "name": "v6", "plugins": [bridge]})
    site.add("v6", default="cluster")
    assert [device for device, _ in site.default_routes("-6")] == ["eth0"]
    (route,) = site.node.ip("-6", "route", "show", "fd5d:d50a:8c17:2040::/64", netns=site.netns)
    assert route["gateway"] == "fd5d:d50a:8c17:2030::ff"
