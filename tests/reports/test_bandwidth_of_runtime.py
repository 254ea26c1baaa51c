"""The bandwidth of a pod's annotation came to the runtime, and not to Calico's chain: the plugin that declares it
gets it.

k8snetworkplumbingwg/multus-cni#949; kind: capability arguments.
"""

from tests.reports.conftest import Site

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
