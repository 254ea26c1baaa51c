"""A running pod's annotation changes again and again while the daemon is killed: kernel, record and status follow it.

    python -m tests.soak.annotation [--changes 1000] [--modes prefer off] [--seed 0]

One to eight networks at random, the same one several times, others under the same interface name, default routes that
move, several changes at once, malformed ones and such as ask for nothing in between. The daemon is killed every few
seconds. After each change, the pod's interfaces, addresses and default route, the host's ends, the addresses that are
taken, the record and the network-status are those of the last valid annotation; at the end nothing is left. Exit status
1, with a line for each thing that is wrong or left. As root; for `off` the reference plugins in CNI_REFERENCE_DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.conftest import REFERENCE
from tests.e2e.node import Node
from tests.soak.churn import Outcome, end_in_good_order, report
from tests.soak.killer import Killer
from tests.soak.remains import Remains

MODES = ("prefer", "off")
"""Lists the values of `builtinPlugins`."""
NETWORKS = ("ptp0", "ptp1", "ptp2", "lan0", "lan1", "tuned")
MALFORMED = ("", "[]", "{", '["ptp0"', "ptp0@@", "a/b/c", '[{"name": 7}]', '[{"name": "no-such"}]', "lan0@eth0", " ")
"""Ask for nothing, or are refused."""
KEY = "k8s.v1.cni.cncf.io/networks"
POD, CONTAINER = "web", "c1"
SETTLED_SECONDS = 30.0

Element = dict[str, Any]


def prepare(node: Node) -> None:
    """Declare the networks. The cluster's has a default route."""

    def ipam(number: int, **more: Any) -> dict[str, Any]:
        return {"type": "host-local", "subnet": f"10.95.{number}.0/24", "dataDir": str(node.networks_dir), **more}

    def declare(name: str, namespace: str, *plugins: dict[str, Any]) -> None:
        node.network(name, {"cniVersion": "1.0.0", "name": name, "plugins": list(plugins)}, namespace)

    declare("cluster", "kube-system", {"type": "ptp", "ipam": ipam(100, routes=[{"dst": "0.0.0.0/0"}])})
    for number in range(3):
        declare(f"ptp{number}", "default", {"type": "ptp", "ipam": ipam(number)})
    # A bridge without an address has the MAC of its lowest port: CHECK fails when another port comes.
    bridges = [
        {"type": "bridge", "bridge": f"soak{number}", "isGateway": True, "ipam": ipam(number)} for number in (3, 4, 5)
    ]
    for number in range(2):
        declare(f"lan{number}", "default", bridges[number])
    tuning = {"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}, "capabilities": {"mac": True}}
    declare("tuned", "default", bridges[2], tuning)


def chosen(dice: random.Random) -> list[Element]:
    """Return elements of an annotation, one to eight."""
    names = dice.sample([f"data{number}" for number in range(10)], 8)
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


def edit(node: Node, networks: str) -> None:
    """Declare the pod with this annotation."""
    metadata = {"namespace": "default", "name": POD, "uid": f"uid-{POD}", "annotations": {KEY: networks}}
    path = node.manifests / f"pod-default-{POD}.yaml"
    beside = path.with_suffix(".new")
    beside.write_text(
        yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}})
    )
    beside.rename(path)


def wrong(node: Node, netns: str, wanted: list[Element]) -> list[str]:
    """Return a line for each thing that is not as the annotation has it."""
    lines = (node.cni_dir / "attachments" / f"{CONTAINER}.json").read_text().splitlines()
    items = [item for item in json.loads(lines[-1])["record"]["attachments"] if not item.get("clusterNetwork")]
    found: list[str] = []

    def same(what: str, there: Any, right: Any) -> None:
        if there != right:
            found.append(f"{what}: {there}, not {right}")

    # Record.
    selected = Counter(
        json.dumps(json.loads(item["selection"]), sort_keys=True) for item in items if "{" in item["selection"]
    )
    right = Counter(json.dumps({"namespace": "default", **item}, sort_keys=True) for item in wanted)
    same("selections on record", selected, right)
    if any("result" not in item for item in items):
        found.append("an attachment without a result is on record")
    by_name = {item["ifname"]: item["name"] for item in items}
    for item in wanted:
        if name := item.get("interface"):
            same(f"network of {name}", by_name.get(name), f"default/{item['name']}")
    unnamed = {item["ifname"] for item in items if not json.loads(item["selection"]).get("interface")}
    if not all(name.startswith("net") for name in unnamed):
        found.append(f"names that are not netN: {unnamed}")
    # Status.
    text = yaml.safe_load((node.manifests / "status" / "default" / f"{POD}.yaml").read_text())
    entries = json.loads(text["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"])
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


