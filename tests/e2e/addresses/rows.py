"""What can happen to the addresses of a cluster, one row of faults after the other, and what came of it.

    python -m tests.e2e.addresses.rows binary [ROW...]     # or builtin, mixed

Each row has a network of its own. It says what it has counted; what is wrong the checker finds in the histories.
Whereabouts' reconciler looks every two seconds here and once a day by its defaults, so a row shows what a day shows.
As root; `make e2e` builds the programs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from tests.e2e.addresses.checker import STILL, Bounds, Fault, Kind, Orders, check
from tests.e2e.addresses.fleet import Fleet, Pod, among, subjects
from tests.e2e.addresses.kernels import API, held
from tests.soak.remains import processes

BOUNDS: Final = Bounds(freed=15.0, held=5.0, restored=5.0)
RECONCILED: Final = 6.0
"""Seconds after which whereabouts' reconciler has looked twice."""
ALONE: Final = 3.0
"""Seconds after which a node without it has done what it does at a start."""


@dataclass
class Outcome:
    """What a row has shown."""

    row: str
    faults: list[Fault]
    counted: dict[str, Any]
    seconds: float = 0.0

    @property
    def kinds(self) -> Counter[Kind]:
        """How often each kind of fault was found."""
        return Counter(fault.kind for fault in self.faults)

    def __str__(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items())) or "nothing wrong"
        counted = ", ".join(f"{name} {value}" for name, value in self.counted.items())
        return f"{self.row}: {kinds}; {counted}; {self.seconds:.0f} s"


@dataclass
class Row:
    """A network of one row, and the pods on it."""

    fleet: Fleet
    number: int
    seed: int = 0
    counted: dict[str, Any] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.name = f"r{self.number}"
        self._numbers = iter(range(1, 10_000))

    def lan(self, size: str = "0/26", **ipam: Any) -> None:
        """Declare the row's network."""
        range_ = f"10.9.{self.number}.{size}"
        self.ranges.append(range_)
        self.fleet.lan(self.name, range_, **ipam)

    def start(self, index: int, name: str = "", **how: Any) -> Pod:
        """Start a pod on a node."""
        return self.fleet.start(index, name or f"{self.name}-{next(self._numbers)}", self.name, **how)

    def start_many(self, *indices: int) -> list[Pod]:
        """Start pods side by side, one on each of these nodes."""
        with ThreadPoolExecutor(max(1, len(indices))) as pool:
            found = list(pool.map(self.start, indices))
        self.count("ADDs", len(found))
        if failed := [pod for pod in found if pod.error]:
            self.count("failed ADDs", len(failed))
            self.counted.setdefault("first error", failed[0].error)
        return [pod for pod in found if not pod.error]

    def count(self, name: str, number: int = 1) -> None:
        """Add to a number."""
        self.counted[name] = self.counted.get(name, 0) + number

    def wait(self, *, reconciled: bool = False) -> None:
        """Wait for what happens by itself; `reconciled`: whereabouts' reconciler runs beside ours, too."""
        time.sleep(RECONCILED if reconciled or self.fleet.has_binary else ALONE)

    def verdict(self) -> list[Fault]:
        """Everything that is wrong until now, and what is left."""
        mine = among(*self.ranges)
        stays, entries = self.fleet.kernels.stays(mine), self.fleet.entries.entries(mine)
        return check(stays, entries, self.fleet.orders(mine), end=time.monotonic(), bounds=BOUNDS)

    def twice(self) -> int:
        """How many pairs of namespaces had an address at once, allowed or not."""
        stays = self.fleet.kernels.stays(among(*self.ranges))
        return sum(fault.kind is Kind.TWICE for fault in check(stays, [], Orders(), end=time.monotonic()))

    def held(self) -> int:
        """How many entries the API server has of the row's addresses."""
        mine = among(*self.ranges)
        return sum(mine(item.address) for item in held(self.fleet.server.client))

    def settle(self) -> None:
        """End all pods, and wait until nothing is left, or for as long as that may take."""
        for machine in self.fleet.machines:
            machine.mend()
        self.fleet.end_all()
        begin = time.monotonic()
        while self.held() and time.monotonic() < begin + BOUNDS.freed + 2:
            time.sleep(0.2)
        self.counted["freed after s"] = round(time.monotonic() - begin, 1)
        # The histories have seen it.
        time.sleep(0.8)


# --- the rows ------------------------------------------------------------------------------------------------------


