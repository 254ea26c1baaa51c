"""Ordinary pods beside networks whose plugin calls Multus, and beside DELs that come after the namespace's next pod.

    python -m tests.soak.isolation [--seconds 3600]

Three streams, each at its own rate:

* ordinary pods of one to three interfaces, which live for two seconds;
* pods of networks whose plugin is Multus itself, or a program that calls the daemon, or whose client hangs up;
* two paths at which a namespace is made anew, with the inode of the one before, for one pod after the other. The DEL of
  the pod before comes late: before, beside or after the next ADD, by the runtime or by the spool. The record of each
  third has no cookie, as one that an older version has written.

Exit status 1, with a line for each, where an ordinary pod or the next pod at a path fails, waits for longer than a
second, or loses an interface, where an address is in two namespaces, and where anything is left. As root; the reference
plugins in CNI_REFERENCE_DIR.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import random
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import multus_shim
from tests.e2e import build_tools, reused_netns
from tests.e2e.conftest import REFERENCE
from tests.e2e.node import Answer, Node
from tests.e2e.reused_netns import change_identity, interfaces, spool_entry
from tests.e2e.test_plugin_calls_daemon import BACKGROUND, DONE, FOREGROUND, FROM_PLUGIN, calling, script, status
from tests.soak.census import Census
from tests.soak.churn import Outcome, end_in_good_order, report
from tests.soak.load import Kind, varied
from tests.soak.remains import Remains

SETTINGS = {"builtinPlugins": "prefer"}

SLOWEST = 1.0
"""Seconds for an ADD or DEL of an ordinary pod."""
ORDINARY_RATE, ORDINARY_WORKERS = 4.0, 12
"""ADDs a second, and how many pods there can be at once."""
LIFE = 2.0
"""Seconds between ADD and DEL of an ordinary pod."""
BAD_RATE, BAD_WORKERS = 2.0, 4
REUSE_RATE = 0.5
"""Namespaces a second that are made anew at each of the two paths."""
BAD_SECONDS = 20.0
"""For the answer to a pod that is refused."""
DEL_TRIES = 10
OLDER_ONE_IN = 3
"""Records of which one has no cookie."""
WRONG_MAX = 200
"""Lines after which a run ends."""

Interfaces = dict[str, tuple[int, str, list[str]]]


@dataclass
class Stream:
    """Work that is begun `rate` times a second, by so many threads; `work` gets the thread and a number."""

    name: str
    rate: float
    workers: int
    work: Callable[[int, int], None]
    latest: float = 0.0
    """Seconds by which a piece of work began too late since all threads were busy."""
    began: float = 0.0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def run(self, worker: int, stop: threading.Event) -> None:
        """Work until `stop`."""
        while not stop.is_set():
            number = next(self._numbers)
            due = self.began + number / self.rate
            if stop.wait(max(0.0, due - time.monotonic())):
                return
            self.latest = max(self.latest, time.monotonic() - due)
            self.work(worker, number)


@dataclass
class Bad:
    """A way in which a pod's network calls the daemon, and what its ADD must answer."""

    name: str
    message: str
    """Part of the message with code 7; empty: the ADD succeeds."""


