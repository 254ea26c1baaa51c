"""A host device with a driver of user space has no link, and its entry had no interface: the entry has the name of
the call.

containernetworking/plugins#1147; kind: devices of a pod.
"""

from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad import device_info, status


def test_the_entry_has_the_interface_and_the_device() -> None:
    pci = device_info.parse(b'{"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:07:00.0"}}')
    (entry,) = status.entries_for("sriramy/net-a", "net1", Result(), cluster_network=False, device_info=pci)
    assert entry["interface"] == "net1"
    assert entry["device-info"]["pci"] == {"pci-address": "0000:07:00.0"}
