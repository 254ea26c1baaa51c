"""A runtime of virtual machines passed namespace and name of the pod only: that is enough.

cni-genie/CNI-Genie#93; kind: arguments of the runtime.
"""

from tests.reports.conftest import Site


def test_the_pod_starts_and_ends(site: Site) -> None:
    site.declare()
    arguments = f"K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod}"
    assert site.call("ADD", CNI_ARGS=arguments).code == 0
    assert site.call("DEL", CNI_ARGS=arguments).code == 0
