"""Measure ADD and DEL of a built-in plugin, beside the reference binaries started by the same daemon code.

    python -m bench.builtin_plugins [--rounds 200] [--plugin ptp]

One network with host-local addresses in one pod. Both sides go through the dispatcher that the daemon uses, in turns
and in an order that changes every round: `prefer` runs the built-ins, `off` starts the binaries, which start their
IPAM plugin. The reference plugins come from CNI_REFERENCE_DIR, or Debian's containernetworking-plugins. Needs root and
iproute2; runs in a network namespace of its own. Exit status 3 where the median of the quotients of each round's two
ADDs is over `--budget`. CPU time, that of the binaries included, tells more than time where the machine is busy.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bench import verdict
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.process import ProcessRunner, ToolRunner
from multus_daemon.plugins.select import Mode, Plugins
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import Invocation

REFERENCE = Path(os.environ.get("CNI_REFERENCE_DIR", "/usr/lib/cni"))
MODES: dict[str, Mode] = {"built-in": "prefer", "binaries": "off"}
WARM_UP = 10
"""Rounds that do not count."""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--plugin", choices=("ptp", "bridge"), default="ptp")
    parser.add_argument("--budget", type=float, default=0.5, help="of the time that the binaries take")
    parser.add_argument("--in-place", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    verdict.require_node()
    if not all((REFERENCE / name).exists() for name in (options.plugin, "host-local")):
        verdict.skip(
            f"needs the reference plugins, but {options.plugin} and host-local are not both in {REFERENCE}: "
            "install containernetworking-plugins, or set CNI_REFERENCE_DIR"
        )
    if not options.in_place:
        # The namespace must be there before the first thread is.
        again = [sys.executable, "-m", "bench.builtin_plugins", *sys.argv[1:], "--in-place"]
        os.execvp("unshare", ["unshare", "--net", *again])
    load = os.getloadavg()
    times = _measure(options.plugin, options.rounds)
    print(f"{options.plugin} + host-local, {options.rounds} rounds, milliseconds, {os.cpu_count()} CPUs", end=", ")
    print(f"load average before {load[0]:.1f}, after {os.getloadavg()[0]:.1f}")
    print(f"{'':24}{'median':>8}{'p95':>8}{'max':>8}")
    for name, values in times.items():
        cuts = statistics.quantiles(values, n=20)
        print(f"{name:24}{statistics.median(values):8.2f}{cuts[18]:8.2f}{max(values):8.2f}")
    measured = ("ADD", "ADD CPU", "DEL", "DEL CPU")
    quotients = {what: _quotient(times[f"{what} built-in"], times[f"{what} binaries"]) for what in measured}
    for what, quotient in quotients.items():
        print(f"{what}: {quotient:.2f} x the binaries, the median of the rounds")
    verdict.end(verdict.Result("ADD, the binaries' time being 1", quotients["ADD"], options.budget, "x"))


def _quotient(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def _measure(plugin: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, by verb and side."""
    name = f"mltbench{os.getpid()}"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with tempfile.TemporaryDirectory() as directory:
            return asyncio.run(_beside_loop(plugin, rounds, f"/run/netns/{name}", directory))
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


async def _beside_loop(plugin: str, rounds: int, netns: str, directory: str) -> dict[str, list[float]]:
    """The rounds in a thread, the processes on the event loop, as in the daemon."""
    runners = {side: _runner(mode) for side, mode in MODES.items()}
    return await portal.run(Deadline(), functools.partial(_rounds, runners, plugin, rounds, netns, directory))


def _rounds(
    runners: Mapping[str, Plugins], plugin: str, rounds: int, netns: str, directory: str
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for number in range(rounds + WARM_UP):
        sides = list(MODES)[:: 1 if number % 2 else -1]
        for side in sides:
            ipam = {"type": "host-local", "subnet": "10.83.0.0/16", "dataDir": f"{directory}/{side}"}
            config = {"cniVersion": "1.0.0", "name": "bench", "type": plugin, "ipam": ipam}
            served_by: Mapping[str, str] = {}
            for verb in ("ADD", "DEL"):
                call = Invocation(verb, f"c{number}", netns, "eth0", "", str(REFERENCE), config)
                start, cpu = time.perf_counter(), _cpu_seconds()
                if verb == "ADD":
                    programs = runners[side].programs([(plugin, call)])
                    served_by = runners[side].servers(plugin, call, programs)
                with PodNetns(call.netns) as pod:
                    call = replace(call, served_by=served_by)
                    runners[side].recorded(plugin, call).run(call, pod)
                seconds = {verb: time.perf_counter() - start, f"{verb} CPU": _cpu_seconds() - cpu}
                if number >= WARM_UP:
                    for what, value in seconds.items():
                        times.setdefault(f"{what} {side}", []).append(value * 1000)
    return times


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _runner(mode: Mode) -> Plugins:
    return Plugins(ProcessRunner([str(REFERENCE)]), mode, tools=ToolRunner())


if __name__ == "__main__":
    main()
