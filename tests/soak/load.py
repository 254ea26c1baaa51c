"""Many pods that come and go at once, as a container runtime and a kubelet have it."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import hasty_shim
from tests.e2e.node import Answer, Node
from tests.programs import needed

DEL_PATIENCE = 240.0
"""Seconds for which a failing DEL is repeated; a kubelet has no such limit."""
KEPT_ONE_IN = 8
"""So many namespaces stay until the end, to be looked into; the others go with their pod, spooled DEL or not."""


@dataclass(frozen=True)
class Kind:
    """A kind of pod."""

    name: str
    networks: str | None
    """The annotation."""
    interfaces: frozenset[str]
    """Names the interfaces of such a pod after a successful ADD; each has an address."""


@dataclass
class Load:
    """ADD and DEL of one container after the other, some at a time."""

    node: Node
    kinds: Sequence[Kind]
    at_once: int = 16
    declare: Callable[[str, str | None], None] | None = None
    """Makes a pod of a name and an annotation known; a manifest of the node where None."""
    call: Callable[[str, str, str, str], Answer] | None = None
    """Calls the shim once (verb, container, namespace, pod); the node's own call where None."""
    shims_killed_one_in: float = 0
    """Kills the shim in one of this many of the node's own calls; 0 kills none."""
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Lists each violation in a line."""
    failures: Counter[str] = field(default_factory=Counter)
    """Messages of ADDs that failed, numbers left out."""
    kept: list[str] = field(default_factory=list)
    """Namespaces that have been left alone."""
    disturbed: set[str] = field(default_factory=set)
    """Containers whose ADD failed, or whose DEL was not done at once."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._call = self.call or self._plain
        declare = self.declare or self.node.pod
        for kind in self.kinds:
            for worker in range(self.at_once):
                declare(f"{kind.name}-{worker}", kind.networks)

    def _plain(self, verb: str, container_id: str, netns: str, pod: str) -> Answer:
        """One in `shims_killed_one_in` is killed within half a second, and its answer is the signal."""
        is_killed = self.shims_killed_one_in and random.random() * self.shims_killed_one_in < 1
        timeout = random.uniform(0, 0.5) if is_killed else 300
        try:
            return self.node.cni(verb, container_id, netns, pod, shim=a_shim(), timeout=timeout)
        except subprocess.TimeoutExpired:
            if not is_killed:
                raise
            self._count("shim killed")
            return Answer(-signal.SIGKILL, b"", b"", timeout)

    def warm_up(self) -> None:
        """One pod of each kind, for what plugins make once for the whole node. Such as may fail does so quietly."""
        for kind in self.kinds:
            self._pair(kind, 0, keep=False)
        self.counts.clear()
        self.failures.clear()

    def run(self, pairs: int, stop: Callable[[], bool] = lambda: False) -> float:
        """So many pairs, or fewer where `stop` says so; how many seconds it took."""
        began = time.monotonic()
        numbers = iter(range(pairs))

        def work(worker: int) -> None:
            while not stop():
                with self._lock:
                    number = next(numbers, None)
                if number is None:
                    return
                self._pair(self.kinds[number % len(self.kinds)], worker, keep=number % KEPT_ONE_IN == 0)

        with ThreadPoolExecutor(self.at_once) as pool:
            for done in [pool.submit(work, worker) for worker in range(self.at_once)]:
                done.result()
        return time.monotonic() - began

    def _pair(self, kind: Kind, worker: int, *, keep: bool) -> None:
        container_id = f"{kind.name}{next(self._numbers)}"
        pod = f"{kind.name}-{worker}"
        netns = self.node.add_netns()
        added = self._call("ADD", container_id, netns, pod)
        self._count("ADD succeeded" if added.code == 0 else "ADD failed")
        if added.code == 0:
            self._expect_interfaces(kind, container_id, netns)
        elif added.code > 0:
            self._note_failure(added)
        if added.code != 0:
            self.disturbed.add(container_id)
        self._delete(container_id, netns, pod)
        if keep:
            self.kept.append(netns)
        else:
            self.node.remove_netns(netns)
        self._count("pairs")

    def _expect_interfaces(self, kind: Kind, container_id: str, netns: str) -> None:
        found = {link["ifname"] for link in self.node.ip("address", netns=netns) if link["addr_info"]}
        if missing := kind.interfaces - found:
            self.wrong.append(f"ADD of {container_id} succeeded without {', '.join(sorted(missing))}")

    def _delete(self, container_id: str, netns: str, pod: str) -> None:
        deadline = time.monotonic() + DEL_PATIENCE
        while (answer := self._call("DEL", container_id, netns, pod)).code != 0:
            self._count("DEL repeated")
            self.disturbed.add(container_id)
            if time.monotonic() > deadline:
                self.wrong.append(f"DEL of {container_id} fails: {answer.stdout.decode(errors='replace')}")
                return
            time.sleep(0.2 + 0.3 * random.random())
        if answer.stderr:
            self.disturbed.add(container_id)
        self._count("DEL spooled" if answer.stderr else "DEL served")

    def _note_failure(self, answer: Answer) -> None:
        try:
            text = f"{answer.json['code']} {answer.json['msg']}"
        except (ValueError, KeyError):
            self.wrong.append(f"ADD failed without a CNI error: {answer.stdout[:300]!r} {answer.stderr[:300]!r}")
            return
        words = (word for word in text[:160].split() if not any(letter.isdigit() for letter in word[1:]))
        with self._lock:
            self.failures[" ".join(words)] += 1

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def drop_kept(self) -> None:
        """Remove the namespaces that were left alone."""
        for netns in self.kept:
            self.node.remove_netns(netns)
        self.kept.clear()

    def summary(self) -> str:
        """Counts, and the commonest failures."""
        counts = ", ".join(f"{what} {number}" for what, number in sorted(self.counts.items()))
        failures = (f"\n    {number} x {text}" for text, number in self.failures.most_common(8))
        return counts + "".join(failures)


