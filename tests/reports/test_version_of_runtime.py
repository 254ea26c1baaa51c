"""The runtime spoke 0.4.0 and the plugin answered in 1.0.0, and CRI-O crashed: the result has the version of the
request.

cri-o/cri-o#5889; kind: CNI versions.
"""

import pytest

from tests.reports.conftest import Site


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_the_result_has_the_version_of_the_request(site: Site, version: str) -> None:
    site.vendor(
        "flannel",
        {
            "interfaces": [{"name": "eth0", "sandbox": "$CNI_NETNS"}],
            "ips": [{"address": "10.244.0.5/24", "interface": 0}],
        },
    )
    result = site.add(default="flannel", stdin={"cniVersion": version})
    assert result["cniVersion"] == version
    assert result["ips"][0]["address"] == "10.244.0.5/24"
    assert ("version" in result["ips"][0]) is (version < "1.0.0")
