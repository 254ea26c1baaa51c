"""The status was in two annotations, one with a misspelt key: it is in that of the specification only.

k8snetworkplumbingwg/multus-cni#468; kind: results of third parties.
"""

import yaml

from tests.reports.conftest import Site


def test_one_annotation(site: Site) -> None:
    site.add()
    path = site.node.manifests / "status" / site.namespace / f"{site.pod}.yaml"
    written = yaml.safe_load(path.read_text())["metadata"]["annotations"]
    assert list(written) == ["k8s.v1.cni.cncf.io/network-status"]
