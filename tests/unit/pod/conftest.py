"""A whole engine over fakes: one pod `web/p1`, a cluster network, and networks to ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from multus_daemon import settings
from multus_daemon.api.verbs import Verbs
from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.metrics import Metrics
from multus_daemon.metrics.declared import REQUESTS
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.run import ListRunner
from multus_daemon.pod import engine as product
from multus_daemon.pod.records import Records
from multus_daemon.pod.request import CniRequest, DelegateRequest
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Interface, IpConfig, Result
from multus_daemon.spec.nad.selection import NETWORKS_ANNOTATION, NetworkAttachmentDefinition
from tests.counted import value_of
from tests.fakes.cluster import FakeClusterStore
from tests.fakes.devices import FakeDeviceFiles, FakeDeviceSource
from tests.fakes.namespaces import FakeNamespaces
from tests.fakes.runner import FakeDelegateRunner, FakePluginRunner
from tests.fakes.store import FakeDelegateStore

MORE = "; more: multusctl explain web/p1"
"""The end of every Event about a failure."""
NETNS = "/run/netns/p1"


class FakeConfFiles(NodeConfFiles):
    """Configurations by path, and by (directory, name); plugins by (path, name)."""

    def __init__(self) -> None:
        self.paths: dict[str, NetworkConfig] = {}
        self.names: dict[tuple[str, str], NetworkConfig] = {}
        self.beside: dict[tuple[str, str], tuple[bytes, ...]] = {}

    def by_name(self, directory: str, name: str) -> NetworkConfig | None:
        return self.names.get((directory, name))

    def at_path(self, path: str) -> NetworkConfig:
        return self.paths[path]

    def plugins_beside(self, path: str, name: str) -> tuple[bytes, ...]:
        return self.beside.get((path, name), ())


def definition(namespace: str, name: str, config: str | None = None, **annotations: str) -> NetworkAttachmentDefinition:
    text = json.dumps({"cniVersion": "1.0.0", "name": name, "type": "fake"}) if config is None else config
    return NetworkAttachmentDefinition(namespace, name, text, annotations)


class Cluster(FakeClusterStore):
    """Notes whether it was told to go on writing a status."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps_trying: list[bool] = []

    def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        self.keeps_trying.append(keep_trying)
        super().write_network_status(pod, value, keep_trying=keep_trying)


