"""A configuration had no name, and its plugin refused it: it has that of its object.

redhat-nfvpe/kube-ansible#232; kind: incomplete configurations.
"""

from tests.reports.conftest import Site


def test_the_plugin_gets_the_name_of_the_object(site: Site) -> None:
    site.network("macvlan-conf", {"cniVersion": "0.3.0", "type": site.plugin("macvlan")})
    site.add("macvlan-conf")
    assert site.given("macvlan")["name"] == "macvlan-conf"
