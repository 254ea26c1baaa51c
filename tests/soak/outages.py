"""Run churn in a cluster whose API server comes and goes, with a misbehaving plugin: nothing may be left.

    python -m tests.soak.outages [--pairs 2400] [--at-once 16] [--modes prefer fallback off]

A real kube-apiserver is frozen, killed and started, or all connections to it are cut, at random; the daemon is killed
every few seconds; a chained plugin fails, prints garbage or 100 MB, crashes, hangs, or leaves a child that keeps its
stdout open, in 40 of 100 calls (tests/soak/plugin.py). Exit status 1, with a line for each thing that is left or wrong.
As root; `make e2e` builds the programs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError
from tests.e2e.conftest import REFERENCE
from tests.e2e.node import Answer, Node
from tests.e2e.test_kubernetes import Cluster
from tests.soak.churn import MODES, Outcome, cut_off, end_in_good_order, left_by_reference, report
from tests.soak.disturbance import Disturbance
from tests.soak.killer import Killer
from tests.soak.load import Kind, Load, a_shim, varied
from tests.soak.remains import Remains

SETTINGS: dict[str, Any] = {
    "builtinPlugins": "prefer",
    "reconcileSeconds": 5,
    "delegateTimeoutSeconds": 2,
    # Else the runtime is told after five that a DEL is done; what is left then is deleted minutes later.
    "deleteTries": 0,
    # `cut_off` needs the lines of requests that begin.
    "logLevel": "debug",
}
_MISBEHAVIOUR = Path(__file__).with_name("plugin.py")
_WAYS = ("fail", "garbage", "crash", "flood", "hang", "hold")


class Outages(Disturbance):
    """In its block the API server comes and goes."""

    def __init__(self, cluster: Cluster, *, longest: float = 3.0) -> None:
        """`longest`: for how many seconds it is away, at most."""
        super().__init__("outages", (2, 6))
        self._server = cluster.server
        self._longest = longest

    def strike(self) -> None:
        random.choice((self._freeze, self._kill, self._cut))(random.uniform(0.2, self._longest))

    def _freeze(self, seconds: float) -> None:
        self._server.pause()
        time.sleep(seconds)
        self._server.resume()

    def _kill(self, seconds: float) -> None:
        self._server.stop()
        time.sleep(seconds)
        self._server.start()

    def _cut(self, seconds: float) -> None:
        for relay in self._server._relays:
            relay.stop()
        time.sleep(seconds)
        for relay in self._server._relays:
            relay.start()


def misbehaving(node: Node, cluster: Cluster) -> Kind:
    """A network whose bridge is there before its plugin misbehaves, and the kind of pod that uses it."""
    shutil.copy(_MISBEHAVIOUR, node.bin_dir / "moody")
    (node.bin_dir / "moody").chmod(0o755)
    ipam = {"type": "host-local", "subnet": "10.94.0.0/16", "dataDir": str(node.networks_dir)}
    bridge = {"type": "ref-bridge", "bridge": "moody0", "ipam": ipam}
    moody = {"type": "moody", "chance": {"ADD": 0.4, "DEL": 0.4}, "ways": _WAYS}
    plugins = {"cniVersion": "1.0.0", "name": "moody", "plugins": [bridge, moody]}
    cluster.definition("moody", json.dumps(plugins))
    return Kind("moody", "lan, moody", frozenset({"eth0", "net1", "net2"}))


def run(cluster: Cluster, pairs: int, at_once: int = 16) -> Outcome:
    """The run, on a cluster that is prepared and whose node has SETTINGS and is not started."""
    node = cluster.node

    def call(verb: str, container_id: str, netns: str, pod: str) -> Answer:
        answer: Answer = cluster.cni(verb, pod, netns, container_id, shim=a_shim(), timeout=300)
        return answer

    # Twice: a quarter of the pods.
    moody = misbehaving(node, cluster)
    mode = str(node.settings["builtinPlugins"])
    kinds = varied(node, REFERENCE, lambda name, config: cluster.definition(name, json.dumps(config)), mode=mode)
    load = Load(node, [*kinds, moody, replace(moody, name="moodier")], at_once, cluster.pod, call)
    node.start(timeout=60)
    load.warm_up()
    remains = Remains(node)
    with (
        Outages(cluster) as outages,
        # In the outages' time it need not get ready. A plugin that hangs for ever would without it, too.
        Killer(node, (2, 6), ready=False, with_plugins=1) as killer,
    ):
        seconds = load.run(pairs, lambda: killer.has_failed)
    left = remains.settled(load.kept)
    waited = remains.waited
    load.drop_kept()
    theirs = left_by_reference(left, load.disturbed | cut_off(node.log.read_text())) if mode == "off" else []
    text = (
        f"{seconds:.0f} s, API server away {outages.strikes} times, daemon killed {killer.strikes} times, "
        f"load {os.getloadavg()[0]:.1f}; settled {waited:.1f} s after the last fault; {load.summary()}"
    )
    if theirs:
        text += f"; {len(theirs)} lines of rules are what the reference leaves"
    return Outcome(text, [*load.wrong, *(line for line in left if line not in theirs)])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.outages", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2400)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--keep-logs", type=Path, help="copy the daemon's logs to this directory")
    given = parser.parse_args()
    end_in_good_order()
    status = 0
    for mode in given.modes:
        try:
            server = ApiServer()
        except (ToolError, OpensslError) as error:
            print(f"outages: not run: {error}")
            return 1
        with server, Node(settings=SETTINGS | {"builtinPlugins": mode}, standalone=False) as node:
            server.create_namespace("soak")
            cluster = Cluster(server, node, "soak")
            cluster.prepare()
            with server.reachable_in(node.host):
                outcome = run(cluster, given.pairs // len(given.modes), given.at_once)
                node.kill()
            status |= report(f"outages, builtinPlugins {mode}", outcome)
            if given.keep_logs:
                shutil.copy(node.log, given.keep_logs / f"outages-{mode}.log")
    return status


if __name__ == "__main__":
    sys.exit(main())