def a_shim() -> Path | None:
    """A shim that waits for the daemon, or, each second time, hardly does."""
    return random.choice((hasty_shim.binary(), None))


# --- networks --------------------------------------------------------------------------------------------------------


def _local(node: Node, subnet: str) -> dict[str, Any]:
    return {"type": "host-local", "subnet": subnet, "dataDir": str(node.networks_dir)}


def varied(node: Node, reference: Path, define: Callable[[str, dict[str, Any]], None], *, mode: str) -> list[Kind]:
    """Return the kinds of `mixed` and more: both families, `macvlan`, and `tuning` behind `ptp`.

    `mode`: of `builtinPlugins`; with `off` the reference has a binary for each.
    """
    kinds = mixed(node, reference, define)
    if mode == "off":
        for name in ("bridge", "macvlan", "tuning"):
            shutil.copy(reference / name, node.bin_dir)
    # What a macvlan needs below it; both ends are up, so that it has a carrier.
    ip = [needed("ip"), "-n", Path(node.host).name, "link"]
    subprocess.run([*ip, "add", "up0", "type", "veth", "peer", "name", "up1"], check=True)
    for name in ("up0", "up1"):
        subprocess.run([*ip, "set", name, "up"], check=True)
    one = {"cniVersion": node.cni_version}
    ranges = [[{"subnet": "10.95.0.0/16"}], [{"subnet": "fd00:95::/64"}]]
    both = {"type": "bridge", "bridge": "both0", "isGateway": True, "ipMasq": True}
    ipam = {"type": "host-local", "ranges": ranges, "dataDir": str(node.networks_dir)}
    define("both", {**one, "name": "both", **both, "ipam": ipam})
    ranges = [[{"subnet": "10.96.0.0/16"}], [{"subnet": "fd00:96::/64"}]]
    ptp = {"type": "ptp", "ipMasq": True, "ipam": ipam | {"ranges": ranges}}
    sysctls = {"net.ipv4.conf.IFNAME.arp_notify": "1"}
    tuning = {"type": "tuning", "mtu": 1400, "sysctl": sysctls, "dataDir": str(node.networks_dir / "tuning")}
    define("tuned", {**one, "name": "tuned", "plugins": [ptp, tuning]})
    macvlan = {"type": "macvlan", "master": "up0", "mode": "bridge", "ipam": _local(node, "10.97.0.0/16")}
    define("mac", {**one, "name": "mac", **macvlan})
    return [
        *kinds,
        Kind("both", '[{"name": "both"}, {"name": "mac"}]', frozenset({"eth0", "net1", "net2"})),
        Kind("tuned", '[{"name": "tuned"}]', frozenset({"eth0", "net1"})),
        Kind("mac", '[{"name": "mac"}, {"name": "tuned"}]', frozenset({"eth0", "net1", "net2"})),
    ]


def mixed(node: Node, reference: Path, define: Callable[[str, dict[str, Any]], None]) -> list[Kind]:
    """Networks of built-ins and of reference binaries, and kinds of pods that use them; `define` declares one.

    Of `bridge` there is a built-in, and the binary by another name; `ptp` and `host-local` are what `builtinPlugins`
    says: built-ins with `prefer`, else binaries.
    """
    for name in ("ptp", "portmap", "host-local"):
        shutil.copy(reference / name, node.bin_dir)
    shutil.copy(reference / "bridge", node.bin_dir / "ref-bridge")
    version = node.cni_version
    one = {"cniVersion": version}
    define("cluster", {**one, "name": "cluster", "type": "ptp", "ipam": _local(node, "10.90.0.0/16")})
    inner = {"type": "bridge", "bridge": "inner0", "isGateway": True, "ipMasq": True}
    define("inner", {**one, "name": "inner", **inner, "ipam": _local(node, "10.91.0.0/16")})
    lan = {"type": "ref-bridge", "bridge": "lan0", "isGateway": True, "ipam": _local(node, "10.92.0.0/16")}
    define("lan", {**one, "name": "lan", **lan})
    ptp = {"type": "ptp", "ipMasq": True, "ipam": _local(node, "10.93.0.0/16")}
    portmap = {"type": "portmap", "snat": True, "capabilities": {"portMappings": True}}
    define("ports", {**one, "name": "ports", "plugins": [ptp, portmap]})
    ports = '{"name": "ports", "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}'
    return [
        Kind("plain", None, frozenset({"eth0"})),
        Kind("lans", '[{"name": "lan"}, {"name": "inner"}]', frozenset({"eth0", "net1", "net2"})),
        Kind("more", '[{"name": "inner"}]', frozenset({"eth0", "net1"})),
        Kind("ports", f'[{ports}, {{"name": "lan"}}]', frozenset({"eth0", "net1", "net2"})),
    ]
