"""A plugin refused keys of CNI_ARGS that were for another one: plugins get `IgnoreUnknown`, whatever the runtime
sets.

containernetworking/cni#560; kind: arguments of the runtime.
"""

from tests.reports.conftest import Site


def test_unknown_keys_are_to_be_ignored(site: Site) -> None:
    site.vendor("lan")
    site.declare("lan")
    pod = f"K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod};K8S_POD_INFRA_CONTAINER_ID=c"
    assert site.call("ADD", CNI_ARGS=f"{pod};TESTARG=TEST=VAL;").code == 0
    pairs = dict(item.split("=", 1) for item in site.variables("lan")["CNI_ARGS"].split(";"))
    assert pairs["IgnoreUnknown"] in ("1", "true")
    assert pairs["TESTARG"] == "TEST=VAL"
