"""The end of `make demo`: two nodes on one machine share a range of addresses, by a directory.

Each has a daemon and a pod; the pods get different addresses and reach each other. A reservation that somebody deletes
is back at once, and an address is free again when its pod is gone. Exit status 0 only if all of it held.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import demo
import echo
import yaml
from demo import DemoError, Node, console

SECONDS = 10.0
RANGE = {"range": "10.79.0.0/29", "range_start": "10.79.0.2", "gateway": "10.79.0.1"}
NODES = ("node-a", "node-b")


def network() -> dict[str, object]:
    """The NetworkAttachmentDefinition that both nodes have."""
    config = {"cniVersion": "1.0.0", "name": "lan", "type": "ptp", "ipam": {"type": "whereabouts", **RANGE}}
    metadata = {"namespace": "demo", "name": "lan"}
    kind = {"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition"}
    return {**kind, "metadata": metadata, "spec": {"config": json.dumps(config)}}


def pod(name: str) -> dict[str, object]:
    """The manifest of a node's pod."""
    metadata = {"namespace": "demo", "name": name, "annotations": {"k8s.v1.cni.cncf.io/networks": "lan"}}
    containers = [{"name": name, "image": "registry.k8s.io/pause:3.10"}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}


def made(root: Path, name: str, directory: Path, local: Path) -> Node:
    """Lay out a node, whose manifests have `addresses` as a link to the common directory."""
    root.mkdir()
    node = Node(root)
    # Both are on this machine: so are the addresses of their cluster network.
    node.addresses = local
    node.declare()
    (node.manifests / "pod.yaml").write_text(yaml.safe_dump_all([network(), pod(f"on-{name}")]))
    (node.manifests / "addresses").symlink_to(directory)
    return node


def held(directory: Path) -> dict[str, str]:
    """Nodes by the addresses that they hold."""
    files = [path for path in directory.iterdir() if not path.name.startswith(".")]
    return {path.name: json.loads(path.read_text())["metadata"]["annotations"]["multus.io/node"] for path in files}


def within(holds: Callable[[], bool], what: str) -> None:
    """Wait for it, and say how long it took. Raises DemoError."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > SECONDS:
            raise DemoError(f"not within {SECONDS:g} s: {what}")
        time.sleep(0.002)
    console.print(f"[green]{what}[/] [dim]({(time.monotonic() - began) * 1000:.0f} ms)[/]")


def live(nodes: dict[str, Node], directory: Path) -> None:
    """Start a pod on each node, let them meet, delete a reservation. Raises DemoError."""
    ups = {name: node.multusctl("up", f"demo/on-{name}") for name, node in nodes.items()}
    addresses = {name: up["pod"]["interfaces"][1]["addresses"][0].partition("/")[0] for name, up in ups.items()}
    console.print(*(f"{name} has given [bold]{address}[/]" for name, address in addresses.items()), sep="\n")
    if held(directory) != {address: name for name, address in addresses.items()}:
        raise DemoError(f"the directory has {held(directory)}")
    first, second = NODES
    if echo.ping(ups[first]["netns"], "net1", addresses[second], seconds=demo.PING_SECONDS) is None:
        raise DemoError(f"{addresses[second]} does not answer {addresses[first]}")
    console.print("each has an address of its own, and the pods reach each other")
    console.print(f"\n[bold]$ rm addresses/{addresses[first]}[/]")
    (directory / addresses[first]).unlink()
    within(lambda: addresses[first] in held(directory), f"{addresses[first]} is held again: its pod still has it")


def demonstrate(root: Path) -> None:
    """All of it. Raises DemoError."""
    directory = root / "addresses"
    directory.mkdir(mode=0o700)
    nodes = {name: made(root / name, name, directory, root / "local") for name in NODES}
    with contextlib.ExitStack() as stack:
        for name, node in nodes.items():
            stack.enter_context(node.daemon(name))
        console.print(f"[bold]two nodes share {RANGE['range']}[/]: a daemon each, and one directory `addresses`")
        try:
            live(nodes, directory)
        finally:
            for name, node in nodes.items():
                with contextlib.suppress(DemoError):
                    node.multusctl("down", f"demo/on-{name}")
        within(lambda: not held(directory), "the pods are gone, and both addresses are free")


if __name__ == "__main__":
    demo.main(demonstrate)
