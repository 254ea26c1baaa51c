"""What it costs to keep the networks of 250 running pods while other namespaces make and remove links all the time.

    python -m tests.soak.keep_load [--pods 250] [--seconds 20] [--rate 1000]

Each pod has four bridge networks. Every second so many links, and as many addresses, are made and removed: in a
namespace to which the host has given no id, in one with an id, whose pod is somebody else's, and on the host. Prints
the processor time and the anonymous memory of the whole daemon with each load and without one, and the memory that
the loop alone keeps of these pods. Exit status 1 where a pod fails, where a load costs 3 % of a core more than none,
where the daemon takes more than 0.3 % without one, or where the loop keeps more than 4 MB.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.watch import Watch
from multus_daemon.node.containers import Containers
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.store import FileStore
from multus_daemon.pod.view import Entry
from multus_daemon.spec.cni.names import ContainerId
from tests.e2e.node import Node
from tests.programs import needed
from tests.soak.churn import Outcome, end_in_good_order, report
from tests.soak.steady import sample

NETWORKS: Final = 4
LOADED_MAX = 3.0
"""Percent of a core, more than without a load."""
IDLE_MAX = 0.3
"""Percent of a core. Without the loop the daemon takes 0.17 %."""
KEPT_MAX = 4_000_000
"""Bytes."""
QUIET_SECONDS = 70.0
"""A daemon compares the pods of its predecessor within a minute; new ones need less."""
_GROUP: Final = 7000
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def prepare(node: Node) -> str:
    """Declare a cluster network and the bridge networks; the networks annotation of each pod."""
    node.ptp("cluster", "10.60.0.0/16")
    for number in range(NETWORKS):
        name = f"lan{number}"
        ipam = {"type": "host-local", "subnet": f"10.{61 + number}.0.0/16", "dataDir": str(node.networks_dir)}
        config = {"cniVersion": node.cni_version, "name": name, "type": "bridge", "bridge": f"br{number}", "ipam": ipam}
        node.network(name, config, "default")
    return ",".join(f"lan{number}" for number in range(NETWORKS))


def attach(node: Node, pods: int, networks: str) -> list[str]:
    """Attach so many pods; a line for each that failed."""
    for number in range(pods):
        node.pod(f"p{number}", networks)
    places = [node.add_netns() for _ in range(pods)]
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda number: node.cni("ADD", f"c{number}", places[number], f"p{number}"), range(pods))
        return [f"ADD of p{number}: {answer.stdout!r}" for number, answer in enumerate(answers) if answer.code]


def kept_bytes(node: Node) -> int:
    """Return the bytes that the loop keeps: its state of the pods on record, and its socket's buffers."""
    store = FileStore(node.cni_dir, ResultCache(node.cni_dir))
    kept = [0]

    def enter(container_id: ContainerId, containers: Containers, watch: Watch) -> None:
        record = store.load(container_id)
        assert record is not None
        entry = Entry.of(record)
        containers.enter(entry, 0.0)
        number = watch.follow(entry.netns, entry.netns_id)
        assert number is not None
        containers.follow(container_id, number)

    def measure() -> None:
        with namespaces.opened(node.host) as host:
            namespaces.enter(host)
        container_ids = store.containers(foreign=False)
        tracemalloc.start()
        watch, containers = Watch(), Containers()
        for container_id in container_ids:
            enter(container_id, containers, watch)
        gc.collect()
        kept[0] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        watch.close()

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return kept[0]


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def make_links(netns: str, rate: int, seconds: float) -> float:
    """Make and remove veth pairs with addresses, evenly; how many links a second. Raises RuntimeError."""
    command = [needed("ip"), "-n", Path(netns).name, "-force", "-batch", "-"]
    pairs_a_second = max(10, rate // 2)
    # A batch of pairs is removed at once: one by one, each removal would wait for the kernel.
    batch = pairs_a_second // 10
    total = int(pairs_a_second * seconds)
    began, group = time.monotonic(), _GROUP
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        for pair in range(total):
            group, place = _GROUP + pair // batch, pair % batch
            one, other, subnet = f"la{pair}", f"lb{pair}", f"10.{200 + group % 50}.{place}"
            lines = [
                f"link add {one} group {group} type veth peer name {other}",
                f"address add {subnet}.1/32 dev {one}",
                f"address add {subnet}.2/32 dev {other}",
                f"link set {one} up",
                f"link set {other} up",
            ]
            if not place and pair:
                lines.insert(0, f"link delete group {group - 1}")
            process.stdin.write("\n".join(lines) + "\n")
            process.stdin.flush()
            time.sleep(max(0.0, began + pair / pairs_a_second - time.monotonic()))
        process.stdin.write(f"link delete group {group}\n")
        process.stdin.close()
        complaint = process.stderr.read()
    if complaint:
        raise RuntimeError(f"a load failed: {complaint[:200]}")
    return 2 * total / (time.monotonic() - began)


def run(node: Node, pods: int, rate: int, seconds: float) -> Outcome:
    """The run, on a node that is not started."""
    networks = prepare(node)
    node.start()
    assert node.daemon is not None
    pid = node.daemon.pid
    empty = sample(pid, 0)
    wrong = attach(node, pods, networks)
    quiet_until = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < quiet_until:
        before = processor_seconds(pid)
        time.sleep(5)
        if (processor_seconds(pid) - before) / 5 < IDLE_MAX / 100:
            break
    without_id, with_id = node.add_netns(), node.add_netns()
    node.ip("netns", "set", Path(with_id).name, "auto")
    idle, texts = 0.0, []
    for name, netns, most in (
        ("nothing", "", IDLE_MAX),
        ("a namespace without an id", without_id, LOADED_MAX),
        ("a namespace with an id", with_id, LOADED_MAX),
        ("the host", node.host, LOADED_MAX),
    ):
        before, began = processor_seconds(pid), time.monotonic()
        made = 0.0
        if netns:
            made = make_links(netns, rate, seconds)
            if made < rate * 2 / 3:
                wrong.append(f"load in {name}: the machine makes {made:.0f} links a second, not {rate}")
        else:
            time.sleep(seconds)
        percent = (processor_seconds(pid) - before) / (time.monotonic() - began) * 100
        texts.append(f"{name} {percent:.2f} % ({made:.0f} links/s)")
        print(f"  load in {name}, {made:.0f} links/s: {percent:.2f} % of a core; {sample(pid, pods)}", flush=True)
        if percent - idle > most:
            wrong.append(f"load in {name}: {percent - idle:.2f} % of a core, more than {most} %")
        idle = idle or percent
    grown = sample(pid, pods).anonymous - empty.anonymous
    kept = kept_bytes(node)
    if not 0 < kept < KEPT_MAX:
        wrong.append(f"the loop keeps {kept} bytes of the pods, more than {KEPT_MAX}")
    text = f"{pods} pods; anonymous memory +{grown} KiB since before them, {kept // 1024} KiB of the loop; "
    text += f"processor time: {', '.join(texts)}"
    return Outcome(text, wrong)


def main() -> int:
    """The command."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.soak.keep_load", description=summary)
    parser.add_argument("--pods", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=int, default=1000, help="links, and addresses, that are made in a second")
    parser.add_argument("--keep", default="repair", help="the daemon's setting")
    parser.add_argument("--hotplug", default="on", help="the daemon's setting")
    parser.add_argument("--keep-logs", type=Path, help="copy the daemon's log to this directory")
    given = parser.parse_args()
    end_in_good_order()
    with Node(settings={"keep": given.keep, "hotplug": given.hotplug}) as node:
        outcome = run(node, given.pods, given.rate, given.seconds)
        if given.keep_logs:
            shutil.copy(node.log, given.keep_logs / "keep_load.log")
    return report(f"keep_load, keep {given.keep}, hotplug {given.hotplug}", outcome)


if __name__ == "__main__":
    sys.exit(main())
