"""Each alert is provoked once: a fault in a real daemon, a real Prometheus, and the runbook's command finds the cause.

The rules are those of `manifests/monitoring` with short durations; a scrape and an evaluation each second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from multus_daemon.cluster.kube import csr
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.store import FileStore
from multus_daemon.spec.cni.names import ContainerId
from tests.e2e.certificates import Authority
from tests.e2e.monitoring import rules
from tests.e2e.monitoring.cluster import Cluster
from tests.e2e.monitoring.prometheus import METRICS_PORT, Prometheus
from tests.e2e.node import Node
from tests.fakes.apiserver import PODS, RESERVATIONS
from tests.programs import needed

RUNS: Final = ("Prometheus",)
NAMES = sorted({rule["alert"] for rule in rules.alerts()})
NODES = [name.lower() for name in NAMES]
"""Each test has a node of the alert's name."""

FABRIC = """
if [ -e {broken} ] && [ $CNI_COMMAND = $(cat {broken}) ]; then
    echo '{{"code": 117, "msg": "the fabric is away"}}'; exit 1
fi
[ $CNI_COMMAND = DEL ] || echo '{{"cniVersion": "1.0.0"}}'
"""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    rule_file = rules.write(directory / "rules.yaml", rules.hurried())
    with Prometheus(directory, rule_file, NODES) as running:
        yield running


class Watched:
    """A node whose daemon Prometheus scrapes, and the alert that is to fire for it."""

    def __init__(self, node: Node, alert: str, prometheus: Prometheus) -> None:
        self.node, self.alert, self.name, self.prometheus = node, alert, alert.lower(), prometheus
        self.cluster: Cluster | None = None

    def start(self, *, ready: bool = True) -> None:
        """Start the daemon; the alert does not fire yet."""
        self.node.start(ready=ready)
        self.prometheus.scraped.add(self.name, self.node)
        self.prometheus.until(
            lambda: self.prometheus.query(f'multus_build_info{{node="{self.name}"}}'), "Prometheus has scraped it"
        )

    def fires(self, **labels: str) -> str:
        """Wait for the alert; return its summary."""
        found = self.prometheus.until_firing(self.alert, **labels)
        summary: str = found["annotations"]["summary"]
        assert "error" not in summary
        return summary

    def fires_here(self, **labels: str) -> str:
        """Wait for the alert of this node; return its summary."""
        return self.fires(node=self.name, **labels)

    def runbook(self, command: str, **words: str) -> str:
        """Run a command of the alert's entry, with `words` in the place of its placeholders; return what it prints."""
        assert command in rules.commands(self.alert), f"docs/runbook.md has another command for {self.alert}"
        for placeholder, word in words.items():
            command = command.replace(placeholder, word)
        program, *arguments = shlex.split(command)
        if program == "kubectl":
            assert self.cluster is not None
            assert arguments[0] == "multus"
            return self.cluster.kubectl_multus(*arguments[1:])
        assert program == "multusctl"
        arguments += ["--config", str(self.node.config)]
        call = self.node.contained(sys.executable, "-m", "multus_tools.ctl", *arguments)
        done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})
        print(done.stdout + done.stderr)
        return done.stdout + done.stderr


Watch = Callable[[str], Watched]


@pytest.fixture
def watch(make_node: Callable[..., Node], prometheus: Prometheus) -> Iterator[Watch]:
    """Make the node for an alert; standalone, with the networks `storage` (six addresses) and `fabric`."""
    made: list[Watched] = []

    def make(alert: str) -> Watched:
        node = make_node(settings={"metricsPort": METRICS_PORT, "metricsAddress": "127.0.0.1", "reconcileSeconds": 0.5})
        node.ptp("cluster", "10.81.0.0/24", cniVersion="1.0.0")
        node.ptp("storage", "10.81.1.0/29", namespace="default")
        node.plugin("fabric", FABRIC.format(broken=node.root / "broken"))
        node.network("fabric", {"cniVersion": "1.0.0", "name": "fabric", "type": "fabric"}, "default")
        made.append(Watched(node, alert, prometheus))
        return made[-1]

    yield make
    for found in made:
        with contextlib.suppress(KeyError):
            prometheus.scraped.remove(found.name)


