"""The VPC plugin of EKS reports a link `dummy` and digits in the sandbox `0`, with a MAC `0`: eth0 stays the
default.

aws/amazon-vpc-cni-k8s#2961; kind: results of third parties.
"""

from tests.reports.conftest import Site

PRINTED = {
    "cniVersion": "0.4.0",
    "interfaces": [
        {"name": "pod7240c55beb0"},
        {"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"},
        {"name": "dummy7240c55beb0", "mac": "0", "sandbox": "0"},
    ],
    "ips": [{"version": "4", "interface": 1, "address": "10.24.136.194/32"}],
    "dns": {},
}


def test_the_pod_starts_and_its_result_is_whole(site: Site) -> None:
    site.network("aws-cni", {"cniVersion": "0.4.0", "name": "aws-cni", "type": site.plugin("aws-cni", PRINTED)})
    result = site.add(default="aws-cni", stdin={"cniVersion": "0.4.0"})
    assert [item["name"] for item in result["interfaces"]] == ["pod7240c55beb0", "eth0", "dummy7240c55beb0"]
    assert [entry["interface"] for entry in site.status if entry["default"]] == ["eth0"]
    assert site.status[0]["ips"] == ["10.24.136.194"]
    assert site.call("DEL").code == 0