def churn(row: Row, seconds: float = 12.0) -> None:
    """Pods come and go on three nodes, and daemons are killed. Whereabouts' reconciler looks when they are through."""
    row.lan()
    controls = [machine for machine in row.fleet.machines if machine.subject == "binary"]
    for machine in controls:
        machine.stop_control()
    end = time.monotonic() + seconds

    def come_and_go(worker: int) -> None:
        choice = random.Random(row.seed * 100 + worker)
        while time.monotonic() < end:
            pods = row.start_many(worker % len(row.fleet.machines))
            time.sleep(choice.uniform(0, 1.5))
            for pod in pods:
                row.fleet.end(pod)

    def kill() -> None:
        while time.monotonic() < end - 2:
            time.sleep(row.random.uniform(0.5, 2))
            machine = row.random.choice(row.fleet.machines)
            machine.node.kill()
            if row.random.random() < 0.5:
                # As where the container of the daemon ends.
                for line in processes(machine.node):
                    if "multus-shim" not in line and "control" not in line:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(line.partition(":")[0]), signal.SIGKILL)
            machine.node.start(timeout=60)
            row.count("kills")

    with ThreadPoolExecutor(8) as pool:
        for future in [*(pool.submit(come_and_go, worker) for worker in range(6)), pool.submit(kill)]:
            future.result()
    time.sleep(1)
    row.counted["held when all have ended"] = row.held()
    for machine in controls:
        machine.start_control()


def cut_off(row: Row) -> None:
    """A node is cut off; its pods are evicted and force-deleted; new pods start elsewhere, one under an old name."""
    row.lan()
    old = row.start_many(0, 0, 0, 0)
    ordinal = row.start(0, f"{row.name}-web-0")
    machine = row.fleet.machines[0]
    machine.cut()
    for pod in [*old, ordinal]:
        row.fleet.server.delete_pod(pod.name)
    again = row.start(1, ordinal.name)
    row.counted["same name, error"] = again.error
    time.sleep(0.5)
    row.counted["twice by name"] = row.twice()
    row.start_many(1, 2)
    row.wait()
    row.start_many(1, 1, 2, 2)
    time.sleep(1)
    row.counted["twice"] = row.twice()
    machine.mend()
    # Its kubelet sees that they are deleted.
    for pod in [*old, ordinal]:
        row.fleet.stop(pod)


def deleted_before_its_end(row: Row) -> None:
    """Pods are force-deleted on nodes that are well; their containers end some seconds later."""
    row.lan()
    old = row.start_many(0, 0, 0)
    for pod in old:
        row.fleet.server.delete_pod(pod.name)
    row.wait()
    row.start_many(1, 2, 1, 2)
    time.sleep(1)
    row.counted["twice"] = row.twice()
    for pod in old:
        row.fleet.stop(pod)


def _fenced(row: Row, how: str, *, alive: bool) -> None:
    """A range of six is full; the node that has three of them is said to be gone; three more pods come."""
    row.lan("0/29")
    old, others = row.start_many(0, 0, 0), row.start_many(1, 1, 2)
    full = row.start(1)
    row.counted["error of a full range"] = full.error
    row.fleet.server.delete_pod(full.name)
    machine = row.fleet.machines[0]
    machine.cut()
    machine.stop_control()
    if not alive:
        machine.node.kill()
        for pod in old:
            row.fleet.lose(pod)
        time.sleep(0.5)
    row.fleet.fence(0, how)
    # The control plane does it for either.
    for pod in old:
        row.fleet.server.delete_pod(pod.name)
    begin = time.monotonic()
    new: list[Pod] = []
    # A kubelet tries again.
    while len(new) < len(old) and time.monotonic() < begin + (6 if alive else 25):
        pod = row.start(1 + len(new) % 2)
        if pod.error:
            row.fleet.server.delete_pod(pod.name)
            row.counted["error after fencing"] = pod.error
            time.sleep(0.5)
        else:
            new.append(pod)
    row.counted |= {"given after fencing": len(new), "after s": round(time.monotonic() - begin, 1)}
    row.counted["twice after fencing"] = row.twice()
    row.fleet.unfence(0)
    machine.mend()
    if not alive:
        # Back after a reboot, its kubelet tells of what has ended.
        machine.node.start(timeout=60)
    if row.fleet.has_binary and machine.subject == "binary":
        machine.start_control()
    for pod in old if alive else []:
        row.fleet.stop(pod)
    assert others


def node_deleted(row: Row) -> None:
    """A dead node's object is deleted."""
    _fenced(row, "delete", alive=False)


def node_tainted(row: Row) -> None:
    """A dead node is tainted out-of-service."""
    _fenced(row, "taint", alive=False)


def fenced_alive(row: Row) -> None:
    """A node is tainted out-of-service, and its pods still answer."""
    _fenced(row, "taint", alive=True)