def configuration_directory(node: Node) -> Path:
    """Let the daemon make the configuration that the runtime reads, in this directory."""
    directory = node.root / "net.d"
    directory.mkdir()
    node.settings |= {"cniConfigDir": str(directory), "multusAutoconfigDir": str(directory)}
    del node.settings["clusterNetwork"]
    return directory


def with_primary(node: Node) -> Path:
    """The same, where a primary network is configured."""
    directory = configuration_directory(node)
    config = {"cniVersion": "1.0.0", "name": "primary", "plugins": [{"type": "fabric"}]}
    (directory / "10-primary.conflist").write_text(json.dumps(config))
    return directory


def attach(node: Node, name: str, networks: str | None = None) -> str:
    """ADD of a pod, container `NAME-0`; the path of its namespace."""
    node.pod(name, networks)
    netns = node.add_netns()
    answer = node.cni("ADD", f"{name}-0", netns, name)
    assert answer.code == 0, answer.stdout
    return netns


def test_every_alert_is_provoked() -> None:
    assert sorted(set(re.findall(r'watch\("(\w+)"\)', Path(__file__).read_text()))) == NAMES


def test_a_daemon_that_is_away(watch: Watch) -> None:
    it = watch("MultusDaemonAbsent")
    it.start()
    it.node.kill()
    assert it.fires_here() == f"Node {it.name} has no Multus daemon that answers."
    assert "error daemon:" in it.runbook("multusctl doctor")


def test_a_condition_of_readiness_that_is_false(watch: Watch) -> None:
    it = watch("MultusDaemonNotReady")
    directory = configuration_directory(it.node)
    (directory / "10-primary.conflist").write_text('{"cniVersion": "1.0.0", "name": "primary", "plugins": ""}')
    it.start(ready=False)
    assert it.fires_here(condition="primary").endswith("is not ready: primary.")
    assert "10-primary.conflist" in it.runbook("multusctl status")


def test_a_file_that_comes_before_ours(watch: Watch) -> None:
    it = watch("MultusCniConfigShadowed")
    directory = with_primary(it.node)
    it.start()
    shutil.copyfile(directory / "10-primary.conflist", directory / "00-first.conflist")
    it.fires_here()
    assert "00-first.conflist" in it.runbook("multusctl doctor")


def test_something_promised_that_does_not_work(watch: Watch) -> None:
    it = watch("MultusDegraded")
    directory = with_primary(it.node)
    it.start()
    (directory / "00-first.conflist").write_text("{")
    assert it.fires_here(reason="runtime").endswith("promises: runtime.")
    assert "00-first.conflist" in it.runbook("multusctl status")


def test_a_pod_that_runs_without_its_networks(watch: Watch, tmp_path: Path) -> None:
    it = watch("MultusPodsLackingNetworks")
    with Cluster(tmp_path, it.name) as it.cluster:
        it.cluster.serve(it.node)
        config = json.dumps({"cniVersion": "1.0.0", "name": "fabric", "type": "fabric"})
        server = it.cluster.server
        annotations = {"k8s.v1.cni.cncf.io/networks": "fabric"}
        it.cluster.do(lambda: server.add_network("fabric", namespace="default", config=config))
        pod = {"metadata": {"namespace": "default", "name": "bare", "uid": "uid-bare", "annotations": annotations}}
        spec = {"nodeName": it.name, "containers": [{"name": "c"}]}
        it.cluster.do(lambda: server.put(PODS, {**pod, "spec": spec, "status": {"phase": "Running"}}))
        it.start()
        assert it.fires_here().startswith("1 pods of node")
        assert "default/bare" in it.runbook("kubectl multus pods -A")
        said = it.runbook("kubectl multus why NS/POD", **{"NS/POD": "default/bare"})
        assert "delete it, so that it is made anew" in said.replace("\n  ", " ")