class Isolation:
    """The three streams on one node."""

    def __init__(self, node: Node, slowest: float) -> None:
        self.node = node
        self.slowest = slowest
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []
        """Holds the seconds of each ordinary ADD."""
        self.slowest_refusal = 0.0
        self.busiest = 0
        """Requests that ran or waited."""
        self.latest: dict[str, float] = {}
        """Maps each stream to its longest delay in seconds; the run itself causes this delay, not the daemon."""
        self.stop = threading.Event()
        self._lock = threading.Lock()
        # Whoever makes a namespace takes the lowest free inode, which another may wait for.
        self._remaking = threading.Lock()

    def prepare(self) -> None:
        """Declare networks and pods, start the daemon, and add a pod of each ordinary kind."""
        node = self.node
        kinds = {
            kind.name: kind
            for kind in varied(node, REFERENCE, lambda name, config: self._declare(name, config), mode="prefer")
        }
        self._kinds: list[Kind] = [kinds[name] for name in ("plain", "more", "plain", "mac", "plain", "lans")]
        for kind in kinds.values():
            for worker in range(ORDINARY_WORKERS):
                node.pod(f"{kind.name}-{worker}", kind.networks)
        self._declare_binaries()
        self._bad = self._declare_bad()
        node.start()
        self._spaces = [node.add_netns() for _ in range(ORDINARY_WORKERS)]
        self._reused = [Reused(self, 0, "inner,mac"), Reused(self, 1, "far,refmac,lan")]
        for number, kind in enumerate(kinds.values()):
            self._ordinary(0, -1 - number, kind, life=0.0)
        for reused in self._reused:
            reused.warm_up()
        self.counts.clear()
        self.seconds.clear()

    def run(self, seconds: float) -> None:
        """Run the streams for so long."""
        streams = [
            Stream("ordinary", ORDINARY_RATE, ORDINARY_WORKERS, self._ordinary),
            Stream("bad", BAD_RATE, BAD_WORKERS, self._bad_pod),
            *(Stream(f"path {item.number}", REUSE_RATE, 1, item.next_pod) for item in self._reused),
        ]
        workers = [(stream, worker) for stream in streams for worker in range(stream.workers)]
        with ThreadPoolExecutor(len(workers)) as pool:
            try:
                for stream in streams:
                    stream.began = time.monotonic()
                running = [pool.submit(self._guarded, *item) for item in workers]
                end = time.monotonic() + seconds
                while time.monotonic() < end and len(self.wrong) < WRONG_MAX and not any(w.done() for w in running):
                    self._look()
                    self.stop.wait(min(1.0, max(0.0, end - time.monotonic())))
            finally:
                self.stop.set()
        self.latest = {stream.name: stream.latest for stream in streams}

    def finish(self) -> list[str]:
        """Delete the last pods; what is left, a line each, once the networks of the bad pods are corrected."""
        if self.counts["inode taken by another"] > 9 * self.counts["inode reused"]:
            self.wrong.append("less than a tenth of the namespaces had the inode of the one before: too few")
        for reused in self._reused:
            reused.finish()
        if not self._settles(lambda: _requests(self.node) == 0, 10):
            self.wrong.append(f"requests are left: {status(self.node)['requests']}")
        for way in self._bad:
            script(self.node, f"vendor-{way.name}", "exit 0")
        remains = self._remains
        if left := [line for line in remains.settled(seconds=20) if line.startswith("file cni/attachments/")]:
            # They are tried again after longer and longer pauses, of which a new daemon knows nothing.
            self.counts["records that waited for a correct network"] = len(left)
            self.node.stop(timeout=90)
            self.node.settings["reconcileSeconds"] = 5
            self.node.start(timeout=90)
        return remains.settled(seconds=300)

    def summary(self) -> str:
        """Counts, and how long ordinary ADDs took."""
        took = sorted(self.seconds) or [0.0]
        counts = ", ".join(f"{what} {number}" for what, number in sorted(self.counts.items()))
        counts += "".join(f", {name} up to {seconds:.1f} s late" for name, seconds in self.latest.items())
        return (
            f"ordinary ADD: median {took[len(took) // 2]:.3f} s, 99 of 100 {took[len(took) * 99 // 100]:.3f} s, "
            f"longest {took[-1]:.3f} s; longest refusal {self.slowest_refusal:.3f} s; at most {self.busiest} requests "
            f"at once; load {os.getloadavg()[0]:.1f}; {counts}"
        )

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def add(self, container_id: str, netns: str, pod: str, wanted: frozenset[str] | set[str]) -> Interfaces:
        """Add an ordinary pod, which must be done in time; its interfaces."""
        answer = self.node.cni("ADD", container_id, netns, pod)
        with self._lock:
            self.seconds.append(answer.seconds)
        self._judge("ADD", container_id, answer)
        made = interfaces(self.node, netns)
        with_address = {name for name, (_, _, addresses) in made.items() if addresses}
        if answer.code == 0 and with_address != wanted:
            self.wrong.append(f"ADD of {container_id} succeeded with {sorted(with_address)}, not {sorted(wanted)}")
        return made

    def delete(self, container_id: str, netns: str, pod: str) -> None:
        """Delete a pod, which must be done in time."""
        self._judge("DEL", container_id, self.node.cni("DEL", container_id, netns, pod))

    def expect(self, container_id: str, netns: str, made: Interfaces, when: str) -> None:
        """See that a pod has the interfaces that its ADD made."""
        found = interfaces(self.node, netns)
        if found != made:
            self.wrong.append(f"{container_id} has {found} {when}, its ADD made {made}")

    def remake(self, netns: str) -> None:
        with self._remaking:
            self.count("inode reused" if reused_netns.remake(netns, 2) else "inode taken by another")

    def _judge(self, verb: str, container_id: str, answer: Answer) -> None:
        self.count(f"ordinary {verb}")
        if answer.code != 0 or answer.stderr:
            self.wrong.append(f"{verb} of {container_id} failed: {answer.stdout!r} {answer.stderr!r}")
        elif answer.seconds > self.slowest:
            self.wrong.append(f"{verb} of {container_id} took {answer.seconds:.2f} s")

    def _guarded(self, stream: Stream, worker: int) -> None:
        try:
            stream.run(worker, self.stop)
        except BaseException as error:
            self.wrong.append(f"{stream.name}: {type(error).__name__}: {error}")
            self.stop.set()

    def _look(self) -> None:
        self.busiest = max(self.busiest, _requests(self.node))

    def _settles(self, holds: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.1)
        return holds()

    # --- ordinary pods ---------------------------------------------------------------------------------------------

    def _ordinary(self, worker: int, number: int, kind: Kind | None = None, life: float = LIFE) -> None:
        kind = kind or self._kinds[number % len(self._kinds)]
        container_id, netns, pod = (
            f"ordinary{abs(number)}{'w' * (number < 0)}",
            self._spaces[worker],
            f"{kind.name}-{worker}",
        )
        made = self.add(container_id, netns, pod, kind.interfaces)
        self.stop.wait(life)
        self.expect(container_id, netns, made, "before its DEL")
        self.delete(container_id, netns, pod)
        if left := interfaces(self.node, netns):
            self.wrong.append(f"{container_id} still has {sorted(left)} after its DEL")

    # --- pods whose networks call the daemon -------------------------------------------------------------------------

    def _bad_pod(self, worker: int, number: int) -> None:
        way = self._bad[number % len(self._bad)]
        with self._remaking:
            netns = self.node.add_netns()
        container_id, pod = f"bad{number}", f"bad-{way.name}"
        if way.name == "hang-up":
            self._hang_up(container_id, netns, pod)
        else:
            answer = self.node.cni("ADD", container_id, netns, pod)
            if way.message:
                self.slowest_refusal = max(self.slowest_refusal, answer.seconds)
            if problem := _problem(way, answer):
                self.wrong.append(f"ADD of {container_id}, {way.name}: {problem}: {answer.stdout!r}")
        tries = 1
        while (answer := self.node.cni("DEL", container_id, netns, pod)).code != 0 and tries < DEL_TRIES:
            tries += 1
            self.count("bad DEL repeated")
            time.sleep(0.05)
        if answer.code != 0 or answer.stderr:
            self.wrong.append(f"DEL of {container_id}, {way.name}: {answer.stdout!r} {answer.stderr!r}")
        if left := interfaces(self.node, netns):
            self.wrong.append(f"{container_id}, {way.name}, still has {sorted(left)} after its DEL")
        self.node.remove_netns(netns)
        self.count("bad pods")

    def _hang_up(self, container_id: str, netns: str, pod: str) -> None:
        """Send an ADD and close the connection; it may have begun."""
        environment = self.node.environment("ADD", container_id, netns, pod)
        body = json.dumps({"env": environment, "config": base64.b64encode(self.node.stdin).decode()}).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.node.socket))
            head = f"POST /cni HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            time.sleep(random.choice((0, 0.005, 0.02)))

    def _declare(self, name: str, config: dict[str, Any]) -> None:
        self.node.network(name, config, "kube-system" if name == "cluster" else "default")

    def _declare_binaries(self) -> None:
        """Declare networks of reference binaries under other names, so that no built-in serves them."""
        node = self.node
        for name in ("ptp", "macvlan"):
            shutil.copy(REFERENCE / name, node.bin_dir / f"ref-{name}")
        for name, subnet, fields in (
            ("far", "10.98.0.0/16", {"type": "ref-ptp"}),
            ("refmac", "10.99.0.0/16", {"type": "ref-macvlan", "master": "up0"}),
        ):
            ipam = {"type": "host-local", "subnet": subnet, "dataDir": str(node.networks_dir)}
            self._declare(name, {"cniVersion": node.cni_version, "name": name, "ipam": ipam, **fields})

    def _declare_bad(self) -> list[Bad]:
        """Declare the networks whose plugin calls the daemon, and a pod of each."""
        node, found = self.node, []
        shutil.copy(multus_shim.binary(), node.bin_dir / "multus-shim")
        shutil.copy(multus_shim.binary(), node.bin_dir / "file-copy")
        (node.bin_dir / "file-link").symlink_to("multus-shim")
        try:
            shutil.copy(build_tools.find("upstream-multus-shim"), node.bin_dir / "file-upstream")
        except build_tools.ToolError as error:
            print(f"without upstream's shim: {error}")
        ipam = {"cniVersion": "1.0.0", "name": "bad-ipam", "type": "ptp", "ipam": {"type": "multus-shim"}}
        planned = {"shim": calling(node, "multus-shim"), "multus": calling(node, "multus"), "ipam": ipam}
        planned |= {path.name: calling(node, path.name) for path in node.bin_dir.glob("file-*")}
        for name, config in planned.items():
            found.append(Bad(name, "is Multus itself"))
            self._declare(f"bad-{name}", config)
        for name, body in FOREGROUND.items():
            found.append(Bad(name.replace(" ", "-"), FROM_PLUGIN))
            self._declare_script(found[-1].name, body)
        for name, body in BACKGROUND.items():
            found.append(Bad(name.replace(" ", "-"), ""))
            source = f"{node.root}/input-$CNI_CONTAINERID"
            body = f"cat >{source}; {body}\n{DONE}".replace("INPUT", source).replace("OUTPUT", "/dev/null")
            self._declare_script(found[-1].name, body)
        found.append(Bad("hang-up", ""))
        self._declare(
            "bad-hang-up", {"cniVersion": "1.0.0", "name": "mac", "type": "ptp"} | _ipam(node, "10.89.0.0/16")
        )
        for way in found:
            node.pod(f"bad-{way.name}", f"bad-{way.name}")
        # In turn, not one kind after the other.
        random.Random(1).shuffle(found)
        return found

    def _declare_script(self, name: str, body: str) -> None:
        script(self.node, f"vendor-{name}", body)
        self._declare(f"bad-{name}", calling(self.node, f"vendor-{name}"))

    def note_what_stays(self) -> None:
        """Take what is there now as the measure of what is left in the end."""
        self._remains = Remains(self.node)


