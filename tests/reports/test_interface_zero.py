"""An address of interface 0 lost its index on the way, as 0 was taken for absent: it is in the result of each
version.

containernetworking/cni#434; kind: results of third parties.
"""

import pytest

from tests.reports.conftest import Site

PRINTED = {
    "interfaces": [{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}],
    "ips": [{"address": "10.1.0.2/24", "interface": 0}],
}


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_the_index_is_there(site: Site, version: str) -> None:
    site.vendor("net", PRINTED)
    result = site.add(default="net", stdin={"cniVersion": version})
    assert result["ips"][0]["interface"] == 0
