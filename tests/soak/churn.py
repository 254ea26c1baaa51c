"""Pods come and go, 16 at a time, while the daemon is struck every second or so: nothing may be left of them.

    python -m tests.soak.churn [--pairs 2400] [--at-once 16] [--modes prefer fallback off] [--disks well sick]

A third of the pairs with the common plugins built in (`builtinPlugins: prefer`), a third with the reference's `ptp` and
`host-local` and the rest built in (`fallback`), a third with the reference's only (`off`). Half of each on a disk that
is well, half on one where 5 of 100 operations of the daemon fail with EIO until the pods are gone; on both 10 of 100
DELs of plugins fail at a random place (tests/soak/eio.py). No address may be in two namespaces (tests/soak/census.py).

The daemon is killed, stopped for a while, ended in good order, relieved by one that is there before; one shim of twenty
is killed. Exit status 1, with a line for each thing that is left or wrong. As root; the reference plugins in
CNI_REFERENCE_DIR.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.conftest import REFERENCE
from tests.e2e.node import Node
from tests.soak import eio
from tests.soak.census import Census
from tests.soak.killer import WAYS, Killer
from tests.soak.load import Load, varied
from tests.soak.remains import Remains

MODES = ("prefer", "fallback", "off")
"""Lists the values of `builtinPlugins`."""
DISKS = ("well", "sick")
EIO_SHARE = 0.05
"""Gives the share of operations on a sick disk that fail."""
DELS_SHARE = 0.1
"""Gives the share of DELs of plugins that fail at a random place."""
SHIMS_KILLED_ONE_IN = 20
SHOWN = 50
"""Lines of what is wrong."""


def settings(mode: str) -> dict[str, Any]:
    """The daemon's."""
    # `cut_off` needs the lines of requests that begin.
    return {"builtinPlugins": mode, "reconcileSeconds": 2, "logLevel": "debug", "keep": "repair"}


@dataclass
class Outcome:
    """Holds what a run has shown."""

    summary: str
    wrong: list[str]


def run(
    node: Node, pairs: int, at_once: int = 16, pause: tuple[float, float] = (0.5, 1.5), *, disk: str = "well"
) -> Outcome:
    """The run, on a node that has `settings` and is not started; `disk`: of DISKS."""
    mode = str(node.settings["builtinPlugins"])
    kinds = varied(node, REFERENCE, lambda name, config: node.network(name, config, _namespace(name)), mode=mode)
    load = Load(node, kinds, at_once, shims_killed_one_in=SHIMS_KILLED_ONE_IN)
    sick = node.root / "sick"
    node.wrapper = eio.wrapper(EIO_SHARE if disk == "sick" else 0, DELS_SHARE, sick, (node.cni_dir, node.networks_dir))
    node.start()
    load.warm_up()
    remains = Remains(node)
    sick.touch()
    with Census(node) as census, Killer(node, pause, ways=WAYS, starts=20) as killer:
        seconds = load.run(pairs, lambda: killer.has_failed)
    sick.unlink()
    time.sleep(eio.LOOKS)
    _age_what_shims_left(node)

    def backups(left: list[str]) -> list[str]:
        return [line for line in left if disk == "sick" and _stays_on_sick_disk(line)]

    def theirs(left: list[str]) -> list[str]:
        disturbed = load.disturbed | cut_off(node.log.read_text()) if left and mode == "off" else set()
        return left_by_reference(left, disturbed)

    def staying(left: list[str]) -> list[str]:
        return [*backups(left), *theirs(left)]

    left = remains.settled(load.kept, staying=staying)
    waited = remains.waited
    load.drop_kept()
    if disk == "sick" and set(left).difference(staying(left)):
        # That a DEL was given up could not be written down, and its daemon has ended: that the namespace goes tells.
        left = remains.settled(staying=staying)
    struck = ", ".join(f"{way} {number}" for way, number in sorted(killer.counts.items()))
    text = (
        f"{seconds:.0f} s, daemon: {struck}, load {os.getloadavg()[0]:.1f}; {census.summary}; "
        f"settled {waited:.1f} s after the last fault; {load.summary()}"
    )
    if number := len(backups(left)):
        text += f"; {number} backups of tuning stayed with their DEL"
    if number := len(theirs(left)):
        text += f"; {number} lines of rules and backups are what the reference leaves"
    return Outcome(text, [*census.twice, *load.wrong, *sorted(set(left).difference(staying(left)))])


def _age_what_shims_left(node: Node) -> None:
    """One that was killed as it wrote into the spool leaves a temporary file, for an hour."""
    for path in (node.cni_dir / "spool").glob(".*.tmp"):
        os.utime(path, (0, 0))


def _stays_on_sick_disk(line: str) -> bool:
    """Return whether the file may stay: DEL succeeds without removing a backup of tuning.

    The reference does the same. The backups are in memory unless a dataDir is set.
    """
    return line.startswith("file networks/tuning/") and "/." not in line


def cut_off(log: str) -> set[str]:
    """The containers of which a call was begun and not ended: its daemon was killed, and the shim asked the next."""
    calls = Counter(re.findall(r"CNI (?:ADD|DEL) started .*container=(\w+)", log))
    calls.subtract(re.findall(r" verb=(?:ADD|DEL) container=(\w+) .* outcome=", log))
    return {container for container, number in calls.items() if number > 0}


def left_by_reference(left: list[str], disturbed: set[str]) -> list[str]:
    """Rules, and backups of tuning, if all are of containers that were disturbed.

    A binary that is killed in its ADD or DEL asks the interface for the addresses next time, which may have gone. What
    the daemon removes then after a binary's DEL, it does not with `off`. The reference tuning leaves its backup where
    the namespace has gone before its DEL.
    """
    rules = [line for line in left if line.startswith("rule ")]
    owners = {owner[1] for line in rules if (owner := re.search(r'id: \\?"(\w+)', line))}
    backups = {line: found[1] for line in left if (found := re.match(r"file networks/tuning/(\w+)_\w+\.json$", line))}
    theirs = rules if owners and owners <= disturbed else []
    return theirs + [line for line, owner in backups.items() if owner in disturbed]


def _namespace(name: str) -> str:
    return "kube-system" if name == "cluster" else "default"


def end_in_good_order() -> None:
    """Let SIGTERM, as from `timeout`, take the node apart too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def report(name: str, outcome: Outcome) -> int:
    """Print the outcome; the exit status."""
    print(f"{name}: {outcome.summary}")
    for line in outcome.wrong[:SHOWN]:
        print(f"  WRONG {line}")
    print(f"{name}: {len(outcome.wrong)} wrong or left")
    return 1 if outcome.wrong else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.churn", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2400)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--disks", nargs="+", choices=DISKS, default=DISKS)
    parser.add_argument("--keep-logs", type=Path, help="copy the daemon's logs to this directory")
    given = parser.parse_args()
    end_in_good_order()
    status = 0
    runs = list(itertools.product(given.modes, given.disks))
    for mode, disk in runs:
        with Node(settings=settings(mode)) as node:
            outcome = run(node, given.pairs // len(runs), given.at_once, disk=disk)
            status |= report(f"churn, builtinPlugins {mode}, disk {disk}", outcome)
            if given.keep_logs:
                shutil.copy(node.log, given.keep_logs / f"churn-{mode}-{disk}.log")
    return status


if __name__ == "__main__":
    sys.exit(main())
