"""Annotations that are absent, malformed, or read by nothing.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

import pytest

from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection
from multus_tools import validate
from tests.reports.conftest import Site

# --- annotation of deployment -----------------------------------------------------------------------------------------
# The annotation was on a Deployment, whose pods do not get it: the check says where it belongs.
# k8snetworkplumbingwg/multus-cni#444.


DEPLOYMENT = b"""
apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
  annotations:
    k8s.v1.cni.cncf.io/networks: lan
spec:
  template: {metadata: {labels: {app: web}}, spec: {containers: []}}
"""


def test_the_place_is_named() -> None:
    (finding,) = validate.of([("web.yaml", DEPLOYMENT)]).findings
    assert (finding.severity, finding.place.line) == ("warning", 7)
    assert "spec.template.metadata.annotations" in finding.advice


# --- ips as string ----------------------------------------------------------------------------------------------------
# An element had `ips` as one string, which an old release took and a newer one dropped: the wrong type is named.
# k8snetworkplumbingwg/multus-cni#460.


def test_a_list_is_asked_for() -> None:
    with pytest.raises(CniError, match="ips: an array .* not a string .element 0 'macvlanstatic'"):
        selection.parse('[{"name": "macvlanstatic", "ips": "10.1.1.6/24"}]', pod_namespace="default")


# --- no annotation ----------------------------------------------------------------------------------------------------
# A pod without the annotation, and one with an empty text, were an error: they get the cluster network.
# k8snetworkplumbingwg/multus-cni#642.


@pytest.mark.parametrize("networks", [None, "", "[]"])
def test_the_pod_has_the_cluster_network(site: Site, networks: str | None) -> None:
    site.add(networks)
    assert site.links() == ["eth0"]
    assert [entry["default"] for entry in site.status] == [True]


# --- older annotation key ---------------------------------------------------------------------------------------------
# The annotation had the group of a draft of the specification, which nothing reads: the check names the present
# key. k8snetworkplumbingwg/multus-cni#87.


POD = b"""
apiVersion: v1
kind: Pod
metadata:
  name: web
  annotations:
    kubernetes.v1.cni.cncf.io/networks: test-ptp-network
spec: {containers: []}
"""


def test_the_key_is_named() -> None:
    (finding,) = validate.of([("web.yaml", POD)]).findings
    assert (finding.severity, finding.place.line) == ("warning", 7)
    assert "k8s.v1.cni.cncf.io/networks" in finding.advice


# --- other annotation key ---------------------------------------------------------------------------------------------
# The annotation was `networks` without its prefix, which nothing reads: the pod starts with the cluster network.
# k8snetworkplumbingwg/multus-cni#134.


def test_the_key_asks_for_nothing(site: Site) -> None:
    site.vendor("macvlan3")
    site.declare(others={"networks": '[{"name": "macvlan3"}]'})
    assert site.call("ADD").code == 0
    assert site.links() == ["eth0"]


# --- trailing comma ---------------------------------------------------------------------------------------------------
# A comma followed the last key of an element, and the IPv6 address got the blame: the comma is named.
# k8snetworkplumbingwg/multus-cni#820.


TEXT = '[{"name": "ip6", "ips": ["241a:100:10:1::201"]%s}]'


def test_the_comma_is_the_fault() -> None:
    with pytest.raises(CniError, match="trailing comma|,"):
        selection.parse(TEXT % ",", pod_namespace="default")


def test_an_ipv6_address_needs_no_prefix_length() -> None:
    assert selection.parse(TEXT % "", pod_namespace="default")[0].ips == ("241a:100:10:1::201",)


# --- unclosed object --------------------------------------------------------------------------------------------------
# An annotation lacked a closing brace, and the pod ran with eth0 only: malformed JSON refuses the pod.
# k8snetworkplumbingwg/multus-cni#635.


def test_the_pod_is_refused_with_the_place() -> None:
    with pytest.raises(CniError, match=r"line 3, .*annotation k8s\.v1\.cni\.cncf\.io/networks") as caught:
        selection.parse('[{"name": "static",\n  "ips": ["10.1.1.104/24"]\n]', pod_namespace="default")
    assert caught.value.code == 6
