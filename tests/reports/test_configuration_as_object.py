"""`spec.config` was YAML instead of a text, which the API server refuses without a reason: the check says it.

Mellanox/network-operator#100; kind: malformed configurations.
"""

from multus_tools import validate

NETWORK = b"""
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {name: antrea}
spec:
  config: {cniVersion: 0.3.0, name: antrea, plugins: [{type: antrea}]}
"""


def test_a_text_is_asked_for() -> None:
    (finding,) = validate.of([("net.yaml", NETWORK)]).findings
    assert (finding.severity, finding.key, finding.place.line) == ("error", "spec.config", 6)
