"""Plugins that are missing or print something else.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

from typing import Final

from tests.reports.conftest import Site

PLAYS: Final = ("Spiderpool",)

# --- log line before result -------------------------------------------------------------------------------------------
# A plugin printed a line of its log before its result: the error names the plugin and shows the line.
# k8snetworkplumbingwg/multus-cni#1330.


def test_plugin_and_text_are_named(site: Site) -> None:
    site.vendor("calico", 'debug: looking for a pool\n{"cniVersion": "0.3.1"}')
    message = site.refused("calico")
    assert f"{site.namespace}-calico" in message
    assert "debug: looking" in message


# --- plugin before the link -------------------------------------------------------------------------------------------
# Spiderpool's lists begin with a plugin that makes no link and end with one that only checks, with empty `ipam` and
# `dns`: the chain is called in order. spidernet-io/spiderpool#2006.


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


# --- plugin missing ---------------------------------------------------------------------------------------------------
# The binary of a network's plugin was not on the node: the ADD names it and the directory, and the pod ends.
# k8snetworkplumbingwg/multus-cni#386.


def test_the_plugin_is_named(site: Site) -> None:
    site.network("lan", {"cniVersion": "0.3.1", "type": "sriov-of-nobody"})
    message = site.refused("lan")
    assert "sriov-of-nobody" in message
    assert str(site.node.bin_dir) in message
