"""The runtime spoke CNI 0.2.0 and the network gave no address, which that version cannot say: the ADD fails with that
reason, and nothing is left.

containerd/containerd#2540; kind: CNI versions.
"""

import pytest

from tests.reports.conftest import Site


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_the_version_is_named(site: Site, version: str) -> None:
    site.network("bare", {"cniVersion": "1.0.0", "type": site.plugin("bare")})
    site.declare(default="bare")
    answer = site.call("ADD", {"cniVersion": version})
    assert answer.code == 1
    assert "address" in answer.json["msg"]
    assert version in answer.json["details"]
    assert site.called("bare", "DEL")
    assert not site.record.exists()
