"""OpenShift's daemon isolates namespaces, lists those that are open, and waits for the file of OVN-Kubernetes: every
key counts.

openshift/cluster-network-operator#2721; kind: configurations of the daemon.
"""

from multus_daemon import settings
from multus_daemon.spec.netconf import model


def test_every_key_counts() -> None:
    given = {
        "cniVersion": "0.3.1",
        "chrootDir": "/hostroot",
        "logToStderr": True,
        "logLevel": "verbose",
        "binDir": "/var/lib/cni/bin",
        "cniConfigDir": "/host/etc/cni/net.d",
        "multusConfigFile": "auto",
        "multusAutoconfigDir": "/host/run/multus/cni/net.d",
        "namespaceIsolation": True,
        "globalNamespaces": "default,openshift-multus,openshift-sriov-network-operator",
        "readinessindicatorfile": "/host/run/multus/cni/net.d/10-ovn-kubernetes.conf",
        "daemonSocketDir": "/run/multus/socket",
        "socketDir": "/host/run/multus/socket",
    }
    found = settings.from_object(given, "daemon-config.json")
    assert found.warnings == ()
    assert {key: found.effective()[key] for key in given} == given
    rules = model.load(b"{}", found.overlay)
    assert rules.allows("mine", "openshift-multus")
    assert not rules.allows("mine", "other")