def test_an_attachment_that_something_changed(watch: Watch) -> None:
    it = watch("MultusAttachmentBroken")
    ipam = {"type": "host-local", "subnet": "10.81.2.0/24", "dataDir": str(it.node.networks_dir)}
    lan = {"cniVersion": "1.0.0", "name": "lan", "type": "bridge", "bridge": "lan0", "ipam": ipam}
    it.node.network("lan", lan, "default")
    it.start()
    netns = attach(it.node, "hello", "lan")
    subprocess.run([needed("ip"), "-n", Path(netns).name, "link", "delete", "net1"], check=True)
    assert "default/lan" in it.fires_here(network="default/lan")
    said = it.runbook("multusctl drift")
    assert "default/hello" in said
    assert 'interface "net1" is not there' in said
    said = it.runbook("multusctl repair NS/POD --dry-run", **{"NS/POD": "default/hello"})
    assert "would be repaired" in said
    assert "net1" not in it.node.links(netns)


def test_adds_that_fail_by_a_plugin(watch: Watch) -> None:
    it, plugin = watch("MultusAddFailing"), watch("MultusPluginFailing")
    it.start()
    plugin.node.__exit__()
    plugin = Watched(it.node, plugin.alert, it.prometheus)
    (it.node.root / "broken").write_text("ADD")
    it.node.pod("hello", "fabric")
    netns = it.node.add_netns()
    with repeated(lambda: it.node.cni("ADD", "c1", netns, "hello")):
        # Not always all: a scrape between the counters of one request makes the share of a short time uneven.
        for severity in ("critical", "warning"):
            assert re.match(r"(100|[5-9]\d(\.\d+)?)% of the ADDs of the last", it.fires(severity=severity))
        said = plugin.fires(node=it.name)
        assert re.fullmatch(rf"(100|[5-9]\d(\.\d+)?)% of the ADD calls of plugin fabric fail on node {it.name}\.", said)
    assert "the fabric is away" in it.runbook("multusctl status")
    assert "the fabric is away" in plugin.runbook("multusctl status")


def test_adds_that_are_slow(watch: Watch) -> None:
    it = watch("MultusAddSlow")
    it.node.plugin("fabric", 'sleep 1.1; echo \'{"cniVersion": "1.0.0"}\'')
    it.start()
    it.node.pod("hello", "fabric")
    netns = it.node.add_netns()
    with repeated(lambda: [it.node.cni(verb, "c1", netns, "hello") for verb in ("ADD", "DEL")]):
        it.fires(severity="critical")
        it.fires(severity="warning")
    assert re.search(r"1\d{3}\.\d ms +plugin fabric: ADD success", it.runbook("multusctl trace"))


def test_a_spool_that_does_not_drain(watch: Watch) -> None:
    it = watch("MultusSpoolNotDraining")
    it.node.settings["deleteTries"] = 0
    it.start()
    netns = attach(it.node, "hello", "fabric")
    (it.node.root / "broken").write_text("DEL")
    it.node.kill()
    spool = it.node.cni_dir / "spool"
    spool.mkdir(mode=0o700)
    # As the shim writes it.
    entry = {"env": it.node.environment("DEL", "hello-0", netns, "hello"), "config": b64encode(it.node.stdin).decode()}
    (spool / f"{time.time_ns():020}-1.json").write_text(json.dumps(entry))
    it.node.start()
    assert it.fires_here().startswith("1 DELs")
    said = it.runbook("multusctl status")
    assert "1 DEL to replay" in said
    assert "the fabric is away" in said


