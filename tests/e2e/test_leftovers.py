"""Nothing is lost: DELs that come late, plugins that fail, namespaces that vanish, pods behind our back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import multus_shim
from tests import hasty_shim
from tests.e2e.node import Node

RECONCILE = {"reconcileSeconds": 0.2}

FAILING = """
test -e {root}/calls || : > {root}/calls
case $CNI_COMMAND in
ADD) echo '{{"cniVersion": "1.0.0"}}' ;;
DEL) echo $CNI_CONTAINERID >> {root}/calls
     if [ -e {root}/broken ]; then echo '{{"code": 117, "msg": "the fabric is away"}}'; exit 1; fi ;;
esac
"""


def make(make_node: Callable[..., Node], **settings: object) -> Node:
    node = make_node(settings={"metricsPort": 9900, **settings})
    node.ptp("cluster", "10.81.0.0/24", cniVersion="1.0.0")
    node.ptp("storage", "10.81.1.0/24", namespace="default")
    return node


def failing_network(node: Node) -> tuple[Path, Path]:
    """The network `fabric`, whose plugin fails while the first file is there, and counts its DELs in the second."""
    node.plugin("fabric", FAILING.format(root=node.root))
    node.network("fabric", {"cniVersion": "1.0.0", "name": "fabric", "type": "fabric"}, "default")
    return node.root / "broken", node.root / "calls"


def del_without_a_daemon(node: Node, container_id: str, netns: str, pod: str) -> int:
    """The exit status of a DEL that hardly waits for a daemon."""
    return node.cni("DEL", container_id, netns, pod, shim=hasty_shim.binary()).code


def metric(node: Node, name: str) -> float:
    [line] = [line for line in node.metrics(9900).splitlines() if line.startswith(name + " ")]
    return float(line.split()[-1])


def said(node: Node, text: str) -> int:
    return node.log.read_text().count(text)


# --- the spool -------------------------------------------------------------------------------------------------------


def test_dels_of_a_daemon_that_was_killed_are_all_replayed_once(make_node: Callable[..., Node]) -> None:
    node = make(make_node)
    broken, calls = failing_network(node)
    spaces = [node.add_netns() for _ in range(8)]
    for number in range(8):
        node.pod(f"p{number}", "storage,fabric")
    node.start()
    before = node.links()
    for number, netns in enumerate(spaces):
        assert node.cni("ADD", f"c{number}", netns, f"p{number}").code == 0
    node.kill()
    for number, netns in enumerate(spaces):
        assert del_without_a_daemon(node, f"c{number}", netns, f"p{number}") == 0
    assert len(list((node.cni_dir / "spool").iterdir())) == 8
    assert not broken.exists()
    node.start()
    node.wait_until(lambda: not node.leftovers(), "the spool, the records and the addresses are gone")
    assert [node.links(netns) for netns in spaces] == [["lo"]] * 8
    assert node.links() == before
    assert sorted(calls.read_text().split()) == [f"c{number}" for number in range(8)]


# --- plugins that fail -----------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(3)
def test_a_plugin_that_fails_and_works_again_is_the_only_one_that_is_asked_again(
    make_node: Callable[..., Node],
) -> None:
    node = make(make_node, deleteTries=0)
    broken, calls = failing_network(node)
    node.pod("hello", "storage,fabric")
    node.start()
    before = node.links()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    broken.touch()
    for _ in range(3):
        answer = node.cni("DEL", "c1", netns, "hello")
        assert (answer.code, answer.json["code"]) == (1, 117)
        assert answer.json["msg"].startswith("the fabric is away")
        assert (node.links(netns), node.links()) == (["lo"], before), "the others are gone with the first try"
        node.kill()
        node.start()
    broken.unlink()
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert len(calls.read_text().split()) == 4
    assert node.leftovers() == []


def test_a_plugin_that_never_works_lets_the_pod_go_and_what_is_left_is_deleted_later(
    make_node: Callable[..., Node],
) -> None:
    node = make(make_node, deleteTries=3, **RECONCILE)
    broken, calls = failing_network(node)
    node.pod("hello", "storage,fabric")
    node.start()
    netns = node.add_netns()
    sleeper = node.process_in(netns)
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    broken.touch()
    assert [node.cni("DEL", "c1", netns, "hello").code for _ in range(3)] == [1, 1, 0]
    node.wait_for_log("event for default/hello: NetworkNotReleased")
    assert said(node, "event for default/hello: NetworkNotReleased") == 1
    assert metric(node, "multus_deletes_given_up_total") == 1
    (record,) = (node.cni_dir / "attachments").iterdir()
    node.wait_until(lambda: metric(node, 'multus_leftover_containers{kind="inhabited"}') == 1, "it is counted")
    assert len(calls.read_text().split()) == 3, "not touched while something lives in it"
    sleeper.kill()
    sleeper.wait()
    node.remove_netns(netns)
    node.wait_until(lambda: said(node, "event for the node: OrphanNotDeleted") == 1, "the failure is told of")
    node.wait_until(lambda: metric(node, 'multus_leftover_containers{kind="orphans"}') == 1, "it is counted")
    assert record.exists()
    broken.unlink()
    # Its pause is a minute; a daemon that is started does not know of it.
    assert node.stop() == 0
    node.start()
    node.wait_until(lambda: not node.leftovers(), "the rest is deleted")
    assert set(calls.read_text().split()) == {"c1"}


@pytest.mark.weak_spot(64)
@pytest.mark.parametrize("gone", ["device", "link", "namespace"])
def test_a_device_that_is_gone_fails_no_del(make_node: Callable[..., Node], reference: Path, gone: str) -> None:
    """The kubelet tries again and again, with a new container each time."""
    node = make(make_node)
    for plugin in ("host-device", "host-local"):
        (node.bin_dir / plugin).symlink_to(reference / plugin)
    ipam = {"type": "host-local", "subnet": "10.81.2.0/24", "dataDir": str(node.networks_dir)}
    config = {"cniVersion": "0.3.1", "name": "nic", "type": "host-device", "device": "up0", "ipam": ipam}
    node.network("nic", config, "default")
    node.pod("hello", "nic")
    node.start()
    for number in range(7):
        netns, name = node.add_netns(), f"c{number}"
        if gone != "device":
            node.ip("link", "add", "up0", "type", "veth", "peer", "name", "up1")
        added = node.cni("ADD", name, netns, "hello")
        assert (added.code, b"host device" in added.stdout) == ((1, True) if gone == "device" else (0, False))
        if gone == "namespace":
            node.remove_netns(netns)
        elif gone == "link":
            node.ip("link", "del", "up1")
        deleted = node.cni("DEL", name, netns, "hello")
        assert (deleted.code, deleted.stdout, node.leftovers()) == (0, b"", [])
        node.wait_until(lambda: node.links() == ["lo"], "the device is gone with its namespace")
    assert metric(node, "multus_deletes_given_up_total") == 0


# --- what nobody deletes ---------------------------------------------------------------------------------------------


@pytest.mark.weak_spot(32)
def test_a_namespace_that_vanishes_is_an_orphan_and_others_live_on(make_node: Callable[..., Node]) -> None:
    node = make(make_node, **RECONCILE)
    node.pod("gone", "storage")
    node.pod("stays", "storage")
    node.start()
    stays = node.add_netns()
    assert node.cni("ADD", "c1", stays, "stays").code == 0
    before, held = node.links(), node.leftovers()
    gone = node.add_netns()
    assert node.cni("ADD", "c2", gone, "gone").code == 0
    node.remove_netns_and_links(gone)
    node.wait_until(lambda: node.leftovers() == held, "the record, the results and the addresses are gone")
    assert node.links() == before
    assert node.cni("CHECK", "c1", stays, "stays").code == 0
    # Counted by the loop when the thread that has deleted it is through.
    node.wait_until(lambda: metric(node, 'multus_orphan_attachments_total{outcome="success"}') == 2, "it is counted")
    time.sleep(1)
    assert node.cni("CHECK", "c1", stays, "stays").code == 0


def test_an_add_that_a_crash_cut_off_and_nobody_repeats_is_undone(make_node: Callable[..., Node]) -> None:
    node = make(make_node, **RECONCILE)
    slow = node.root / "slow"
    slow.touch()
    node.plugin("slow", f"while test -e {slow}; do sleep 0.05; done; echo '{{}}'")
    node.network("slow", {"cniVersion": "1.0.0", "name": "slow", "type": "slow"}, "default")
    node.pod("hello", "storage,slow")
    node.start()
    before = node.links()
    netns = node.add_netns()
    shim = subprocess.Popen(
        [str(multus_shim.binary())],
        env=node.environment("ADD", "c1", netns, "hello"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert shim.stdin is not None
    shim.stdin.write(node.stdin)
    shim.stdin.close()
    node.wait_until(lambda: "net1" in node.links(netns), "the first networks are attached")
    # The runtime goes with it, and takes the namespace away when it is back: the kubelet's next try gets its own.
    shim.kill()
    shim.wait(timeout=30)
    node.kill()
    slow.unlink()
    node.remove_netns_and_links(netns)
    node.start()
    node.wait_until(lambda: not node.leftovers(), "what it had attached is gone")
    assert node.links() == before


# --- pods behind our back --------------------------------------------------------------------------------------------
