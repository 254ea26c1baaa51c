"""The daemon is restarted, and a pod with a second network starts meanwhile."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.node import Answer
from tests.record.incident import Incident, Seen
from tests.record.side import Side


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    side.serve()
    side.pod("web", "macvlan")
    side.end()
    with ThreadPoolExecutor(1) as pool:
        found = first(side)
        added = pool.submit(add, side, found)
        time.sleep(2)
        side.serve()
        answer = added.result()
    assert answer.code == 0, answer
    links = [name for name in side.pod_links()["web"] if name != "lo"]
    return Seen("net1" not in links, f"the runtime finds {found.name}; the pod has {' and '.join(links)}")


def first(side: Side) -> Path:
    """The configuration that a runtime takes."""
    net_d = Path(side.node.settings["cniConfigDir"])
    return min(path for path in net_d.iterdir() if path.suffix in (".conf", ".conflist"))


def add(side: Side, configuration: Path) -> Answer:
    content = json.loads(configuration.read_text())
    if content["type"] == "multus-shim":
        return side.call("ADD", "web")
    side.spaces["web"] = netns = side.node.add_netns()
    environment = side.node.environment("ADD", "c-web", netns, "web", side.namespace, side.uids["web"])
    inside = ["ip", "netns", "exec", Path(side.node.host).name, str(side.node.bin_dir / content["type"])]
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), *inside]
    done = subprocess.run(command, input=configuration.read_bytes(), capture_output=True, check=False, timeout=30)
    return Answer(done.returncode, done.stdout, done.stderr, 0.0)


ROW = Incident(
    __name__,
    "A restart of the daemon removes the configuration: a pod gets the cluster network alone",
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1527",
    show,
)