def test_leftovers_that_grow(watch: Watch) -> None:
    it = watch("MultusLeftoversGrowing")
    it.start()
    netns = attach(it.node, "hello", "fabric")
    none = f'node:multus_leftover_containers:sum{{node="{it.name}"}} == 0'
    it.prometheus.until(lambda: it.prometheus.query(none), "there is a time without leftovers")
    (it.node.root / "broken").write_text("DEL")
    it.node.remove_netns(netns)
    assert "1 containers" in it.fires_here()
    assert "which the daemon's log names" in it.runbook("multusctl attachments --leaks -o wide")
    said = re.compile("hello-0 .* can't be deleted .*: the fabric is away")
    it.node.wait_until(lambda: said.search(it.node.log.read_text()) is not None, "the log names it")


def test_a_container_that_is_set_aside(watch: Watch) -> None:
    it = watch("MultusContainersSetAside")
    it.start()
    attach(it.node, "hello", "fabric")
    it.node.kill()
    # It has failed for a day: without the wait.
    store = FileStore(it.node.cni_dir, ResultCache(it.node.cni_dir))
    record = store.load(ContainerId("hello-0"))
    assert record is not None
    store.set_aside(record, since=time.time(), why="the fabric is away")
    it.node.start()
    assert "1 containers are set aside" in it.fires_here()
    assert "the fabric is away" in it.runbook("multusctl attachments --leaks -o wide")


def test_a_range_without_addresses(watch: Watch) -> None:
    it = watch("MultusIpamRangeNearlyFull")
    it.start()
    for number in range(5):
        attach(it.node, f"p{number}", "storage")
    assert "100% of the addresses of network default/storage" in it.fires_here(network="default/storage")
    assert "10.81.1.6" in it.runbook("multusctl attachments")


def with_lan(it: Watched, *pods: str) -> None:
    """A network with five addresses for the whole cluster, and pods of the node that ask for it."""
    assert it.cluster is not None
    server = it.cluster.server
    it.cluster.serve(it.node)
    lan: dict[str, object] = {
        "type": "whereabouts",
        "range": "10.81.3.0/29",
        "range_start": "10.81.3.2",
        "gateway": "10.81.3.1",
    }
    configs: dict[str, dict[str, object]] = {"lan": {"type": "ptp", "ipam": lan}, "cluster": {"type": "fabric"}}
    for name, config in configs.items():
        text = json.dumps({"cniVersion": "1.0.0", "name": name, **config})
        space = "kube-system" if name == "cluster" else "default"
        it.cluster.do(lambda name=name, space=space, text=text: server.add_network(name, namespace=space, config=text))
    for name in pods:
        annotations = {"k8s.v1.cni.cncf.io/networks": "lan"}
        metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}", "annotations": annotations}
        pod = {"metadata": metadata, "spec": {"nodeName": it.name, "containers": [{"name": "c"}]}}
        it.cluster.do(lambda pod=pod: server.put(PODS, {**pod, "status": {"phase": "Running"}}))


def test_a_shared_range_without_addresses(watch: Watch, tmp_path: Path) -> None:
    it = watch("MultusAddressRangeNearlyFull")
    with Cluster(tmp_path, it.name) as it.cluster:
        names = [f"p{number}" for number in range(5)]
        with_lan(it, *names)
        it.start()
        for name in names:
            answer = it.node.cni("ADD", name, it.node.add_netns(), name)
            assert answer.code == 0, answer.stdout
        assert "100% of the addresses of network default/lan" in it.fires(network="default/lan")
        assert f"{it.name}: 5" in it.runbook("kubectl multus addresses")
        assert "default/p4" in it.runbook("kubectl multus addresses -o wide")


