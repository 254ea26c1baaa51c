"""Arguments of the runtime, UIDs and repeated requests.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import json

import pytest

from tests.reports.conftest import Site

# --- infra container missing ------------------------------------------------------------------------------------------
# A runtime of virtual machines passed namespace and name of the pod only: that is enough. cni-genie/CNI-Genie#93.


def test_the_pod_starts_and_ends(site: Site) -> None:
    site.declare()
    arguments = f"K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod}"
    assert site.call("ADD", CNI_ARGS=arguments).code == 0
    assert site.call("DEL", CNI_ARGS=arguments).code == 0


# --- plugged again ----------------------------------------------------------------------------------------------------
# The hot-plug controller lost the answer of an ADD and asked again, which failed for ever: the second is answered
# as the first. k8snetworkplumbingwg/multus-dynamic-networks-controller#235.


def test_the_second_answer_is_the_first(site: Site) -> None:
    site.vendor("tenant")
    site.add()
    first, second = (site.plug("ADD", "tenant", "ens58") for _ in range(2))
    assert first[0] == second[0] == 200, second[1]
    assert json.loads(first[1])["Result"]["interfaces"] == json.loads(second[1])["Result"]["interfaces"]
    assert site.links() == ["ens58", "eth0"]


# --- pod deleted before add -------------------------------------------------------------------------------------------
# The pod was gone from the API before its ADD, which crashed with CNI 0.3.1: the answer is a result or an error,
# never neither. k8snetworkplumbingwg/multus-cni#1497.


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_the_runtime_gets_an_answer_that_it_can_read(site: Site, version: str) -> None:
    answer = site.call("ADD", {"cniVersion": version})
    assert answer.code == 1
    assert f"{site.namespace}/{site.pod}" in answer.json["msg"]
    assert site.links() == []


# --- uid of mirror pod ------------------------------------------------------------------------------------------------
# The runtime has another UID of a static pod than the API, which has that of its mirror: the pod starts.
# k8snetworkplumbingwg/multus-cni#773.


STATIC = {"kubernetes.io/config.source": "file", "kubernetes.io/config.hash": "70a2d08f8ad8cd5d"}


def test_the_pod_gets_its_networks(site: Site) -> None:
    site.vendor("lan")
    site.declare("lan", others=STATIC)
    arguments = f"K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod};K8S_POD_UID=70a2d08f8ad8cd5d"
    answer = site.call("ADD", CNI_ARGS=arguments)
    assert answer.code == 0, answer.stdout
    assert site.links() == ["eth0", "net1"]


# --- uid of successor -------------------------------------------------------------------------------------------------
# A StatefulSet made its pod again while the old sandbox was set up: the ADD for the old UID fails, a DEL does not.
# k8snetworkplumbingwg/multus-cni#742, k8snetworkplumbingwg/multus-cni#763.


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


# --- unknown cni args -------------------------------------------------------------------------------------------------
# A plugin refused keys of CNI_ARGS that were for another one: plugins get `IgnoreUnknown`, whatever the runtime
# sets. containernetworking/cni#560.


def test_unknown_keys_are_to_be_ignored(site: Site) -> None:
    site.vendor("lan")
    site.declare("lan")
    pod = f"K8S_POD_NAMESPACE={site.namespace};K8S_POD_NAME={site.pod};K8S_POD_INFRA_CONTAINER_ID=c"
    assert site.call("ADD", CNI_ARGS=f"{pod};TESTARG=TEST=VAL;").code == 0
    pairs = dict(item.split("=", 1) for item in site.variables("lan")["CNI_ARGS"].split(";"))
    assert pairs["IgnoreUnknown"] in ("1", "true")
    assert pairs["TESTARG"] == "TEST=VAL"
