"""An annotation lacked a closing brace, and the pod ran with eth0 only: malformed JSON refuses the pod.

k8snetworkplumbingwg/multus-cni#635; kind: malformed annotations.
"""

import pytest

from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection


def test_the_pod_is_refused_with_the_place() -> None:
    with pytest.raises(CniError, match=r"line 3, .*annotation k8s\.v1\.cni\.cncf\.io/networks") as caught:
        selection.parse('[{"name": "static",\n  "ips": ["10.1.1.104/24"]\n]', pod_namespace="default")
    assert caught.value.code == 6
