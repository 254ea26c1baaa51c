"""The passt binding of KubeVirt reports eth0 a second time, as another network: both entries stay as they are.

kubevirt/community#324; kind: results of third parties.
"""

from typing import Any

from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from multus_daemon.spec.nad import status


def entry(name: str, default: bool) -> list[dict[str, Any]]:
    found = Result((Interface("eth0", sandbox="/n"),), (IpConfig("10.244.1.9/24", interface=0),))
    return status.entries_for(name, "eth0", found, cluster_network=default)


def test_the_status_does_not_change_by_itself() -> None:
    own = entry("cluster-network", True) + entry("default/binding-passt", False)
    assert [item["default"] for item in own] == [True, False]
    shown = status.parse(status.render(own))
    assert status.brought_up_to_date(shown, own, there={"eth0"}) is None
