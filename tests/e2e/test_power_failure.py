"""A daemon that dies at each step of its work with files, of an ADD and of a DEL, with and without the power.

After kill -9 nothing is lost. After a power failure what had not been fsynced is: each time in two ways, all of it, or
half of what each file was given (`tests.power`; all other ways are for `tests/unit/plugins/test_power_failure.py`).
The kernel's state and the addresses stay here, other than after a power failure: so there is everything to be undone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import multus_shim
from multus_daemon.runtime import fs
from tests import power
from tests.e2e import dying_daemon
from tests.e2e.dying_daemon import Journal, Order, Start
from tests.e2e.node import Node
from tests.programs import needed
from tests.waiting import until

POD = "hello"
Loss = Callable[[power.Disk], power.Files]


class Daemons:
    """Daemons of one node, one after the other."""

    def __init__(self, node: Node, *, counts_addresses: bool, syncs: bool = True) -> None:
        """`counts_addresses`: what happens in host-local's directories are steps too."""
        self.node = node
        # The built-in host-local writes below chrootDir.
        self._elsewhere = [node.below_chroot(node.networks_dir)] if counts_addresses else []
        self._syncs = syncs
        self._order_file = node.root / "order"
        self._journal = node.root / "journal"
        self._orders = itertools.count(1)
        self._pid = 0
        self.order()
        node.config.write_text(json.dumps(node.settings))
        node.cni_dir.mkdir(mode=0o700)
        self.log = node.log.open("ab")
        # Its order and its journal are in the node's directory.
        contained = node.container.command(sys.executable, dying_daemon.__file__, writable=[node.root])
        self._parent = subprocess.Popen(
            [needed("ip"), "netns", "exec", Path(node.host).name, *contained],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )

    def close(self) -> None:
        """End the daemon and what starts them."""
        self.kill()
        self._parent.communicate(timeout=30)
        self.log.close()

    def order(self, *, dies_at: int = 0, settles: bool = False) -> None:
        """Tell the daemon what to do from now on."""
        path = self._order_file.with_suffix(".new")
        path.write_bytes(msgspec.json.encode(Order(next(self._orders), dies_at, settles)))
        path.rename(self._order_file)

    def _ask(self, line: bytes) -> int:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(line + b"\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def start(self) -> None:
        """Start one, without an order, and wait until it is ready."""
        self.order()
        start = Start(
            arguments=["run", "--config", str(self.node.config), "--standalone", str(self.node.manifests)],
            root=str(self.node.cni_dir),
            elsewhere=self._elsewhere,
            order=str(self._order_file),
            journal=str(self._journal),
            syncs=self._syncs,
        )
        self._pid = self._ask(msgspec.json.encode(start))
        until(lambda: self.node.get("/readyz?gates")[0] == 200, 20, what="the daemon does not get ready")

    def kill(self) -> None:
        """SIGKILL, where it has not died already."""
        if self._pid:
            os.kill(self._pid, 9)
            self._pid = 0
            assert self._ask(b"wait") == -9

    def lose(self, loss: Loss) -> None:
        """The power fails. (The daemon has been killed.)"""
        disk = msgspec.json.decode(self._journal.read_bytes(), type=Journal).disk
        assert disk.whole() == power.content(self.node.cni_dir), "the wrapper has not seen everything"
        # The machine has started again: what temporary files are called tells.
        now, before = f"-{fs.boot()}-", f"-{'0' * 8}-"
        power.put(self.node.cni_dir, {name.replace(now, before): data for name, data in loss(disk).items()})

    def survives(self, verb: str, container_id: str, netns: str) -> bytes | None:
        """Send the verb; what the runtime gets where the daemon lives to the end of it, None where it dies."""
        shim = subprocess.Popen(
            [str(multus_shim.binary())],
            env=self.node.environment(verb, container_id, netns, POD),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert shim.stdin is not None
        assert shim.stdout is not None
        with shim.stdout:
            shim.stdin.write(self.node.stdin)
            shim.stdin.close()
            assert _ended(shim.pid, self._pid, seconds=30), "neither the verb nor the daemon comes to an end"
            # One that lives would ask the next daemon.
            shim.kill()
            answer = shim.stdout.read()
        if shim.wait(timeout=30) == 0:
            # The steps of what comes next are not of this verb.
            self.order()
            return answer
        assert _ended(self._pid, seconds=5), answer
        self.kill()
        return None


def _ended(*pids: int, seconds: float) -> bool:
    """Wait for one of the processes to end. Return False after `seconds`."""
    with contextlib.ExitStack() as stack:
        descriptors = [os.pidfd_open(pid) for pid in pids]
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        return bool(select.select(descriptors, [], [], seconds)[0])


@pytest.fixture
def make_daemons(make_node: Callable[..., Node]) -> Iterator[Callable[..., Daemons]]:
    with contextlib.ExitStack() as stack:

        def make(**arguments: Any) -> Daemons:
            node = make_node()
            node.ptp("cluster", "10.81.0.0/24")
            node.ptp("storage", "10.81.1.0/24", namespace="default")
            node.pod(POD, "storage")
            daemons = Daemons(node, **arguments)
            stack.callback(daemons.close)
            return daemons

        yield make


def check_nothing_left(node: Node, netns: str, before: tuple[list[str], list[str]]) -> None:
    """The runtime deletes what it knows of, and there is what was there before."""
    answer = node.cni("DEL", "c1", netns, POD)
    assert answer.code == 0, answer.stdout
    assert node.links(netns) == ["lo"], "left in the pod"
    assert (node.links(), node.leftovers()) == before, "left on the node"


def there_is(node: Node) -> tuple[list[str], list[str]]:
    return node.links(), node.leftovers()


@pytest.mark.weak_spot(28)
def test_killed_at_each_step_of_an_add_and_of_its_del(make_daemons: Callable[..., Daemons]) -> None:
    """And a pod whose ADD has been answered is known all the time, as it was answered."""
    daemons = make_daemons(counts_addresses=True)
    node = daemons.node
    daemons.start()
    other, netns = node.add_netns(), node.add_netns()
    answered = node.cni("ADD", "other", other, POD)
    assert answered.code == 0, answered.stdout
    before = there_is(node)
    steps = {}
    for verb in ("ADD", "DEL"):
        for step in itertools.count(1):
            if verb == "DEL":
                assert node.cni("ADD", "c1", netns, POD).code == 0
            daemons.order(dies_at=step)
            answer = daemons.survives(verb, "c1", netns)
            if answer is None:
                daemons.start()
            again = node.cni("ADD", "other", other, POD)
            assert (again.code, again.json) == (0, answered.json), f"{verb}, step {step}"
            assert node.cni("CHECK", "other", other, POD).code == 0, f"{verb}, step {step}"
            if answer is not None and verb == "ADD":
                check_known(daemons, netns, answer)
            check_nothing_left(node, netns, before)
            if answer is not None:
                steps[verb] = step - 1
                break
    # Two addresses, two results, a record: what has fewer steps is not seen.
    assert steps["ADD"] >= 15
    assert steps["DEL"] >= 5


def check_known(daemons: Daemons, netns: str, answer: bytes) -> None:
    """Killed right after the answer."""
    daemons.kill()
    daemons.start()
    again = daemons.node.cni("ADD", "c1", netns, POD)
    assert (again.code, again.json) == (0, json.loads(answer))
    assert daemons.node.cni("CHECK", "c1", netns, POD).code == 0


def fail_at_each_step(daemons: Daemons, verb: str, loss: Loss) -> int:
    """How many steps the verb has; after each of them the power has failed, and after the last, and a DEL was sent."""
    node = daemons.node
    daemons.start()
    netns = node.add_netns()
    before = there_is(node)
    for step in itertools.count(1):
        if verb == "DEL":
            daemons.order(settles=True)
            assert node.cni("ADD", "c1", netns, POD).code == 0
        daemons.order(dies_at=step, settles=verb == "ADD")
        answer = daemons.survives(verb, "c1", netns)
        daemons.kill()
        daemons.lose(loss)
        daemons.start()
        check_nothing_left(node, netns, before)
        if answer is not None:
            return step - 1
    raise AssertionError


@pytest.mark.parametrize("loss", [power.Disk.least, power.Disk.torn])
def test_a_power_failure_at_each_step_of_an_add(make_daemons: Callable[..., Daemons], loss: Loss) -> None:
    assert fail_at_each_step(make_daemons(counts_addresses=False), "ADD", loss) >= 10


@pytest.mark.parametrize("loss", [power.Disk.least, power.Disk.torn])
def test_a_power_failure_at_each_step_of_a_del(make_daemons: Callable[..., Daemons], loss: Loss) -> None:
    assert fail_at_each_step(make_daemons(counts_addresses=False), "DEL", loss) >= 3


def test_a_disk_that_does_nothing_for_fsync_is_found_out(make_daemons: Callable[..., Daemons]) -> None:
    """The test above can fail."""
    with pytest.raises(AssertionError, match="left (in the pod|on the node)"):
        fail_at_each_step(make_daemons(counts_addresses=False, syncs=False), "ADD", power.Disk.least)
