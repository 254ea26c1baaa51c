"""A DEL that comes when the container's namespace has gone, and the next pod has one with the same path and inode."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import hasty_shim
from tests.e2e import reused_netns
from tests.e2e.delegate import network, post
from tests.e2e.node import Node, ping
from tests.e2e.reused_netns import change_identity, identity, interfaces, leases, spool_entry
from tests.e2e.test_node_verbs import ask
from tests.programs import needed
from tests.soak.remains import rules

MakeNode = Callable[..., Node]

PLUGINS = ("built-in", "binaries")
IDENTITIES = ("cookie", "older", "none")
"""The first container's record has the identity of this version, device and inode, or nothing."""
NAMES = {"eth0", "net1", "net2"}
ROUNDS = 24
TRIES = 10
"""How often a container is added anew where another process has taken the inode of its namespace."""


@pytest.fixture(params=PLUGINS)
def late(request: pytest.FixtureRequest, make_node: MakeNode) -> Node:
    """A node with a ptp, a bridge and a macvlan network, and the pods `a`, `b` that have all of them; it runs."""
    node = make_node()
    if request.param == "binaries":
        node.settings["builtinPlugins"] = "fallback"
        for name in ("ptp", "bridge", "macvlan", "host-local"):
            (node.bin_dir / name).symlink_to(request.getfixturevalue("reference") / name)
    node.ptp("cluster", "10.84.0.0/24", ipMasq=True)
    node.network("lan", _plugin(node, "bridge", 1, bridge="lan0", isGateway=True, ipMasq=True), "default")
    ip = [needed("ip"), "-n", Path(node.host).name, "link"]
    subprocess.run([*ip, "add", "up0", "type", "veth", "peer", "name", "up1"], check=True)
    for name in ("up0", "up1"):
        subprocess.run([*ip, "set", name, "up"], check=True)
    node.network("mac", _plugin(node, "macvlan", 2, master="up0"), "default")
    for pod in ("a", "b"):
        node.pod(pod, "lan,mac")
    node.start()
    return node


def _plugin(node: Node, kind: str, subnet: int, **more: Any) -> dict[str, Any]:
    ipam = {"type": "host-local", "subnet": f"10.84.{subnet}.0/24", "dataDir": str(node.networks_dir)}
    return {"cniVersion": "1.0.0", "type": kind, "ipam": ipam, **more}


def added(node: Node, container_id: str, netns: str, pod: str) -> dict[str, tuple[int, str, list[str]]]:
    """Add the container; its interfaces, each with an address."""
    answer = node.cni("ADD", container_id, netns, pod)
    assert answer.code == 0, answer.stdout
    made = interfaces(node, netns)
    assert made.keys() == NAMES
    assert all(addresses for _, _, addresses in made.values())
    return made


def add_and_lose_namespace(node: Node, container_id: str, netns: str, pod: str) -> str:
    """Add the container and make its namespace anew; the identity, as older versions have it, of both namespaces."""
    for _ in range(TRIES):
        added(node, container_id, netns, pod)
        before = identity(netns)
        if reused_netns.remake(netns):
            assert identity(netns) == before
            return before
        assert node.cni("DEL", container_id, netns, pod).code == 0
    raise AssertionError(f"the inode of {netns} was never given out again")


def by_runtime(node: Node, netns: str) -> None:
    answer = node.cni("DEL", "a1", netns, "a")
    assert (answer.code, answer.stderr) == (0, b""), answer.stdout


def by_spool(node: Node, netns: str) -> None:
    entry = spool_entry(node, "a1", netns, "a")
    node.wait_until(lambda: not entry.exists(), "the spooled DEL is served")


def by_gc(node: Node, netns: str) -> None:
    answer = ask(node, "GC", ["b1"])
    assert answer.code == 0, answer.stdout


@pytest.mark.parametrize("known", IDENTITIES)
@pytest.mark.parametrize("delete", [by_runtime, by_spool, by_gc])
def test_a_late_delete_frees_the_old_container_and_leaves_the_new_one_alone(
    late: Node, delete: Callable[[Node, str], None], known: str
) -> None:
    node = late
    netns = node.add_netns()
    # What the first pod makes for the whole node stays.
    added(node, "c0", netns, "a")
    assert node.cni("DEL", "c0", netns, "a").code == 0
    links = set(node.links())

    older = add_and_lose_namespace(node, "a1", netns, "a")
    if known != "cookie":
        change_identity(node, "a1", older if known == "older" else "")
    made = added(node, "b1", netns, "b")
    routes, chains = node.ip("route", netns=netns), rules(node)
    assert (len(leases(node, "a1")), len(leases(node, "b1"))) == (3, 3)

    delete(node, netns)
    assert interfaces(node, netns) == made
    assert node.ip("route", netns=netns) == routes
    assert ping(netns, "10.84.0.1")
    assert ping(netns, "10.84.1.1")
    assert (leases(node, "a1"), len(leases(node, "b1"))) == ([], 3)
    assert not (node.cni_dir / "attachments" / "a1.json").exists()
    assert [rule for rule in rules(node) if "a1" in rule] == []
    assert [rule for rule in chains if "b1" in rule] == [rule for rule in rules(node) if "b1" in rule]
    # One pair for each of ptp and bridge; the kernel takes those of the old namespace.
    node.wait_until(lambda: len(set(node.links()) - links) == 2, "the links of the first container are gone")
    assert node.cni("CHECK", "b1", netns, "b").code == 0

    assert node.cni("DEL", "b1", netns, "b").code == 0
    assert interfaces(node, netns) == {}
    assert (set(node.links()), node.leftovers()) == (links, [])


