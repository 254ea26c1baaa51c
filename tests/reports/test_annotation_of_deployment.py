"""The annotation was on a Deployment, whose pods do not get it: the check says where it belongs.

k8snetworkplumbingwg/multus-cni#444; kind: annotations that are absent, or that nothing reads.
"""

from multus_tools import validate

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
