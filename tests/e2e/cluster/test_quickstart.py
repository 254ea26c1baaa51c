"""The commands of docs/quickstart.md and README.md on a real node, as they are printed, once the daemon runs there."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.cluster import images
from tests.e2e.cluster.multus import MultusPod
from tests.e2e.cluster.real_node import RealNode
from tests.e2e.cluster.workload import leftovers

pytest_plugins = ["tests.e2e.cluster.fixtures"]

ROOT: Final = Path(__file__).resolve().parents[3]
# The fixture installs: on a node without a registry the image comes another way.
OF_THE_INSTALL: Final = ("-n kube-system rollout", "apply -f manifests/", "apply -k manifests/")
_NUMBERS: Final = itertools.count()


def commands(page: str) -> list[str]:
    """The commands after the install, without `kubectl`, in their order."""
    blocks = re.findall(r"(?m)^```(\w*)\n((?:.*\n)*?)```$", (ROOT / page).read_text())
    lines = [line for language, text in blocks if not language for line in text.splitlines()]
    found = [line.removeprefix("kubectl ") for line in lines if line.startswith("kubectl ")]
    return [line for line in found if not line.startswith(OF_THE_INSTALL)]


def executed(node: RealNode, words: list[str]) -> str:
    """`kubectl exec` by the runtime: the API server of these tests cannot reach the kubelet."""
    namespace, words = (words[1], words[2:]) if words[0] == "-n" else ("default", words)
    target, command = words[1], words[words.index("--") + 1 :]
    pod = target
    if "/" in target:
        template = node.kubectl("-n", namespace, "get", target, "-o", "jsonpath={.spec.selector.matchLabels.name}")
        pods = ("-n", namespace, "get", "pods", "-l", f"name={template}", "-o", "jsonpath={.items[0].metadata.name}")
        pod = node.kubectl(*pods)
    (identifier,) = node.kubectl(
        *("-n", namespace, "get", "pod", pod, "-o", "jsonpath={.status.containerStatuses[0].containerID}")
    ).split()
    container = identifier.removeprefix("containerd://")
    return node.containerd.ctr("tasks", "exec", "--exec-id", f"try{next(_NUMBERS)}", container, *command)


@pytest.fixture
def multus(multus_pod: MultusPod) -> Iterator[MultusPod]:
    """The DaemonSet, rolled out, and the image of the example on the node."""
    multus_pod.start()
    image = re.findall(r'image: "?([\w:.]+)', (ROOT / "examples" / "second-network.yaml").read_text())[0]
    name = f"docker.io/library/{image}"
    multus_pod.node.containerd.ctr("images", "tag", images.BUSYBOX, name)
    yield multus_pod
    multus_pod.node.containerd.ctr("images", "remove", name)
    if "br-storage" in multus_pod.node.links():
        multus_pod.node.machine.run("ip", "link", "delete", "br-storage")


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_commands_show_what_the_page_says(multus: MultusPod, page: str) -> None:
    node = multus.node
    shown = {}
    for command in commands(page):
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(command)]
        shown[command] = executed(node, words) if "exec" in words else node.kubectl(*words, timeout=90)
        if command.startswith("exec hello"):
            assert re.search(r"inet 10\.10\.1\.\d+/24", shown[command])
    assert any(command.startswith("exec hello") for command in shown)
    if page == "docs/quickstart.md":
        (status,) = [json.loads(text) for command, text in shown.items() if command.startswith("get pod hello")]
        assert [(item["name"], item["interface"]) for item in status[1:]] == [("default/storage", "net1")]
        (explained,) = [text for command, text in shown.items() if "multusctl explain" in command]
        assert "default/storage" in explained
        assert next(text for command, text in shown.items() if "multusctl status" in command)
    if not any(command.startswith("delete") for command in shown):
        node.delete_pod("hello")
    node.wait_until(lambda: leftovers(node) == ["br-storage"], "nothing but the bridge is left")
