"""Pods come and go, 16 at a time, while the daemon is killed every second or so: nothing may be left of them.

    python -m tests.soak.churn [--pairs 2000] [--at-once 16] [--modes prefer fallback]

Half of the pairs with the common plugins built in (`builtinPlugins: prefer`), half with the reference binaries.

Exit status 1, with a line for each thing that is left or wrong. As root; the reference plugins in CNI_REFERENCE_DIR.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.conftest import REFERENCE
from tests.e2e.node import Node
from tests.soak.killer import Killer
from tests.soak.load import Load, mixed
from tests.soak.remains import Remains

MODES = ("prefer", "fallback")
"""Of `builtinPlugins`."""
SHOWN = 50
"""Lines of what is wrong."""


def settings(mode: str) -> dict[str, Any]:
    """The daemon's."""
    return {"builtinPlugins": mode, "reconcileSeconds": 5}


@dataclass
class Outcome:
    """What a run has shown."""

    summary: str
    wrong: list[str]


def run(node: Node, pairs: int, at_once: int = 16, pause: tuple[float, float] = (0.5, 1.5)) -> Outcome:
    """The run, on a node that has `settings` and is not started."""
    kinds = mixed(node, REFERENCE, lambda name, config: node.network(name, config, _namespace(name)))
    load = Load(node, kinds, at_once)
    node.start()
    load.warm_up()
    remains = Remains(node)
    with Killer(node, pause) as killer:
        seconds = load.run(pairs, lambda: killer.has_failed)
    left = remains.settled(load.kept)
    load.drop_kept()
    text = f"{seconds:.0f} s, daemon killed {killer.strikes} times, load {os.getloadavg()[0]:.1f}; {load.summary()}"
    return Outcome(text, [*load.wrong, *left])


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
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--keep-logs", type=Path, help="copy the daemon's logs to this directory")
    given = parser.parse_args()
    end_in_good_order()
    status = 0
    for mode in given.modes:
        with Node(settings=settings(mode)) as node:
            status |= report(f"churn, builtinPlugins {mode}", run(node, given.pairs // len(given.modes), given.at_once))
            if given.keep_logs:
                shutil.copy(node.log, given.keep_logs / f"churn-{mode}.log")
    return status


if __name__ == "__main__":
    sys.exit(main())
