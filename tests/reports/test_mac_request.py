"""Elements of before the specification had `interfaceRequest`, which works, and `macRequest`, which never did: the
key is named.

k8snetworkplumbingwg/multus-cni#266; kind: keys and values of a selection element.
"""

from multus_daemon.spec.nad import selection


def test_the_interface_counts_and_the_other_key_is_named() -> None:
    text = '[{"name": "macvlan", "interfaceRequest": "mgmt", "macRequest": "aa:bb:cc:dd:ee:ff"}]'
    (found,) = selection.parse(text, pod_namespace="default")
    assert (found.interface, found.mac) == ("mgmt", "")
    assert len(found.unknown) == 1
    assert "macRequest" in found.unknown[0]
