"""An element had two addresses, two gateways and a key `type` that no specification has: both families are kept.

k8snetworkplumbingwg/multus-cni#847; kind: keys and values of a selection element.
"""

from multus_daemon.spec.nad import selection


def test_both_families_are_requested() -> None:
    text = (
        '[{"ips":["2605:d9c0:6:2003::5675/64","198.32.43.120/27"],'
        '"default-route":["2605:d9c0:6:2003::1","198.32.43.97"],"name":"v2003","type":"multus"}]'
    )
    (found,) = selection.parse(text, pod_namespace="default")
    assert found.capability_args() == {"ips": ["2605:d9c0:6:2003::5675/64", "198.32.43.120/27"]}
    assert found.default_route == ("2605:d9c0:6:2003::1", "198.32.43.97")
    assert len(found.unknown) == 1
