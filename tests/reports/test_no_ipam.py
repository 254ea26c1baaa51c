"""A virtual machine has its address from cloud-init, so that `ipam` is an empty object: the link has none.

kubevirt/kubevirt#4564; kind: incomplete configurations.
"""

from tests.reports.conftest import Site


def test_the_link_is_a_port_without_address(site: Site) -> None:
    bridge = f"br-{site.namespace}"
    site.network("vlan", {"cniVersion": "0.3.1", "name": "vlan", "type": "bridge", "bridge": bridge, "ipam": {}})
    site.add("vlan")
    assert site.links() == ["eth0", "net1"]
    assert not site.status[1].get("ips")
    assert site.call("DEL").code == 0
