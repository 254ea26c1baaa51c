"""`make demo-hotplug`: a running pod gets and loses a network by its annotation, and keeps what it has.

The pod's YAML is edited, and the interface comes and goes. Then an interface is deleted behind the daemon's back, and
it comes back. Exit status 0 only if all of it held.
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

from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns

SECONDS = 10.0
KEY = "k8s.v1.cni.cncf.io/networks"


def edit(node: Node, networks: str) -> None:
    """Write the pod's manifest with this annotation."""
    path = node.manifests / "pod.yaml"
    pod = yaml.safe_load(path.read_text())
    pod["metadata"]["annotations"][KEY] = networks
    beside = path.with_suffix(".new")
    beside.write_text(yaml.safe_dump(pod))
    beside.rename(path)
    console.print(f"\n[bold]$ edit pod.yaml[/]  {KEY}: {networks}")


def within(holds: Callable[[], bool], what: str, began: float | None = None) -> None:
    """Wait for it, and say how long it took, since `began` or now. Raises DemoError."""
    began = began or time.monotonic()
    while not holds():
        if time.monotonic() - began > SECONDS:
            raise DemoError(f"not within {SECONDS:g} s: {what}")
        time.sleep(0.002)
    console.print(f"[green]{what}[/] [dim]({(time.monotonic() - began) * 1000:.0f} ms)[/]")


def link(netns: str, ifname: str) -> Link | None:
    """Return the pod's interface of that name, None if there is none."""
    with PodNetns(netns) as pod, pod.inside():
        return pod.pod.find_link(ifname)


def is_up(netns: str, ifname: str, *, other_than: int = 0) -> bool:
    """Return whether the pod has an interface of that name that is up, and is not that of the index."""
    found = link(netns, ifname)
    return found is not None and found.is_up and found.index != other_than


def delete_and_wait(netns: str, ifname: str) -> None:
    """Delete an interface of the pod; it comes back. Raises DemoError."""
    console.print(f"\n[bold]$ ip -n POD link del {ifname}[/]")
    before = link(netns, ifname)
    if before is None:
        raise DemoError(f"{ifname} is not there")
    began = time.monotonic()
    with PodNetns(netns) as pod, pod.inside():
        pod.pod.delete_link(before.index)
    within(lambda: is_up(netns, ifname, other_than=before.index), f"{ifname} is there again", began)


def demonstrate(root: Path) -> None:
    """All of it. Raises DemoError."""
    node = Node(root)
    node.declare()
    settings = json.loads(node.config.read_text()) | {"hotplug": "on", "keep": "repair"}
    node.config.write_text(json.dumps(settings, indent=4))
    with node.daemon():
        console.print("ready, with hotplug: on and keep: repair")
        try:
            up = node.multusctl("up")
            edit(node, "storage")
            within(lambda: link(up["netns"], "probe0") is None, "probe0 has gone")
            edit(node, "storage,metrics@data0")
            within(lambda: is_up(up["netns"], "data0"), "data0 has come, and net1 is as it was")
            delete_and_wait(up["netns"], "data0")
            within(lambda: echo.ping(up["netns"], "data0", "10.77.2.1", seconds=1.0) is not None, "and it answers")
            node.multusctl("check")
            console.print("every network is as the annotation and the record have it")
        finally:
            with contextlib.suppress(DemoError):
                node.multusctl("down")
        demo.nothing_left(node, set())


if __name__ == "__main__":
    demo.main(demonstrate)