def restored(row: Row) -> None:
    """Etcd is restored from a snapshot; some pods began after it, some ended."""
    row.lan()
    before = row.start_many(0, 1, 2)
    snapshot = row.fleet.snapshot()
    row.fleet.end(before[0])
    row.start_many(0, 1, 2, 0, 1)
    live = len(row.fleet.pods)
    row.fleet.restore(snapshot)
    shutil.rmtree(snapshot)
    # What the snapshot has of a pod that ended is deleted by its kubelet, which finds no container.
    row.fleet.server.delete_pod(before[0].name)
    row.start_many(1, 2, 0)
    row.counted["live"] = live
    time.sleep(BOUNDS.held + 3)
    row.counted["twice"] = row.twice()
    mine = among(*row.ranges)
    faults = check(
        row.fleet.kernels.stays(mine), row.fleet.entries.entries(mine), Orders(), end=time.monotonic(), bounds=BOUNDS
    )
    row.counted["not asserted"] = sum(fault.kind in (Kind.UNHELD, Kind.ANOTHERS) for fault in faults)


def by_hand(row: Row) -> None:
    """Somebody deletes the reservations of live pods; pods of a range that overlaps start."""
    row.lan()
    row.fleet.lan(f"{row.name}b", f"10.9.{row.number}.0/25")
    row.start_many(0, 1, 2)
    _delete_reservations(row)
    time.sleep(1)
    row.counted["back after 1 s"] = _reservations(row)
    for index in (0, 1, 2):
        row.fleet.start(index, f"{row.name}b-{index}", f"{row.name}b")
    time.sleep(0.5)
    row.counted["twice"] = row.twice()


def pool_by_hand(row: Row) -> None:
    """Somebody deletes reservations and pool of live pods; pods of the range start."""
    row.lan()
    row.start_many(0, 1, 2)
    _delete_reservations(row)
    row.fleet.server.delete("whereabouts.cni.cncf.io/v1alpha1", "IPPool", f"10.9.{row.number}.0-26", "kube-system")
    time.sleep(1)
    row.counted["back after 1 s"] = _reservations(row)
    row.start_many(0, 1, 2)
    time.sleep(0.5)
    row.counted["twice"] = row.twice()


