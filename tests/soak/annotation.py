"""A running pod's annotation changes again and again: kernel, record and status follow it, whatever is disturbed.

    python -m tests.soak.annotation [--changes 1000] [--modes prefer off] [--disturb kills outages none] [--seed 0]

One to eight networks at random, the same one several times, others under the same interface name, default routes that
move, several changes at once, malformed ones and such as ask for nothing in between. `kills`: the daemon is killed
every few seconds. `outages`: the pod is an object of a real kube-apiserver, which is frozen, killed or cut off every
few seconds. After each change, the pod's interfaces, addresses and default route, the host's ends, the addresses that
are taken, the record and the network-status are those of the last valid annotation; at the end nothing is left. No
address is ever in two namespaces (tests/soak/census.py): another pod comes and goes, which takes the addresses that
become free, and 10 of 100 DELs of plugins fail at a random place, 1 of 100 operations on the disk with EIO
(tests/soak/eio.py). Exit status 1, with a line for each thing that is wrong or left. As root; for `off` the reference
plugins in CNI_REFERENCE_DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests.e2e.apiserver import ApiServer
from tests.e2e.conftest import REFERENCE
from tests.e2e.kube_client import ApiError
from tests.e2e.node import Answer, Node
from tests.e2e.test_kubernetes import Cluster
from tests.soak import eio
from tests.soak.census import Census
from tests.soak.churn import Outcome, end_in_good_order, report
from tests.soak.disturbance import Disturbance
from tests.soak.killer import Killer
from tests.soak.outages import Outages
from tests.soak.remains import Remains

MODES = ("prefer", "off")
"""Lists the values of `builtinPlugins`."""
DISTURBANCES = ("kills", "outages", "none")
PAUSE = (2.0, 6.0)
"""Seconds between two kills of the daemon, the least and the most."""
STARTS = 10
"""How often a daemon is started that ends, as its disk is sick; as the kubelet does."""
NETWORKS = ("ptp0", "ptp1", "ptp2", "ptp3", "lan0", "lan1", "lan2", "tuned")
MALFORMED = ("", "[]", "{", '["ptp0"', "ptp0@@", "a/b/c", '[{"name": 7}]', '[{"name": "no-such"}]', "lan0@eth0", " ")
"""Ask for nothing, or are refused."""
KEY = "k8s.v1.cni.cncf.io/networks"
STATUS = "k8s.v1.cni.cncf.io/network-status"
POD, CONTAINER = "web", "c1"
RIVAL, RIVALS_NETWORKS = "rival", "lan0,lan1,lan2"
"""A pod that takes the addresses that become free, without annotations that change."""
ADDRESSES_LAST = 10
"""The last address of each network ends so: a free one is soon another pod's."""
DELS_SHARE, EIO_SHARE = 0.1, 0.01
SETTLED_SECONDS = 120.0
"""Much more than it takes, as the machine may have other work: what is wrong then stays so."""

Element = dict[str, Any]


class Place(Protocol):
    """Where the pod and its networks are declared."""

    node: Node
    namespace: str

    def declare(self, name: str, config: dict[str, Any]) -> None:
        """Declare a network of the pod's namespace."""

    def edit(self, networks: str) -> None:
        """Declare the pod with this annotation, or change it."""

    def status(self) -> str:
        """Return the network-status. Raises OSError, KeyError, ApiError, HTTPException."""

    def declare_rival(self) -> None:
        """Declare the pod RIVAL with all bridge networks."""

    def cni(self, verb: str, netns: str, pod: str = POD, container: str = CONTAINER) -> Answer:
        """Call the verb for the pod."""


class Directory:
    """The manifests of a standalone node."""

    namespace = "default"

    def __init__(self, node: Node) -> None:
        self.node = node

    def declare(self, name: str, config: dict[str, Any]) -> None:
        self.node.network(name, config, "kube-system" if name == "cluster" else self.namespace)

    def edit(self, networks: str) -> None:
        metadata = {"namespace": self.namespace, "name": POD, "uid": f"uid-{POD}", "annotations": {KEY: networks}}
        path = self.node.manifests / f"pod-default-{POD}.yaml"
        beside = path.with_suffix(".new")
        beside.write_text(
            yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}})
        )
        beside.rename(path)

    def status(self) -> str:
        text = yaml.safe_load((self.node.manifests / "status" / self.namespace / f"{POD}.yaml").read_text())
        return str(text["metadata"]["annotations"][STATUS])

    def declare_rival(self) -> None:
        self.node.pod(RIVAL, RIVALS_NETWORKS)

    def cni(self, verb: str, netns: str, pod: str = POD, container: str = CONTAINER) -> Answer:
        return self.node.cni(verb, container, netns, pod)