def test_an_address_that_two_pods_have(watch: Watch, tmp_path: Path) -> None:
    it = watch("MultusAddressTaken")
    with Cluster(tmp_path, it.name) as it.cluster:
        with_lan(it, "web")
        it.start()
        answer = it.node.cni("ADD", "c1", it.node.add_netns(), "web")
        assert answer.code == 0, answer.stdout
        server = it.cluster.server
        ((key, found),) = server.objects[RESERVATIONS].items()
        # etcd is restored, and another node is faster.
        other = {"metadata": {"namespace": key[0], "name": key[1], "uid": "other"}, "spec": {"podref": "default/other"}}
        other["metadata"]["annotations"] = found["metadata"]["annotations"] | {"multus.io/node": "elsewhere"}
        it.cluster.do(lambda: server.put(RESERVATIONS, other))
        assert it.fires_here().startswith("1 addresses of pods of node")
        said = it.runbook("kubectl multus why NS/POD", **{"NS/POD": "default/web"})
        assert "default/other" in said


def test_an_api_server_that_is_away(watch: Watch, tmp_path: Path) -> None:
    it = watch("MultusInformerStale")
    with Cluster(tmp_path, it.name) as it.cluster:
        it.cluster.serve(it.node)
        it.cluster.away()
        it.start(ready=False)
        assert it.fires_here(resource="pods").endswith("does not follow the API server (pods).")
        assert "Connect" in it.runbook("multusctl doctor")


def test_a_status_that_is_not_written(watch: Watch, tmp_path: Path) -> None:
    it = watch("MultusNetworkStatusPending")
    with Cluster(tmp_path, it.name) as it.cluster:
        it.cluster.serve(it.node)
        server = it.cluster.server
        config = json.dumps({"cniVersion": "1.0.0", "name": "cluster", "type": "fabric"})
        it.cluster.do(lambda: server.add_network("cluster", namespace="kube-system", config=config))
        it.cluster.do(lambda: server.add_pod("hello", namespace="default", node=it.name, uid="uid-hello"))
        it.start()
        it.cluster.do(lambda: server.fail(500, times=math.inf, method="PATCH"))
        assert it.node.cni("ADD", "c1", it.node.add_netns(), "hello").code == 0
        assert it.fires_here().startswith("1 network-status")
        assert "not yet written: 1" in it.runbook("multusctl status")
        it.node.wait_for_log("as the test wants")


def test_a_certificate_that_is_not_renewed(watch: Watch, tmp_path: Path) -> None:
    it = watch("MultusCertificateEnding")
    with Cluster(tmp_path, "node-a") as it.cluster:
        it.cluster.serve(it.node)
        folder = it.node.root / "certificates"
        folder.mkdir()
        authority = Authority(tmp_path / "authority", ("IP:127.0.0.1",))
        pair = authority.client("node", f"{csr.USER_PREFIX}node-a", (csr.ORGANIZATION,), seconds=25)
        both = pair.certificate.read_bytes() + pair.key.read_bytes()
        (folder / "multus-client-current.pem").write_bytes(both)
        del it.node.settings["kubeconfig"]
        it.node.settings["perNodeCertificate"] = {
            "enabled": True, "bootstrapKubeconfig": str(it.cluster.kubeconfig), "certDir": str(folder),
        }  # fmt: skip
        it.start(ready=False)
        it.fires_here()
        it.node.wait_until(lambda: it.node.get("/readyz?gates")[0] == 503, "it has ended")
        assert "the client certificate of node" in it.runbook("multusctl status")


def test_a_configuration_that_another_program_changes(watch: Watch) -> None:
    it = watch("MultusCniConfigRestored")
    directory = with_primary(it.node)
    it.start()
    ours = directory / "00-multus.conf"
    it.node.wait_until(lambda: '"multus-shim"' in ours.read_text(), "the configuration is written")
    with repeated(lambda: ours.write_text("{}"), pause=0.3):
        it.fires_here()
        assert f"{ours} was changed by another program" in it.runbook("multusctl doctor")


@contextlib.contextmanager
def repeated(work: Callable[[], object], pause: float = 0.05) -> Iterator[None]:
    """Do it again and again beside the block."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(pause):
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
