"""A pod named its default network without the namespace, which is that of Multus and not the pod's: the error says
which to write.

kubevirt/kubevirt#3069; kind: the pod's own default network.
"""

from tests.reports.conftest import Site


def test_the_namespace_is_in_the_error(site: Site) -> None:
    site.vendor("access")
    site.declare(others={"v1.multus-cni.io/default-network": "access"})
    answer = site.call("ADD")
    assert answer.code == 1
    assert "kube-system/access" in answer.json["msg"]
    assert f"{site.namespace}/access" in answer.json["details"]