class Engine:
    """The verbs and everything behind them."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.files = FakeConfFiles()
        self.runner = FakeDelegateRunner()
        self.store = FakeDelegateStore()
        self.links = FakeNamespaces({NETNS: ["lo"]})
        self.devices = FakeDeviceSource()
        self.device_files = FakeDeviceFiles()
        self.gates = Gates()
        self.metrics = Metrics(version="test")
        self.delete_tries = 0
        # Plugins are called in a known order. What is side by side is the matter of test_attach_together.
        self.attach_concurrency = 1
        self.clock = 1000.0
        self.overlay: dict[str, Any] = {"clusterNetwork": "cluster"}
        self.stdin: dict[str, Any] = {}
        """Keys of the runtime's configuration besides its version and its name."""
        self.cluster.put_network(definition("kube-system", "cluster"))
        for name in ("n1", "n2"):
            self.cluster.put_network(definition("web", name))
        self.verbs = self.make_verbs()
        self.declare()

    def use_files(self, directory: Path) -> FakePluginRunner:
        """Take the real chain of plugins, store and result cache; the plugins of every type, which are no processes."""
        plugins, cache = FakePluginRunner(), ResultCache(directory / "cni")
        self.runner = ListRunner(plugins.as_plugins, cache, "/bin")  # type: ignore[assignment]  # it serves as well
        self.store = FileStore(directory / "cni", cache)  # type: ignore[assignment]  # it serves as well
        self.verbs = self.make_verbs()
        return plugins

    def make_verbs(self, status_write: str = "best-effort") -> Verbs:
        """The verbs as a daemon that has just started has them."""
        core = product.Engine(
            self.cluster,
            self.files,
            self.runner,
            Records(self.store),
            self.links,
            self.devices,
            self.device_files,
            self.gates,
            settings.from_object({"statusWrite": status_write, "deleteTries": self.delete_tries}, "test"),
            self.overlay,
            self.metrics,
            clock=lambda: self.clock,
            networks_at_once=self.attach_concurrency,
        )
        return Verbs(core)

    def _count(self, name: str, **labels: str) -> int:
        value = value_of(self.metrics, name, **labels)
        assert value is not None
        return int(value)

    @property
    def collected(self) -> dict[str, int]:
        """Attachments that GC has come upon, by outcome."""
        found = {
            outcome: self._count("multus_gc_attachments_total", outcome=outcome)
            for outcome in ("success", "skipped", "error")
        }
        return {outcome: count for outcome, count in found.items() if count}

    @property
    def unsupported_args(self) -> dict[str, int]:
        """Capability args that were not supported."""
        found = {request: self._count("multus_requests_unmet_total", request=request) for request in REQUESTS}
        return {request: count for request, count in found.items() if count}

    @property
    def checks_failed(self) -> int:
        return self._count("multus_check_failures_total")

    @property
    def given_up(self) -> int:
        return self._count("multus_deletes_given_up_total")

    @property
    def never_attached(self) -> int:
        return self._count("multus_networks_never_attached_total")

    @property
    def set_aside(self) -> int:
        return self._count("multus_containers_set_aside_total")

    @property
    def replaced_netns(self) -> int:
        return self._count("multus_replaced_namespaces_total")

    def declare(self, networks: str | None = None, *, uid: str = "u1", annotations: Mapping[str, str] = {}) -> None:
        """The pod `web/p1`, asking for `networks`."""
        found = dict(annotations) | ({NETWORKS_ANNOTATION: networks} if networks is not None else {})
        self.cluster.put_pod(Pod(Namespace("web"), PodName("p1"), PodUid(uid), found))

    def request(self, verb: str = "ADD", *, netns: str = NETNS, container: str = "c1", uid: str = "u1") -> CniRequest:
        """A call of the runtime for the pod."""
        text = f"IgnoreUnknown=1;K8S_POD_NAMESPACE=web;K8S_POD_NAME=p1;K8S_POD_UID={uid};EXTRA=kept"
        stdin = json.dumps({"cniVersion": "1.0.0", "name": "multus", **self.stdin}).encode()
        return CniRequest(verb, ContainerId(container), netns, IfName("eth0"), names.kubernetes_args(text), stdin)

    def plug(
        self,
        verb: str = "ADD",
        *,
        ifname: str = "net5",
        network: str = "hot",
        netns: str = NETNS,
        container: str = "c1",
        uid: str = "u1",
        config: str = "",
        **asked: Any,
    ) -> DelegateRequest:
        """A call of the hot-plug controller for the pod."""
        text = f"K8S_POD_NAMESPACE=web;K8S_POD_NAME=p1;K8S_POD_UID={uid}"
        raw = config or json.dumps({"cniVersion": "0.4.0", "name": network, "type": "fake"})
        return DelegateRequest(
            verb,
            ContainerId(container),
            netns,
            IfName(ifname),
            names.kubernetes_args(text),
            raw.encode(),
            network=network,
            **asked,
        )

    @property
    def warnings(self) -> list[tuple[str, str]]:
        """(reason, message) of every Warning event."""
        return [(reason, message) for _, kind, reason, message in self.cluster.events if kind == "Warning"]

    def interface(self, name: str, network: str, address: str) -> None:
        """Let the ADD of `network` report an interface, and the kernel have it."""
        self.runner.results[network] = Result(
            (Interface(name, mac="02:00:00:00:00:01", sandbox=NETNS),), (IpConfig(address, interface=0),)
        )


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    assert made.links.held == [], "a request that has ended holds namespaces open"
