"""CNI versions.

Each section is one public report: what was seen, and what is right.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.reports.conftest import Site

PLAYS: Final = ("Calico",)

# --- no address in an old version -------------------------------------------------------------------------------------
# The runtime spoke CNI 0.2.0 and the network gave no address, which that version cannot say: the ADD fails with
# that reason, and nothing is left. containerd/containerd#2540.


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


# --- version of plugin ------------------------------------------------------------------------------------------------
# Multus was set to CNI 1.1.0 and Calico's list said 0.3.1, and no pod started: each network is called in its own
# version. tigera/operator#4969.


def test_calico_is_called_in_its_own_version(site: Site) -> None:
    printed = {
        "cniVersion": "0.3.1",
        "ips": [{"version": "4", "address": "10.1.0.2/32"}],
        "interfaces": [{"name": "cali1"}],
    }
    config = {"cniVersion": "0.3.1", "name": "k8s-pod-network", "plugins": [{"type": site.plugin("calico", printed)}]}
    site.network("calico", config)
    result = site.add(default="calico", stdin={"cniVersion": "1.1.0"})
    assert site.given("calico")["cniVersion"] == "0.3.1"
    assert (result["cniVersion"], result["ips"][0]["address"]) == ("1.1.0", "10.1.0.2/32")


# --- version of runtime -----------------------------------------------------------------------------------------------
# The runtime spoke 0.4.0 and the plugin answered in 1.0.0, and CRI-O crashed: the result has the version of the
# request. cri-o/cri-o#5889.


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
