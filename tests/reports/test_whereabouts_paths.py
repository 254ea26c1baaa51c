"""On k3s whereabouts needs paths in its `ipam`: keys that Multus does not know reach the plugin as they are.

k3s-io/k3s#10869; kind: keys for plugins only.
"""

from tests.reports.conftest import Site

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
