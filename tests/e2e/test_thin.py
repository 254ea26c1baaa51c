"""From upstream's thin plugin to our daemon without a drain, and back: docs/migration.md, with the real programs."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

import multus_shim
from tests.e2e import thin
from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.node import Answer, Node
from tests.e2e.thin import INTERFACES, KINDS, V3, V4, Line, Thin
from tests.fakes.kubelet import FakeKubelet, container

RUNS: Final = ("Multus, thin", "Multus, thin, v3")
pytest_plugins = ["tests.e2e.kube_fixtures"]

MakeThin = Callable[[str], Thin]


@pytest.fixture
def made(
    api_server: ApiServer,
    api_namespace: str,
    make_node: Callable[..., Node],
    reference: Path,
    request: pytest.FixtureRequest,
) -> Thin:
    """A node where the thin plugin serves, of each release."""
    release = request.param
    node = Thin(api_server, make_node(standalone=False), api_namespace)
    try:
        node.lay_out_thin(reference, release)
    except ToolError as error:
        pytest.skip(str(error))
    return node


releases = pytest.mark.parametrize("made", [V3, V4], indirect=True)


def take_over(made: Thin) -> None:
    """The thin plugin's pod ends, ours starts."""
    made.stop_thin()
    made.install()
    made.node.start()


@releases
def test_twenty_pods_without_a_drain(made: Thin) -> None:
    with thin.running(made):
        links = made.node.links()
        made.start_thin()
        pods = [made.add(kind, number) for number, kind in enumerate(KINDS * 5, start=10)]
        before = made.state()
        netns = made.spaces["two-11"], made.spaces["two-15"]
        address = made.addresses("two-11", "net1")[0].partition("/")[0]
        with Line(*netns, address) as line:
            take_over(made)
            assert made.state() == before
            for pod in pods:
                for config in (made.cached[pod], made.current()):
                    if config.get("cniVersion", "") >= "0.4.0" and not pod.startswith(("alone", "ports")):
                        # portmap 1.1.1 wants IPv6 rules of a pod without IPv6.
                        checked = made.call("CHECK", pod, config)
                        assert checked.code == 0, (pod, checked.stdout)
            for pod in pods:
                if pod in ("two-11", "two-15"):
                    continue
                delete(made, pod)
        assert (line.lost, line.answered) == (0, line.sent)
        assert line.sent > 100
        for pod in ("two-11", "two-15"):
            delete(made, pod)
        made.assert_clean(links)


def delete(made: Thin, pod: str) -> None:
    """By the configuration of its ADD, as CRI-O does, or the current one, as containerd."""
    cached = int(pod.rpartition("-")[2]) % 2
    deleted = made.call("DEL", pod, made.cached[pod] if cached else made.current())
    assert (deleted.code, deleted.stdout) == (0, b""), (pod, deleted.stdout)
    assert made.node.links(made.spaces[pod]) == ["lo"]
    assert made.files(pod) == []


@releases
def test_a_pod_that_starts_in_between_waits_and_gets_its_networks(made: Thin) -> None:
    """The runtime calls `multus` still; it is our shim, which waits for the daemon."""
    with thin.running(made):
        made.start_thin()
        made.add("two", 10)
        made.stop_thin()
        made.install()
        for number, kind in enumerate(KINDS, start=20):
            made.pod(f"{kind}-{number}", **made.annotated(kind, number))
        answers: dict[str, Answer] = {}

        def add(pod: str) -> None:
            answers[pod] = made.call("ADD", pod, made.current())

        pods = [f"{kind}-{number}" for number, kind in enumerate(KINDS, start=20)]
        for pod in pods:
            made.spaces[pod] = made.node.add_netns()
        adds = [threading.Thread(target=add, args=(pod,)) for pod in pods]
        for thread in adds:
            thread.start()
        made.node.start()
        for thread in adds:
            thread.join()
        for pod in pods:
            assert answers[pod].code == 0, answers[pod].stdout
            assert made.cached[pod]["type"] == "multus"
            assert made.node.links(made.spaces[pod]) == INTERFACES[pod.partition("-")[0]]
        assert made.current()["type"] == "multus-shim"
        for pod in ["two-10", *pods]:
            delete(made, pod)


@releases
def test_twenty_pods_on_the_way_back(made: Thin) -> None:
    with thin.running(made):
        links = made.node.links()
        made.start_thin()
        pods = [made.add(kind, number) for number, kind in enumerate(KINDS * 2, start=10)]
        take_over(made)
        pods += [made.add(kind, number) for number, kind in enumerate(KINDS * 3, start=30)]
        assert len(pods) == 20
        before = made.state()[1:]
        assert made.node.stop() == 0
        made.start_thin()
        made.uninstall("--force")
        # What CRI-O keeps of a pod that our daemon attached names the shim.
        (made.node.bin_dir / "multus-shim").symlink_to("multus")
        assert made.state()[1:] == before
        assert made.current()["type"] == "multus"
        pods.append(made.add("two", 50))
        for pod in pods:
            delete(made, pod)
        # Upstream's own DEL leaves the rules of host ports that an annotation asked for, whoever made them.
        left = made.rules()
        assert {match[1] for line in left if (match := re.search(r'id: \\"c-([a-z]+)-', line))} == {"ports"}
        made.assert_clean(links, rules=left)


