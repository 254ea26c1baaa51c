"""Values for a plugin's `args.cni` were wanted for one pod: they join those of the network.

containernetworking/plugins#361; kind: keys and values of a selection element.
"""

from tests.reports.conftest import Site


def test_they_are_merged(site: Site) -> None:
    site.vendor("sample", args={"cni": {"ips": ["192.168.122.177"], "kept": 1}, "labels": []})
    site.add('[{"name": "sample", "cni-args": {"ips": ["192.168.122.178"], "vlan": 5}}]')
    assert site.given("sample")["args"] == {
        "cni": {"ips": ["192.168.122.178"], "kept": 1, "vlan": 5},
        "labels": [],
    }
