"""A pod wanted a fixed address on its default network: the element form of the annotation asks for it.

k8snetworkplumbingwg/multus-cni#873; kind: the pod's own default network.
"""

import json

from tests.reports.conftest import Site


def test_the_address_reaches_the_plugin_of_eth0(site: Site) -> None:
    site.vendor("macvlan", capabilities={"ips": True, "mac": True})
    asked = {"ips": ["185.2.28.7/24"], "mac": "02:00:00:00:00:07"}
    site.add(default=json.dumps([{"name": "macvlan", "namespace": site.namespace, **asked}]))
    assert site.links() == ["eth0"]
    assert site.given("macvlan")["runtimeConfig"] == asked
