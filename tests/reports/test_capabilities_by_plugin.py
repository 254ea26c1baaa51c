"""A list had `ips` on its first plugin and `mac` on its second: each gets the request that it declares.

k8snetworkplumbingwg/multus-cni#387; kind: capability arguments.
"""

import json

from tests.reports.conftest import Site


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
