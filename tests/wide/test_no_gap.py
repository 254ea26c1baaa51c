"""From upstream's thick DaemonSet to ours on two real nodes, by the commands of docs/migration.md.

Pods start all the time, and each of them has its networks.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e import build_tools
from tests.e2e.build_tools import ToolError
from tests.e2e.cluster import daemon_image
from tests.e2e.cluster.fixtures import started
from tests.e2e.cluster.images import ImageError
from tests.e2e.cluster.multus import MultusPod, UpstreamPod
from tests.e2e.cluster.real_node import SECOND, RealNode, pod_spec
from tests.e2e.cluster.workload import two_networks
from tests.programs import needed

pytestmark = pytest.mark.timeout(1500)
pytest_plugins = ["tests.e2e.cluster.fixtures"]

ROOT: Final = Path(__file__).resolve().parents[2]
PODS: Final = 300
SAYS: Final = "cd /sys/class/net; echo * > /dev/termination-log"
"""The command of a pod, which ends at once: the names of its links are its message."""


@pytest.fixture(scope="module")
def nodes(pytestconfig: pytest.Config) -> Iterator[list[RealNode]]:
    with started(pytestconfig) as first, started(pytestconfig, beside=first, **SECOND) as second:
        yield [first, second]


@pytest.fixture
def upstream(nodes: list[RealNode], tmp_path: Path) -> Iterator[UpstreamPod]:
    """Upstream's DaemonSet on both nodes; our image is there, too."""
    try:
        ours = daemon_image.find()
        made = [UpstreamPod.released(node, tmp_path) for node in nodes]
    except (ToolError, ImageError) as error:
        pytest.skip(str(error))
    for each in made:
        each.install()
        each.node.containerd.import_image(ours)
    made[0].start()
    for each in made:
        each.wait_ready()
    two_networks(nodes[0])
    yield made[0]
    nodes[0].remove_pods()
    made[0].uninstall()


class Pods:
    """Makes a pod a second, which ends at once, and removes it; a context manager."""

    def __init__(self, node: RealNode) -> None:
        self._node = node
        self._path = node.server.client.resource("v1", "Pod").path("default")
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._make, self._collect)]
        self.made: list[str] = []
        self.ended: dict[str, tuple[str, str]] = {}
        """By pod: its node, and its links."""

    def __enter__(self) -> Pods:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _make(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += 1
            name = f"gap-{len(self.made)}"
            spec = pod_spec() | {"restartPolicy": "Never"}
            spec["containers"][0]["command"] = ["sh", "-c", SAYS]
            annotations = {"k8s.v1.cni.cncf.io/networks": "blue,green@fast"}
            metadata = {"name": name, "namespace": "default", "annotations": annotations}
            self._node.server.request("POST", self._path, {"metadata": metadata, "spec": spec})
            self.made.append(name)

    def _collect(self) -> None:
        while not (self._stop.wait(1) and len(self.ended) == len(self.made)):
            for pod in self._node.server.request("GET", self._path)["items"]:
                if pod["status"]["phase"] in ("Succeeded", "Failed"):
                    self._end(pod)

    def _end(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        (state,) = [item["state"]["terminated"] for item in pod["status"]["containerStatuses"]]
        self.ended[name] = pod["spec"]["nodeName"], state.get("message", "").strip()
        self._node.server.delete_pod(name, "default", grace=1)


def the_commands() -> str:
    """What the page says."""
    page = (ROOT / "docs" / "migration.md").read_text()
    (block,) = re.findall(r"(?m)^## Without a gap\n(?:(?!^#).*\n)*?```\n((?:(?!```).*\n)*)```\n", page)
    return str(block)


def test_no_pod_starts_without_its_networks(upstream: UpstreamPod, nodes: list[RealNode], tmp_path: Path) -> None:
    (tmp_path / "kubectl").symlink_to(build_tools.find("kubectl"))
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "KUBECONFIG": str(nodes[0].server.admin_kubeconfig),
        "HOME": str(tmp_path),
    }
    with Pods(nodes[0]) as pods:
        time.sleep(20)
        begin = time.monotonic()
        done = subprocess.run(
            [needed("bash"), "-c", the_commands()],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        seconds = time.monotonic() - begin
        print(done.stdout, done.stderr, f"{seconds:.0f} s, {len(pods.made)} pods meanwhile", sep="\n")
        nodes[0].wait_until(lambda: len(pods.made) >= PODS, "enough pods", 600)
    links = Counter(links for _, links in pods.ended.values())
    print(links, Counter(node for node, _ in pods.ended.values()))
    assert links == {"eth0 fast lo net1": len(pods.made)}
    assert len(pods.made) >= PODS
    assert {node for node, _ in pods.ended.values()} == {node.name for node in nodes}
    for node in nodes:
        assert MultusPod(node, tmp_path).readyz()[0] == 200
        assert "taints" not in node.server.get("v1", "Node", node.name)["spec"]
