"""A runtime passed the pod's annotations as a capability that Multus did not know: the cluster network gets it.

k8snetworkplumbingwg/multus-cni#869; kind: capability arguments.
"""

from tests.reports.conftest import Site

KEY = "io.kubernetes.cri.pod-annotations"


def test_any_capability_reaches_a_plugin_that_declares_it(site: Site) -> None:
    site.vendor("vpc", capabilities={KEY: True})
    site.add(default="vpc", stdin={"runtimeConfig": {KEY: {"a/b": "c"}, "portMappings": []}})
    assert site.given("vpc")["runtimeConfig"] == {KEY: {"a/b": "c"}}