class Objects:
    """Objects of an API server, which may be away for a moment."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node = cluster.node
        self.namespace = cluster.namespace

    def declare(self, name: str, config: dict[str, Any]) -> None:
        self.cluster.definition(name, json.dumps(config))

    def edit(self, networks: str) -> None:
        if POD not in self.cluster.uids:
            self.cluster.pod(POD, networks)
            return
        client = self.cluster.server.client
        path = client.resource("v1", "Pod").path(self.namespace, POD)
        end = time.monotonic() + SETTLED_SECONDS
        while True:
            try:
                client.merge(path, {"metadata": {"annotations": {KEY: networks}}})
                return
            except (OSError, http.client.HTTPException, ApiError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def status(self) -> str:
        return self.cluster.annotations(POD)[STATUS]

    def declare_rival(self) -> None:
        self.cluster.pod(RIVAL, RIVALS_NETWORKS)

    def cni(self, verb: str, netns: str, pod: str = POD, container: str = CONTAINER) -> Answer:
        return self.cluster.cni(verb, pod, netns, container)


def prepare(place: Place) -> None:
    """Declare the networks. The cluster's has a default route."""

    def ipam(number: int, **more: Any) -> dict[str, Any]:
        data = str(place.node.networks_dir)
        ranges = [[{"subnet": f"10.95.{number}.0/24", "rangeEnd": f"10.95.{number}.{ADDRESSES_LAST}"}]]
        return {"type": "host-local", "ranges": ranges, "dataDir": data, **more}

    def declare(name: str, *plugins: dict[str, Any]) -> None:
        place.declare(name, {"cniVersion": "1.0.0", "name": name, "plugins": list(plugins)})

    declare("cluster", {"type": "ptp", "ipam": ipam(100, routes=[{"dst": "0.0.0.0/0"}])})
    for number in range(4):
        declare(f"ptp{number}", {"type": "ptp", "ipam": ipam(number)})
    # A bridge without an address has the MAC of its lowest port: CHECK fails when another port comes.
    bridges = [
        {"type": "bridge", "bridge": f"soak{number}", "isGateway": True, "ipam": ipam(number)} for number in range(4, 8)
    ]
    for number in range(3):
        declare(f"lan{number}", bridges[number])
    tuning = {"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}, "capabilities": {"mac": True}}
    declare("tuned", bridges[3], tuning)


def chosen(dice: random.Random) -> list[Element]:
    """Return elements of an annotation, one to eight."""
    names = dice.sample([f"data{number}" for number in range(10)], 9)
    found: list[Element] = []
    gates = dice.random() < 0.3
    # The plugin `ptp` refuses a second interface with the same gateway.
    once = {"ptp0"} if gates else set()
    for _ in range(dice.randint(1, 8)):
        item: Element = {"name": dice.choice([name for name in NETWORKS if name not in once])}
        once |= {name for name in (item["name"],) if name.startswith("ptp")}
        if dice.random() < 0.5:
            item["interface"] = names.pop()
        if item["name"] == "tuned" and dice.random() < 0.5:
            item["mac"] = f"02:00:00:00:00:{dice.randrange(256):02x}"
        found.append(item)
    if gates:
        item = {"name": "ptp0", "interface": names.pop(), "default-route": ["10.95.0.1"]}
        found.insert(dice.randrange(len(found) + 1), item)
        del found[8:]
    return found


def wrong(place: Place, netns: str, wanted: list[Element]) -> list[str]:
    """Return a line for each thing that is not as the annotation has it. Raises what `Place.status` raises."""
    node = place.node
    lines = (node.cni_dir / "attachments" / f"{CONTAINER}.json").read_text().splitlines()
    last = json.loads(lines[-1])
    if "record" not in last:
        return [f"a DEL runs: {last}"]
    items = [item for item in last["record"]["attachments"] if not item.get("clusterNetwork")]
    found: list[str] = []

    def same(what: str, there: Any, right: Any) -> None:
        if there != right:
            found.append(f"{what}: {there}, not {right}")

    # Record.
    selected = Counter(
        json.dumps(json.loads(item["selection"]), sort_keys=True) for item in items if "{" in item["selection"]
    )
    right = Counter(json.dumps({"namespace": place.namespace, **item}, sort_keys=True) for item in wanted)
    same("selections on record", selected, right)
    if any("result" not in item for item in items):
        found.append("an attachment without a result is on record")
    by_name = {item["ifname"]: item["name"] for item in items}
    for item in wanted:
        if name := item.get("interface"):
            same(f"network of {name}", by_name.get(name), f"{place.namespace}/{item['name']}")
    unnamed = {item["ifname"] for item in items if not json.loads(item["selection"]).get("interface")}
    if not all(name.startswith("net") for name in unnamed):
        found.append(f"names that are not netN: {unnamed}")
    # Status.
    entries = json.loads(place.status())
    shown = {entry["interface"]: entry["name"] for entry in entries if entry["interface"] != "eth0"}
    same("network-status", shown, by_name)
    # The pod.
    links = {link["ifname"]: link for link in node.ip("address", netns=netns)}
    same("links of the pod", set(links), {"lo", "eth0", *by_name})
    for item in items:
        if item["ifname"] in links and "result" in item:
            link = links[item["ifname"]]
            there = {f"{address['local']}/{address['prefixlen']}" for address in link["addr_info"]}
            same(f"addresses of {item['ifname']}", {name for name in there if not name.startswith("fe80")}, _ips(item))
            asked = json.loads(item["selection"]).get("mac")
            if asked:
                same(f"MAC of {item['ifname']}", link["address"], asked)
    gate = next((item["interface"] for item in wanted if "default-route" in item), "eth0")
    same("default route", [route.get("dev") for route in node.ip("route", "show", "default", netns=netns)], [gate])
    # The host.
    ends = {link["ifname"]: link for link in node.ip("-details", "link")}
    veths = [name for name, link in ends.items() if link.get("linkinfo", {}).get("info_kind") == "veth"]
    same("veths of the host", len(veths), len(items) + 1)
    reported = {(end["name"], end["mac"]) for item in items for end in _interfaces(item) if not end.get("sandbox")}
    same("MACs on the host", {(name, ends.get(name, {}).get("address", "")) for name, _ in reported}, reported)
    leases = [path for path in node.networks_dir.rglob("*") if path.name[0].isdecimal()]
    same("leases", len(leases), len(items) + 1)
    return found


def _interfaces(item: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = item.get("result", {}).get("interfaces", [])
    return found


def _ips(item: dict[str, Any]) -> set[str]:
    return {address["address"] for address in item["result"]["ips"]}


def settled(place: Place, netns: str, wanted: list[Element]) -> list[str]:
    """Return what is still wrong after SETTLED_SECONDS; empty as soon as nothing is."""
    end = time.monotonic() + SETTLED_SECONDS
    while True:
        found = ["record or network-status can't be read"]
        with contextlib.suppress(OSError, json.JSONDecodeError, http.client.HTTPException, ApiError):
            found = wrong(place, netns, wanted)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.02)


def run(place: Place, changes: int, disturbance: Disturbance | None = None, seed: int = 0) -> Outcome:
    """Change the annotation that often, on a node that is not started."""
    dice, node = random.Random(seed), place.node
    prepare(place)
    place.edit("tuned,lan0,lan1,lan2,ptp0")
    place.declare_rival()
    sick = node.root / "sick"
    node.wrapper = eio.wrapper(EIO_SHARE, DELS_SHARE, sick, (node.cni_dir, node.networks_dir))
    node.start()
    # The bridges stay.
    first = node.add_netns()
    assert place.cni("ADD", first).code == 0
    assert place.cni("DEL", first).code == 0
    remains = Remains(node)
    netns = node.add_netns()
    added = place.cni("ADD", netns)
    assert added.code == 0, added.stdout
    problems: list[str] = []
    began, done, waits = time.monotonic(), 0, []
    rivals: list[str] = []
    with Census(node) as census, disturbance or contextlib.nullcontext():
        while done < changes and not (disturbance and disturbance.has_failed) and len(problems) < 20:
            sick.touch()
            with rival(place, rivals):
                number, wanted = change(place, dice)
                time.sleep(dice.choice((0, 0, 0, 2.0)))
            sick.unlink()
            done += number
            start = time.monotonic()
            lines = settled(place, netns, wanted)
            problems += [f"after {done} changes, {json.dumps(wanted)}: {line}" for line in lines]
            # The faults of plugins and disk end before `start`, those of the daemon and the API server at any time.
            mended = max(start, disturbance.mended) if disturbance else start
            waits.append(max(0.0, time.monotonic() - mended))
    time.sleep(eio.LOOKS)
    for verb in ("CHECK", "DEL"):
        answer = place.cni(verb, netns)
        problems += [f"{verb}: {answer.stdout!r}"] if answer.code else []
    # What a sick disk kept from a writer's removal, the next start removes.
    node.stop(timeout=90)
    node.start()
    left = remains.settled([first, netns, *rivals], 60)
    waits.sort()
    strikes = disturbance.strikes if disturbance else 0
    text = (
        f"{time.monotonic() - began:.0f} s, {done} changes, disturbed {strikes} times; {census.summary}; "
        f"after the last fault followed within {waits[len(waits) // 2]:.2f} s (median), {waits[-1]:.2f} s (all)"
    )
    return Outcome(text, [*census.twice, *problems, *left])


@contextlib.contextmanager
def rival(place: Place, namespaces: list[str]) -> Iterator[None]:
    """Have another pod come and go during the block; its last namespace, in `namespaces`, is empty after it."""
    ending = threading.Event()
    netns = place.node.add_netns()
    namespaces[:] = [netns]

    def work() -> None:
        while not ending.is_set():
            # A runtime uses no id twice.
            container = f"r{uuid.uuid4().hex}"
            place.cni("ADD", netns, RIVAL, container)
            ending.wait(0.3)
            while place.cni("DEL", netns, RIVAL, container).code:
                time.sleep(0.1)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        try:
            yield
        finally:
            ending.set()
            running.result()
    if place.node.links(netns) == ["lo"]:
        place.node.remove_netns(netns)
        namespaces.clear()


def change(place: Place, dice: random.Random) -> tuple[int, list[Element]]:
    """Change the annotation one to eight times; return how often, and the elements that it has then."""
    number = 0
    wanted: list[Element] = []
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        if dice.random() < 0.3:
            place.edit(dice.choice(MALFORMED))
            time.sleep(dice.choice((0, 0.05, 0.3)))
            number += 1
        wanted = chosen(dice)
        place.edit(json.dumps(wanted))
        time.sleep(dice.choice((0, 0.01, 0.1)))
        number += 1
    return number, wanted


def killer(node: Node) -> Killer:
    """Return what kills the daemon. Its plugins live on: `ip`, by which `wrong` looks, would be killed with them."""
    return Killer(node, PAUSE, with_plugins=0, starts=STARTS)


@contextlib.contextmanager
def prepared(mode: str, disturb: str) -> Iterator[tuple[Place, Disturbance | None]]:
    """A node that is not started, and what disturbs it."""
    own = {"binDir": str(REFERENCE)} if mode == "off" else {}
    # What a DEL left, as the disk was sick, is deleted soon; none is given up.
    soon = {"reconcileSeconds": 5, "deleteTries": 0}
    settings = {"hotplug": "on", "keep": "repair", "builtinPlugins": mode, **soon, **own}
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(settings=settings, standalone=disturb != "outages"))
        if disturb != "outages":
            yield Directory(node), killer(node) if disturb == "kills" else None
            return
        server = stack.enter_context(ApiServer())
        server.create_namespace("soak")
        cluster = Cluster(server, node, "soak")
        cluster.prepare()
        stack.enter_context(server.reachable_in(node.host))
        stack.callback(node.kill)
        yield Objects(cluster), Outages(cluster)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.annotation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:1])
    parser.add_argument("--disturb", nargs="+", choices=DISTURBANCES, default=DISTURBANCES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-logs", type=Path, help="copy the daemon's log to this directory")
    given = parser.parse_args()
    end_in_good_order()
    status = 0
    for mode in given.modes:
        for disturb in given.disturb:
            with prepared(mode, disturb) as (place, disturbance):
                outcome = run(place, given.changes, disturbance, given.seed)
                status |= report(f"annotation, builtinPlugins {mode}, disturbed by {disturb}", outcome)
                if given.keep_logs:
                    (given.keep_logs / f"annotation-{mode}-{disturb}.log").write_bytes(place.node.log.read_bytes())
    return status


if __name__ == "__main__":
    sys.exit(main())