@releases
def test_pods_with_a_device_there_and_back(made: Thin) -> None:
    """The plugin gets the device of its pod from either side; the other one deletes the pod."""
    made.node.settings["kubeletDir"] = str(made.node.root / "kubelet")
    with thin.running(made), FakeKubelet(made.node.root / "kubelet") as kubelet:
        for number in (10, 11, 12):
            devices = container("app", {thin.RESOURCE: [f"0000:3b:02.{number % 8}"]})
            kubelet.add(f"device-{number}", devices, namespace=made.namespace)
        links = made.node.links()
        made.start_thin()
        pods = [made.add("device", number) for number in (10, 11)]
        assert b"0000:3b:02.2" in (made.node.cni_dir / "c-device-10").read_bytes()
        take_over(made)
        delete(made, pods.pop())
        pods.append(made.add("device", 12))
        assert b"0000:3b:02.4" in (made.node.cni_dir / "c-device-12").read_bytes()
        assert made.node.stop() == 0
        made.start_thin()
        made.uninstall("--force")
        (made.node.bin_dir / "multus-shim").symlink_to("multus")
        for pod in pods:
            delete(made, pod)
        made.assert_clean(links)


@pytest.mark.parametrize("made", [V4], indirect=True)
def test_a_package_that_removes_its_files_as_it_ends(made: Thin) -> None:
    """Ours comes first, beside a DaemonSet of another name; then that goes, and takes the configuration with it."""
    with thin.running(made):
        made.start_thin("--cleanup-config-on-exit=true")
        pods = [made.add(kind, number) for number, kind in enumerate(KINDS, start=10)]
        made.install()
        made.node.start()
        ours = made.net_d / "00-multus.conf"
        written = ours.read_bytes()
        pods.append(made.add("two", 20))
        made.stop_thin()
        assert not (made.net_d / "00-multus.conflist").exists(), "it has cleaned up"
        made.node.wait_until(lambda: ours.exists() and ours.read_bytes() == written, "the configuration is back")
        made.node.wait_for_log("the daemon restores it")
        pods.append(made.add("two", 30))
        # A restart brings the shim's second name back, if the package took it along.
        (made.node.bin_dir / "multus").unlink()
        made.install("--thin")
        for pod in pods:
            delete(made, pod)


@pytest.mark.parametrize("version", ["", "0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_a_configuration_of_the_thin_plugin_is_served(node: Node, version: str) -> None:
    """Every key that v3.8 to v4.3 read, and those that their entrypoints write."""
    node.settings |= {"clusterNetwork": "", "defaultNetworks": []}
    (node.root / "thin.conf").write_text("")
    node.ptp("storage", "10.86.0.0/24", namespace="default")
    node.pod("web", "storage")
    node.start()
    (node.bin_dir / "multus").write_bytes(multus_shim.binary().read_bytes())
    (node.bin_dir / "multus").chmod(0o755)
    ipam = {"type": "host-local", "subnet": "10.87.0.0/24", "dataDir": str(node.networks_dir)}
    delegate = {"cniVersion": version or "0.3.1", "name": "pods", "plugins": [{"type": "ptp", "ipam": ipam}]}
    config = {
        **({"cniVersion": version} if version else {}),
        "name": "multus-cni-network",
        "type": "multus",
        "capabilities": {"portMappings": True},
        "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig",
        "delegates": [delegate],
        "daemonSocketDir": str(node.socket.parent),
        "cniDir": str(node.cni_dir),
        "confDir": str(node.root / "conf.d"),
        "cniConf": str(node.root / "conf.d"),
        "binDir": str(node.bin_dir),
        "logFile": str(node.root / "thin.log"),
        "logLevel": "verbose",
        "logToStderr": True,
        "namespaceIsolation": False,
        "globalNamespaces": "default",
        "systemNamespaces": ["kube-system"],
        "multusNamespace": "kube-system",
        "readinessindicatorfile": str(node.root / "thin.conf"),
        "retryDeleteOnError": True,
    }
    netns = node.add_netns()
    for verb in ("ADD", "CHECK", "DEL"):
        if verb == "CHECK" and version in ("", "0.3.1"):
            continue
        done = node.cni(verb, "c1", netns, "web", stdin=json.dumps(config).encode(), shim=node.bin_dir / "multus")
        assert done.code == 0, (verb, done.stdout)
        if verb == "ADD":
            assert done.json.get("cniVersion", "") == (version or "0.1.0")
            assert node.links(netns) == ["eth0", "lo", "net1"]
    assert node.links(netns) == ["lo"]
    assert node.leftovers() == []
