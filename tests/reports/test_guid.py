"""InfiniBand ports are known by 8-byte GUIDs, which `mac` cannot hold: the key of their own is a capability.

k8snetworkplumbingwg/multi-net-spec#4; kind: keys and values of a selection element.
"""

import pytest

from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection

GUID = "02:00:00:00:00:00:00:01"


def test_a_guid_is_passed_on() -> None:
    (found,) = selection.parse(f'[{{"name": "ib", "infiniband-guid": "{GUID}"}}]', pod_namespace="default")
    assert found.capability_args() == {"infinibandGUID": GUID}


def test_an_ethernet_address_is_no_guid() -> None:
    with pytest.raises(CniError, match="8 bytes"):
        selection.parse('[{"name": "ib", "infiniband-guid": "02:00:00:00:00:01"}]', pod_namespace="default")
