"""An interface name with an underscore was refused as if it were a DNS label: the kernel's rules hold.

k8snetworkplumbingwg/multus-cni#1243; kind: keys and values of a selection element.
"""

import pytest

from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection


@pytest.mark.parametrize("name", ["uplink_p0", "Eth1", "bond0.100", "a-b_c@d"])
def test_the_kernel_decides(name: str) -> None:
    (found,) = selection.parse(f'[{{"name": "sriov", "interface": "{name}"}}]', pod_namespace="default")
    assert found.interface == name


@pytest.mark.parametrize("name", ["a" * 16, "a/b", "a b", ".."])
def test_what_no_link_can_have(name: str) -> None:
    with pytest.raises(CniError, match="interface"):
        selection.parse(f'[{{"name": "sriov", "interface": "{name}"}}]', pod_namespace="default")
