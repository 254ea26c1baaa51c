"""A comma followed the last key of an element, and the IPv6 address got the blame: the comma is named.

k8snetworkplumbingwg/multus-cni#820; kind: malformed annotations.
"""

import pytest

from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection

TEXT = '[{"name": "ip6", "ips": ["241a:100:10:1::201"]%s}]'


def test_the_comma_is_the_fault() -> None:
    with pytest.raises(CniError, match="trailing comma|,"):
        selection.parse(TEXT % ",", pod_namespace="default")


def test_an_ipv6_address_needs_no_prefix_length() -> None:
    assert selection.parse(TEXT % "", pod_namespace="default")[0].ips == ("241a:100:10:1::201",)