class Reused:
    """A path at which one namespace comes after the other, each for a pod whose predecessor is deleted late."""

    def __init__(self, soak: Isolation, number: int, networks: str) -> None:
        self.number = number
        self._soak = soak
        self._node = soak.node
        self._netns = soak.node.add_netns()
        self._pods = [f"path{number}-{letter}" for letter in "ab"]
        for pod in self._pods:
            soak.node.pod(pod, networks)
        self._wanted = {"eth0", *(f"net{index + 1}" for index in range(len(networks.split(","))))}
        self._made: Interfaces = {}
        self._last = -1
        self._entries: list[Path] = []

    def warm_up(self) -> None:
        """A pod for what plugins make once for the whole node."""
        self._soak.add(f"path{self.number}-warm", self._netns, self._pods[0], self._wanted)
        self._soak.delete(f"path{self.number}-warm", self._netns, self._pods[0])

    def next_pod(self, worker: int, number: int) -> None:
        """Add the next pod in a new namespace, and delete the one before in the meantime, before or after."""
        soak, node, netns = self._soak, self._node, self._netns
        last, self._last = self._last, number
        container_id, pod = self._container(number), self._pods[number % 2]
        if last < 0:
            self._made = soak.add(container_id, netns, pod, self._wanted)
            return
        old, old_pod = self._container(last), self._pods[last % 2]
        soak.expect(old, netns, self._made, "before its namespace goes")
        if number % OLDER_ONE_IN == 0:
            change_identity(node, old, reused_netns.identity(netns))
        soak.remake(netns)

        def spool() -> None:
            self._entries.append(spool_entry(node, old, netns, old_pod))

        delete = spool if random.random() < 0.5 else lambda: soak.delete(old, netns, old_pod)
        way = random.choice(("before", "beside", "after"))
        soak.count(f"DEL {way} the next ADD, by the {'spool' if delete is spool else 'runtime'}")
        if way == "before":
            delete()
        beside = threading.Thread(target=_after, args=(random.uniform(0, 0.03), delete))
        if way == "beside":
            beside.start()
        self._made = soak.add(container_id, netns, pod, self._wanted)
        if way == "beside":
            beside.join()
        if way == "after":
            delete()
        soak.expect(container_id, netns, self._made, f"after the DEL of {old}")

    def finish(self) -> None:
        """Delete the last pod, once the daemon has served the spool."""
        soak = self._soak
        if self._last < 0:
            return
        deadline = time.monotonic() + 30
        while any(entry.exists() for entry in self._entries) and time.monotonic() < deadline:
            time.sleep(0.1)
        last, pod = self._container(self._last), self._pods[self._last % 2]
        soak.expect(last, self._netns, self._made, "once the spool is empty")
        soak.delete(last, self._netns, pod)

    def _container(self, number: int) -> str:
        return f"path{self.number}-{number}"


