"""Kube-OVN reported a MAC address of no link of the pod, which consumers took for eth0's: it is shown with its
interface only.

kubeovn/kube-ovn#1636; kind: results of third parties.
"""

from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from multus_daemon.spec.nad import status


def test_no_mac_without_an_interface() -> None:
    found = Result((Interface("", mac="00:00:00:be:39:e2"),), (IpConfig("21.100.0.33/16"),))
    (entry,) = status.entries_for("kube-ovn", "eth0", found, cluster_network=True)
    assert entry["ips"] == ["21.100.0.33"]
    assert "mac" not in entry


def test_it_is_shown_with_one() -> None:
    found = Result((Interface("eth0", mac="00:00:00:be:39:e2", sandbox="/n"),), (IpConfig("21.100.0.33/16"),))
    (entry,) = status.entries_for("kube-ovn", "eth0", found, cluster_network=True)
    assert (entry["interface"], entry["mac"]) == ("eth0", "00:00:00:be:39:e2")
