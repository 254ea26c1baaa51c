"""A pod asked for an address of a network whose plugin does not declare `ips`, and the plugin had none: the request is named (harvester#210)."""

from tests.reports.conftest import Site


def test_the_capability_is_named(site: Site) -> None:
    config = {"cniVersion": "0.3.1", "name": "bridge1", "type": "bridge", "bridge": f"br-{site.namespace}"}
    site.network("bridge-vlan1", {**config, "ipam": {"type": "static"}})
    message = site.refused('[{"name": "bridge-vlan1", "ips": ["10.10.1.10/24"]}]')
    assert "ips" in message
    assert "capabilit" in message