def _after(seconds: float, work: Callable[[], None]) -> None:
    time.sleep(seconds)
    work()


def _ipam(node: Node, subnet: str) -> dict[str, Any]:
    return {"ipam": {"type": "host-local", "subnet": subnet, "dataDir": str(node.networks_dir)}}


def _requests(node: Node) -> int:
    """How many requests the daemon works on or has waiting."""
    found = status(node)["requests"]
    return int(found["running"]) + int(found["waiting"])


def _problem(way: Bad, answer: Answer) -> str:
    """Say what is wrong with the answer to the ADD of a bad pod; return an empty string if nothing is."""
    if answer.seconds > BAD_SECONDS:
        return f"it took {answer.seconds:.2f} s"
    if not way.message:
        return "" if answer.code == 0 else "it failed"
    try:
        is_refused = answer.code == 1 and answer.json["code"] == 7 and way.message in answer.json["msg"]
    except (ValueError, KeyError):
        is_refused = False
    return "" if is_refused else "it is not refused"


def run(node: Node, seconds: float, slowest: float = SLOWEST) -> Outcome:
    """The run, on a node that has SETTINGS and is not started."""
    soak = Isolation(node, slowest)
    soak.prepare()
    soak.note_what_stays()
    with Census(node) as census:
        soak.run(seconds)
        left = soak.finish()
    return Outcome(f"{census.summary}; {soak.summary()}", [*census.twice, *soak.wrong, *left])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.isolation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--keep-logs", type=Path, help="copy the daemon's log to this directory")
    given = parser.parse_args()
    end_in_good_order()
    with Node(settings=dict(SETTINGS)) as node:
        outcome = run(node, given.seconds)
        if given.keep_logs:
            shutil.copy(node.log, given.keep_logs / "isolation.log")
    return report("isolation", outcome)


if __name__ == "__main__":
    sys.exit(main())
