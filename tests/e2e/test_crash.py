"""kill -9 of the daemon at any point of an ADD, a restart, a DEL: nothing is left."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest

import multus_shim
from tests.e2e.node import Node
from tests.programs import needed

ROUNDS = 40


def is_running(pid: str) -> bool:
    """Return True if the process exists and is not a zombie (its new parent may reap it late)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.weak_spot(28)
def test_killed_at_any_point_of_an_add_then_del_leaves_nothing(node: Node) -> None:
    node.ptp("storage", "10.81.1.0/24", namespace="default")
    node.pod("hello", "storage")
    node.start()
    before = node.links()
    netns = node.add_netns()
    took = []
    for number in range(5):
        took.append(node.cni("ADD", f"warm{number}", netns, "hello").seconds)
        assert node.cni("DEL", f"warm{number}", netns, "hello").code == 0
    whole = statistics.median(took)

    unfinished = 0
    for number in range(ROUNDS):
        container_id = f"c{number}"
        environment = node.environment("ADD", container_id, netns, "hello")
        shim = subprocess.Popen(
            [str(multus_shim.binary())], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert shim.stdin is not None
        shim.stdin.write(node.stdin)
        shim.stdin.close()
        # From right after the start to a little past the end, evenly.
        time.sleep(whole * 1.2 * number / ROUNDS)
        node.kill()
        # A shim that lives asks the next daemon again, and the ADD would be whole.
        shim.kill()
        assert shim.stdout is not None
        shim.stdout.read()
        shim.stdout.close()
        unfinished += shim.wait(timeout=30) != 0
        node.start()
        assert node.cni("DEL", container_id, netns, "hello").code == 0
        assert node.links(netns) == ["lo"], f"round {number}"
        assert node.links() == before, f"round {number}"
        assert node.leftovers() == [], f"round {number}"
    assert unfinished >= ROUNDS // 4, "the daemon was hardly ever killed in the middle: the sweep shows nothing"


def test_plugins_of_a_daemon_that_was_killed_end_before_the_next_one_serves(node: Node) -> None:
    """Else they would go on to attach a pod after its DEL."""
    late = node.root / "late"
    detached, running = node.root / "detached", node.root / "running"
    background = f"setsid sh -c 'echo $$ > {detached}.new; mv {detached}.new {detached}; exec sleep 60'"
    foreground = f"echo $$ > {running}.new; mv {running}.new {running}; sleep 60; echo $CNI_COMMAND >> {late}"
    node.plugin("slow", f"{background} </dev/null >/dev/null 2>&1 & {foreground}")
    node.network("slow", {"cniVersion": "1.0.0", "name": "slow", "type": "slow"}, "default")
    node.pod("hello", "slow")
    node.start()
    environment = node.environment("ADD", "c1", netns := node.add_netns(), "hello")
    shim = subprocess.Popen([str(multus_shim.binary())], env=environment, stdin=subprocess.PIPE)
    assert shim.stdin is not None
    shim.stdin.write(node.stdin)
    shim.stdin.close()
    node.wait_until(lambda: detached.exists() and running.exists(), "the plugin runs")
    node.kill()
    shim.kill()
    shim.wait(timeout=20)
    try:
        node.start()
        assert not is_running(running.read_text().strip())
        node.plugin("slow", "echo $CNI_COMMAND")
        assert node.cni("DEL", "c1", netns, "hello").code == 0
        assert not late.exists()
    finally:
        # Has nothing to do with the daemon any more.
        os.kill(int(detached.read_text()), signal.SIGKILL)


def test_killed_at_any_point_of_dels_the_shims_ask_the_successor(node: Node) -> None:
    """No shim falls back to the spool, because the runtime would then see success too early."""
    node.pod("hello")
    node.start()
    before = node.links()
    spaces = [node.add_netns() for _ in range(4)]
    for number in range(10):
        containers = [f"c{number}-{index}" for index in range(len(spaces))]
        for container_id, netns in zip(containers, spaces, strict=True):
            assert node.cni("ADD", container_id, netns, "hello").code == 0
        shims = []
        for container_id, netns in zip(containers, spaces, strict=True):
            environment = node.environment("DEL", container_id, netns, "hello")
            shim = subprocess.Popen(
                [str(multus_shim.binary())], env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert shim.stdin is not None
            shim.stdin.write(node.stdin)
            shim.stdin.close()
            shims.append(shim)
        time.sleep(0.004 * number)
        node.kill()
        node.start()
        for shim in shims:
            assert shim.stderr is not None
            with shim.stderr as remarks:
                assert (shim.wait(timeout=30), remarks.read()) == (0, b""), f"round {number}"
        assert [node.links(netns) for netns in spaces] == [["lo"]] * len(spaces), f"round {number}"
        assert node.links() == before, f"round {number}"
        assert node.leftovers() == [], f"round {number}"


@pytest.mark.parametrize("plugin", ["bridge", "ptp"])
def test_rules_of_an_interface_that_a_killed_plugin_has_removed(node: Node, reference: Path, plugin: str) -> None:
    """A kill of the daemon's container ends its plugins too: the reference ones between interface and iptables."""
    node.settings["builtinPlugins"] = "fallback"
    for name in (plugin, "host-local"):
        (node.bin_dir / name).symlink_to(reference / name)
    node.ptp("storage", "10.81.1.0/24", namespace="default", type=plugin, ipMasq=True)
    node.pod("hello", "storage")
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    assert rules(node)
    node.ip("link", "delete", "net1", netns=netns)
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert rules(node) == []
    assert node.leftovers() == []


def rules(node: Node) -> list[str]:
    """Rules and chains of masquerading, on the node."""
    command = [needed("ip"), "netns", "exec", Path(node.host).name, "iptables-save", "-t", "nat"]
    saved = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line for line in saved.splitlines() if "CNI-" in line]


def test_an_add_after_a_crash_starts_afresh(node: Node) -> None:
    """The runtime may try the ADD of a container again whose first ADD the crash cut off."""
    node.pod("hello")
    node.start()
    netns = node.add_netns()
    assert node.cni("ADD", "c1", netns, "hello").code == 0
    (record,) = (node.cni_dir / "attachments").iterdir()
    node.ip("link", "delete", "eth0", netns=netns)
    node.kill()
    node.start()
    again = node.cni("ADD", "c1", netns, "hello")
    assert again.code == 0, again.stdout
    assert "eth0" in node.links(netns)
    assert node.cni("DEL", "c1", netns, "hello").code == 0
    assert not record.exists()
    assert node.leftovers() == []
