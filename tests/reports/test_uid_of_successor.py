"""A StatefulSet made its pod again while the old sandbox was set up: the ADD for the old UID fails, a DEL does not.

k8snetworkplumbingwg/multus-cni#742, k8snetworkplumbingwg/multus-cni#763; kind: UIDs of a pod.
"""

from tests.reports.conftest import Site


def test_the_old_pod_gets_no_network_and_ends(site: Site) -> None:
    site.vendor("lan")
    site.declare("lan")
    arguments = f"K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod};K8S_POD_UID=of-the-predecessor"
    answer = site.call("ADD", CNI_ARGS=arguments)
    assert answer.code == 1
    assert "of-the-predecessor" in answer.stdout.decode()
    assert not site.called("lan", "ADD")


def test_a_del_goes_by_the_record(site: Site) -> None:
    site.vendor("lan")
    site.add("lan")
    arguments = f"K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod};K8S_POD_UID=of-the-predecessor"
    assert site.call("DEL", CNI_ARGS=arguments).code == 0
    assert site.called("lan", "DEL")
