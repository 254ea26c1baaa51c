"""A runtime passed no pod UID, and the address was never freed: ADD and DEL work without it.

k8snetworkplumbingwg/multus-cni#1168; kind: DEL with less than ADD had.
"""

from tests.reports.conftest import Site


def test_the_plugin_gets_the_del(site: Site) -> None:
    site.vendor("lan")
    site.declare("lan")
    arguments = f"IgnoreUnknown=1;K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod}"
    assert site.call("ADD", CNI_ARGS=arguments).code == 0
    assert site.call("DEL", CNI_ARGS=arguments).code == 0
    assert site.called("lan", "DEL")
