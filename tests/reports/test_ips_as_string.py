"""An element had `ips` as one string, which an old release took and a newer one dropped: the wrong type is named.

k8snetworkplumbingwg/multus-cni#460; kind: malformed annotations.
"""

import pytest

from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection


def test_a_list_is_asked_for() -> None:
    with pytest.raises(CniError, match="ips: an array .* not a string .element 0 'macvlanstatic'"):
        selection.parse('[{"name": "macvlanstatic", "ips": "10.1.1.6/24"}]', pod_namespace="default")