def test_a_plugin_learns_which_namespace_is_gone(make_node: MakeNode) -> None:
    """The runtime's DEL in the spool has the path of the namespace. Some plugins find their state by it."""
    node = make_node()
    log = node.root / "calls"
    answer = """[ $CNI_COMMAND = DEL ] || echo '{"cniVersion": "1.0.0"}'"""
    node.plugin("keeps", f'echo "$CNI_COMMAND=$CNI_NETNS" >>{log}; {answer}')
    node.ptp("cluster", "10.84.0.0/24")
    node.network("kept", {"cniVersion": "1.0.0", "type": "keeps"}, "default")
    node.pod("a", "kept")
    node.start()
    # With twenty, a reconcile beside the spool would delete some first.
    containers = {f"a{number}": node.add_netns() for number in range(20)}
    for name, netns in containers.items():
        assert node.cni("ADD", name, netns, "a").code == 0
    assert node.stop() == 0
    for name, netns in containers.items():
        assert node.cni("DEL", name, netns, "a", shim=hasty_shim.binary()).code == 0
        subprocess.run([needed("ip"), "netns", "delete", Path(netns).name], check=True)
    node.start()
    node.wait_until(lambda: log.read_text().count("DEL=") == len(containers), "the plugin is called for each")
    assert {f"DEL={netns}" for netns in containers.values()} <= set(log.read_text().split())


@pytest.mark.parametrize("late", ["built-in"], indirect=True)
@pytest.mark.parametrize("known", IDENTITIES)
def test_a_late_hot_unplug(late: Node, known: str) -> None:
    node = late
    node.pod("hello")
    netns, older = node.add_netns(), ""
    for _ in range(TRIES):
        assert node.cni("ADD", "c1", netns, "hello").code == 0
        status, answer = post(node, "ADD", netns, "net1", network(node))
        assert status == 200, answer
        older = identity(netns)
        if reused_netns.remake(netns):
            break
        assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert identity(netns) == older
    if known != "cookie":
        change_identity(node, "c1", older if known == "older" else "")
    made = added(node, "b1", netns, "b")
    assert post(node, "DEL", netns, "net1", network(node)) == (200, None)
    assert interfaces(node, netns) == made
    assert len(leases(node, "c1")) == 1
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert interfaces(node, netns) == made
    assert leases(node, "c1") == []


@pytest.mark.parametrize("known", IDENTITIES[:2])
def test_a_late_delete_beside_the_add_of_the_next_container(late: Node, known: str) -> None:
    """The container of each round is the old one of the next; each second DEL comes by the spool."""
    node = late
    netns = node.add_netns()
    made = added(node, "r0", netns, "a")
    older = identity(netns)
    reused = 0
    entries = []
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, ROUNDS + 1):
            old, new = f"r{number - 1}", f"r{number}"
            old_pod, new_pod = ("a", "b") if number % 2 else ("b", "a")
            assert interfaces(node, netns) == made, f"{old} has lost an interface before its namespace went"
            if known == "older":
                change_identity(node, old, older)
            reused += reused_netns.remake(netns, 2)
            older = identity(netns)

            def late_delete(old: str = old, pod: str = old_pod, spooled: bool = number % 4 > 1) -> str:
                time.sleep(random.uniform(0, 0.03))
                if spooled:
                    entries.append(spool_entry(node, old, netns, pod))
                    return ""
                answer = node.cni("DEL", old, netns, pod)
                return "" if answer.code == 0 and not answer.stderr else f"{answer.stdout!r} {answer.stderr!r}"

            deleted = pool.submit(late_delete)
            time.sleep(random.uniform(0, 0.03))
            made = added(node, new, netns, new_pod)
            assert deleted.result() == ""
            assert interfaces(node, netns) == made, f"DEL of {old} took an interface of {new}"
            if not number % 8:
                node.wait_until(lambda: not any(entry.exists() for entry in entries), "spooled DELs are served")
                assert interfaces(node, netns) == made
    node.wait_until(lambda: not any(entry.exists() for entry in entries), "spooled DELs are served")
    assert interfaces(node, netns) == made
    last = f"r{ROUNDS}"
    assert sorted(path.stem for path in (node.cni_dir / "attachments").glob("*.json")) == [last]
    assert len(leases(node, last)) == 3
    assert node.cni("DEL", last, netns, "a" if ROUNDS % 2 == 0 else "b").code == 0
    assert node.leftovers() == []
    # Other tests make namespaces meanwhile.
    assert reused, f"none of {ROUNDS} namespaces had the inode of the one before"
