"""Spiderpool's lists begin with a plugin that makes no link and end with one that only checks, with empty `ipam` and
`dns`: the chain is called in order.

spidernet-io/spiderpool#2006; kind: plugins that are missing or print something else.
"""

from tests.reports.conftest import Site

LINK = {"cniVersion": "0.3.1", "interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}]}


def test_each_gets_the_result_of_the_one_before(site: Site) -> None:
    plugins = [
        {
            "type": site.plugin("ifacer", "{}", commands=""),
            "ipam": {},
            "dns": {},
            "interfaces": ["eth0"],
            "vlanID": 100,
        },
        {"type": site.plugin("macvlan", LINK), "master": "eth0.100", "mode": "bridge"},
        {"type": site.plugin("coordinator", LINK, commands="")},
    ]
    site.network("test", {"cniVersion": "0.3.1", "name": "test", "plugins": plugins})
    site.add("test")
    assert "prevResult" not in site.given("ifacer")
    assert "interfaces" not in site.given("macvlan")["prevResult"]
    assert site.given("coordinator")["prevResult"]["interfaces"][0]["name"] == "net1"
    assert site.call("DEL").code == 0
    assert site.called("ifacer", "DEL")
