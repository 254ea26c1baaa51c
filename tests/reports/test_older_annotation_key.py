"""The annotation had the group of a draft of the specification, which nothing reads: the check names the present
key.

k8snetworkplumbingwg/multus-cni#87; kind: annotations that are absent, or that nothing reads.
"""

from multus_tools import validate

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