def reconciler(row: Row) -> None:
    """Whereabouts' reconciler runs, while live pods have lost their network-status."""
    row.lan()
    pods = row.start_many(0, 1, 2)
    machine = row.fleet.machines[0]
    if beside := not row.fleet.has_binary:
        machine.start_control()
    patch = {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/network-status": None}}}
    for pod in pods:
        row.fleet.server.client.merge(f"/api/v1/namespaces/default/pods/{pod.name}", patch)
    row.wait(reconciled=True)
    row.counted["held of 3"] = len(
        {item.pod for item in held(row.fleet.server.client) if among(*row.ranges)(item.address)}
    )
    row.start_many(0, 1, 2)
    time.sleep(0.5)
    row.counted["twice"] = row.twice()
    if beside:
        machine.stop_control()


def api_away(row: Row, seconds: float = 8.0) -> None:
    """The API server is away; pods end meanwhile, and one wants to begin."""
    row.lan()
    pods = row.start_many(0, 1, 2, 0, 1, 2)
    waiting = f"{row.name}-waits"
    annotations = {"k8s.v1.cni.cncf.io/networks": row.name}
    row.fleet.server.create_pod(waiting, node="node1", annotations=annotations, running=False)
    time.sleep(0.5)
    uid = row.fleet.server.get("v1", "Pod", waiting)["metadata"]["uid"]
    node = row.fleet.machines[0].node
    netns = node.add_netns()

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.monotonic()
        result = call()
        return round(time.monotonic() - begin, 1), result

    with ThreadPoolExecutor(4) as pool:
        with row.fleet.api_away():
            dels = [pool.submit(timed, functools.partial(row.fleet.stop, pod, tries=1)) for pod in pods[:3]]
            add = functools.partial(node.cni, "ADD", "c-waits", netns, waiting, uid=uid, timeout=200)
            added = pool.submit(timed, add)
            time.sleep(seconds)
            row.counted["DELs done meanwhile"] = sum(item.done() and item.result()[1] for item in dels)
            row.counted["ADD done meanwhile"] = added.done()
        row.counted["DELs, s"] = [item.result()[0] for item in dels]
        row.counted["ADD, s"], answer = added.result()
    row.counted["ADD says"] = answer.json.get("msg", "") if answer.code else "success"
    node.cni("DEL", "c-waits", netns, waiting, uid=uid, timeout=200)
    node.remove_netns(netns)
    row.fleet.server.delete_pod(waiting)
    for pod in pods[:3]:
        row.fleet.server.delete_pod(pod.name)
    begin = time.monotonic()
    gone = {pod.ref for pod in pods[:3]}
    while time.monotonic() < begin + BOUNDS.freed and any(i.pod in gone for i in held(row.fleet.server.client)):
        time.sleep(0.1)
    row.counted["freed after it is back, s"] = round(time.monotonic() - begin, 1)


def records_lost(row: Row) -> None:
    """A node loses its records while pods run."""
    row.lan("0/28")
    row.start_many(0, 0, 0)
    node = row.fleet.machines[0].node
    node.kill()
    for path in node.cni_dir.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    node.start(timeout=60)
    row.wait()
    row.counted["held of 3"] = len(
        {item.address for item in held(row.fleet.server.client) if among(*row.ranges)(item.address)}
    )
    row.start_many(1, 2, 1, 2)
    time.sleep(0.5)
    row.counted["twice"] = row.twice()


def made_anew(row: Row) -> None:
    """A node's object is deleted and made anew under its name, while its pods run; then the range is exhausted."""
    row.lan("0/29")
    row.start_many(0, 0, 0)
    name = row.fleet.machines[0].name
    row.fleet.server.delete("v1", "Node", name)
    row.fleet.server.create_node(name)
    row.wait()
    row.start_many(1, 2, 1, 2)
    row.counted["twice"] = row.twice()


def small(row: Row) -> None:
    """Six pods for five addresses."""
    row.lan("0/29", exclude=[f"10.9.{row.number}.6/32"], gateway=f"10.9.{row.number}.6")
    pods = row.start_many(0, 1, 2, 0, 1, 2)
    row.counted["attached"] = len(pods)
    row.fleet.end(pods[0])
    begin = time.monotonic()
    # It is freed behind the answer of its DEL: a kubelet tries again.
    while (found := row.start(1)).error and time.monotonic() < begin + 5:
        row.fleet.server.delete_pod(found.name)
        time.sleep(0.2)
    row.counted |= {"after one ended": not found.error, "given again after s": round(time.monotonic() - begin, 1)}


def many_ranges(row: Row) -> None:
    """Two families, and sixteen ranges."""
    row.ranges += [f"10.9.{row.number}.0/24", f"fd00:9:{row.number}::/64"]
    fours = [{"range": f"10.9.{row.number}.{number * 16}/28"} for number in range(15)]
    row.fleet.define(
        row.name,
        {
            "type": "bridge", "bridge": "br-lan",
            "ipam": {"type": "whereabouts", "ipRanges": [*fours, {"range": f"fd00:9:{row.number}::/64"}]},
        },
    )  # fmt: skip
    time.sleep(0.3)
    begin = time.monotonic()
    pods = row.start_many(0, 1)
    row.counted["ADDs, s"] = round(time.monotonic() - begin, 1)
    row.counted["addresses"] = [
        sum(stay.place.pod == pod.ref and stay.end == STILL for stay in _seen(row)) for pod in pods
    ]


def _seen(row: Row) -> list[Any]:
    time.sleep(0.5)
    return row.fleet.kernels.stays(among(*row.ranges))


def _delete_reservations(row: Row) -> None:
    for item in _of_the_row(row):
        metadata = item["metadata"]
        row.fleet.server.delete(
            "whereabouts.cni.cncf.io/v1alpha1", "OverlappingRangeIPReservation", metadata["name"], metadata["namespace"]
        )


def _reservations(row: Row) -> int:
    return len(_of_the_row(row))


def _of_the_row(row: Row) -> list[dict[str, Any]]:
    items = row.fleet.server.client.get(f"{API}/overlappingrangeipreservations")["items"]
    return [item for item in items if item["metadata"]["name"].startswith(f"10.9.{row.number}.")]


ROWS: Final[dict[str, Callable[[Row], None]]] = {
    function.__name__: function
    for function in (
        churn, cut_off, deleted_before_its_end, node_deleted, node_tainted, fenced_alive, by_hand, pool_by_hand,
        reconciler, api_away, records_lost, made_anew, small, many_ranges, restored,
    )
}  # fmt: skip
"""The rows."""


def run(fleet: Fleet, name: str, number: int, seed: int = 0) -> Outcome:
    """Run a row; `number`: of its network."""
    begin = time.monotonic()
    row = Row(fleet, number, seed)
    try:
        ROWS[name](row)
    except Exception as error:
        row.counted["broke off"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    row.settle()
    return Outcome(name, row.verdict(), row.counted, time.monotonic() - begin)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.addresses.rows")
    parser.add_argument("subject", choices=("builtin", "binary", "mixed"))
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    given = parser.parse_args(arguments)
    wrong = 0
    with Fleet(*subjects(given.subject)) as fleet:
        for number, name in enumerate(given.rows or ROWS, 1):
            outcome = run(fleet, name, number)
            print(f"{given.subject} {outcome}", flush=True)
            for fault in outcome.faults[:10]:
                print(f"  {fault}", flush=True)
            wrong += len(outcome.faults)
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
