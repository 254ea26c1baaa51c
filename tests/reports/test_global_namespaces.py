"""An operator's networks live in a namespace of their own while isolation is on: listed namespaces are open to all.

k8snetworkplumbingwg/multus-cni#567; kind: namespaces of networks.
"""

import pytest

from multus_daemon.spec.netconf import model

ISOLATED = {"clusterNetwork": "x", "namespaceIsolation": True}


@pytest.mark.parametrize(
    ("listed", "target", "allowed"),
    [
        ("", "default", True),
        ("", "openshift-multus", False),
        ("default,openshift-multus", "openshift-multus", True),
        ("default, openshift-sriov-network-operator", "openshift-sriov-network-operator", True),
        ("openshift-multus", "default", False),
        ("openshift-multus", "foo", True),
    ],
)
def test_a_pod_of_foo(listed: str, target: str, allowed: bool) -> None:
    rules = model.load(b"{}", {**ISOLATED, **({"globalNamespaces": listed} if listed else {})})
    assert rules.allows("foo", target) is allowed
