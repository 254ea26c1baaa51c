"""A list had `ips` on its first plugin and `mac` on its second: each gets the request that it declares.

k8snetworkplumbingwg/multus-cni#387; kind: capability arguments.
"""

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
