"""The pod was gone from the API before its ADD, which crashed with CNI 0.3.1: the answer is a result or an error,
never neither.

k8snetworkplumbingwg/multus-cni#1497; kind: UIDs of a pod.
"""

import pytest

from tests.reports.conftest import Site


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_the_runtime_gets_an_answer_that_it_can_read(site: Site, version: str) -> None:
    answer = site.call("ADD", {"cniVersion": version})
    assert answer.code == 1
    assert f"{site.namespace}/{site.pod}" in answer.json["msg"]
    assert site.links() == []
