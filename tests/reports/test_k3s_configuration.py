"""A daemon on k3s had the paths of its container, `kubeconfig` and `clusterNetwork` as a file in its configuration:
all are taken.

k8snetworkplumbingwg/multus-cni#1071; kind: configurations of the daemon.
"""

from multus_daemon import settings


def test_every_key_counts() -> None:
    given = {
        "chrootDir": "/hostroot",
        "confDir": "/host/etc/cni/net.d",
        "logLevel": "debug",
        "socketDir": "/host/run/multus/",
        "cniVersion": "1.0.0",
        "cniConfigDir": "/host/etc/cni/net.d",
        "multusConfigFile": "auto",
        "multusAutoconfigDir": "/host/etc/cni/net.d",
        "clusterNetwork": "/host/etc/cni/net.d/10-flannel.conflist",
        "kubeconfig": "/host/etc/cni/net.d/multus.d/multus.kubeconfig",
    }
    found = settings.from_object(given, "daemon-config.json")
    assert found.warnings == ()
    assert {key: found.effective()[key] for key in given} == given
    assert found.overlay["clusterNetwork"] == given["clusterNetwork"]
