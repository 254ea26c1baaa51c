"""kill -9 of the daemon while plugins and DELs run; test_power_failure.py kills it at each step of an ADD."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import multus_shim
from tests.e2e.node import Node


def is_running(pid: str) -> bool:
    """Return True if the process exists and is not a zombie (its new parent may reap it late)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
