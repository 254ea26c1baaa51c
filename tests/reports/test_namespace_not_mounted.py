"""On Talos the daemon did not see the pods' namespaces, and the error spoke of an interface name: the path is named,
code 8.

k8snetworkplumbingwg/multus-cni#1260; kind: the state of the node or of the pod's namespace.
"""

from tests.reports.conftest import Site


def test_the_path_is_named_and_no_plugin_runs(site: Site) -> None:
    site.vendor("lan")
    site.declare("lan")
    path = "/var/run/netns/cni-e05e22ed-dadf-c935-5239-7eb8b4e13169"
    answer = site.call("ADD", CNI_NETNS=path)
    assert answer.json["code"] == 8
    assert path in answer.json["msg"] + answer.json.get("details", "")
    assert not site.called("lan", "ADD")
