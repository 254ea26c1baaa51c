"""A pod asked for an address of a network whose plugin does not declare `ips`: CNI_ARGS have it, and the IPAM plugin
takes it.

harvester/harvester#210; kind: capability arguments.
"""

from tests.reports.conftest import Site


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
