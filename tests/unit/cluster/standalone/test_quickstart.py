"""The manifests of `examples/quickstart` are good ones."""

import json
import pathlib

from multus_daemon.cluster.standalone.store import Folder
from multus_daemon.spec.cni import conf
from multus_daemon.spec.nad import selection

CLUSTER = pathlib.Path(__file__).parents[4] / "examples" / "quickstart" / "cluster"


def test_every_network_that_the_pod_names_is_declared() -> None:
    view = Folder(CLUSTER).scan()
    assert view.errors == {}
    pod = view.pods["demo", "hello"]
    wanted = selection.parse(pod.annotations[selection.NETWORKS_ANNOTATION], pod_namespace=pod.namespace)
    assert [(str(item), item.interface) for item in wanted] == [("demo/storage", ""), ("demo/metrics", "probe0")]
    assert set(view.networks) == {("kube-system", "cluster"), *((item.namespace, item.name) for item in wanted)}


def test_every_network_is_a_good_configuration_that_writes_nowhere_by_itself() -> None:
    for network in Folder(CLUSTER).scan().networks.values():
        assert conf.parse(network.config.encode()).name == network.name
        assert "dataDir" not in json.loads(network.config)["ipam"], "the demo sets it"
