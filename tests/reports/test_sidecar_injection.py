"""Istio's network has no configuration in its object and makes no link: the node's file is used, and the pod is
healthy.

k8snetworkplumbingwg/multus-cni#1238; kind: configurations in files of the node.
"""

import json

from tests.reports.conftest import Site


def test_add_check_and_del_succeed(site: Site) -> None:
    directory = site.node.root / "conf.d"
    directory.mkdir(exist_ok=True)
    name = f"istio-{site.namespace}"
    config = {"cniVersion": "1.0.0", "name": name, "type": site.plugin("istio-cni", "{}", commands="")}
    (directory / f"YYY-{name}.conf").write_text(json.dumps(config))
    site.network(name, "")
    site.vendor("macvlan")
    site.add(f"macvlan,{site.namespace}/{name}")
    assert site.links() == ["eth0", "net1"]
    assert site.variables("istio-cni")["CNI_IFNAME"] == "net2"
    check = site.call("CHECK")
    assert check.code == 0, check.stdout
    assert site.call("DEL").code == 0
    assert site.called("istio-cni", "DEL")