def settled(node: Node, netns: str, wanted: list[Element], seconds: float = SETTLED_SECONDS) -> list[str]:
    """Return what is still wrong after that time; empty as soon as nothing is."""
    end = time.monotonic() + seconds
    while True:
        found = ["the files can't be read"]
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            found = wrong(node, netns, wanted)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.02)


def run(node: Node, changes: int, pause: tuple[float, float] | None = (1.0, 4.0), seed: int = 0) -> Outcome:
    """Change the annotation that often, on a node that is not started; `pause`: between two kills of the daemon."""
    dice = random.Random(seed)
    prepare(node)
    edit(node, "tuned,lan0,lan1,ptp0")
    node.start()
    # The bridges stay.
    first = node.add_netns()
    assert node.cni("ADD", CONTAINER, first, POD).code == 0
    assert node.cni("DEL", CONTAINER, first, POD).code == 0
    remains = Remains(node)
    netns = node.add_netns()
    added = node.cni("ADD", CONTAINER, netns, POD)
    assert added.code == 0, added.stdout
    problems: list[str] = []
    done, began = 0, time.monotonic()
    waits: list[float] = []
    with contextlib.ExitStack() as stack:
        # Plugins live on: `ip`, by which this looks, would be killed with them.
        killer = stack.enter_context(Killer(node, pause, with_plugins=0)) if pause else None
        while done < changes and not (killer and killer.has_failed) and len(problems) < 20:
            wanted: list[Element] = []
            for _ in range(dice.choice((1, 1, 1, 2, 4))):
                if dice.random() < 0.3:
                    edit(node, dice.choice(MALFORMED))
                    time.sleep(dice.choice((0, 0.05, 0.3)))
                    done += 1
                wanted = chosen(dice)
                edit(node, json.dumps(wanted))
                time.sleep(dice.choice((0, 0.01, 0.1)))
                done += 1
            start = time.monotonic()
            problems += [f"after {done} changes, {json.dumps(wanted)}: {line}" for line in settled(node, netns, wanted)]
            waits.append(time.monotonic() - start)
    check = node.cni("CHECK", CONTAINER, netns, POD)
    problems += [f"CHECK: {check.stdout!r}"] if check.code else []
    deleted = node.cni("DEL", CONTAINER, netns, POD)
    problems += [f"DEL: {deleted.stdout!r}"] if deleted.code else []
    left = remains.settled([first, netns], 30)
    waits.sort()
    text = (
        f"{time.monotonic() - began:.0f} s, {done} changes, daemon killed {killer.strikes if killer else 0} times; "
        f"followed within {waits[len(waits) // 2]:.2f} s (median), {waits[-1]:.2f} s (all)"
    )
    return Outcome(text, [*problems, *left])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.annotation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--changes", type=int, default=1000)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-logs", type=Path, help="copy the daemon's log to this directory")
    given = parser.parse_args()
    end_in_good_order()
    status = 0
    for mode in given.modes:
        own = {"binDir": str(REFERENCE)} if mode == "off" else {}
        with Node(settings={"hotplug": "on", "builtinPlugins": mode, **own}) as node:
            outcome = run(node, given.changes, seed=given.seed)
            status |= report(f"annotation, builtinPlugins {mode}", outcome)
            if given.keep_logs:
                (given.keep_logs / f"annotation-{mode}.log").write_bytes(node.log.read_bytes())
    return status


if __name__ == "__main__":
    sys.exit(main())
