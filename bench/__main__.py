"""Run every bench in turn, and say at the end how each did against its budget.

    python -m bench [--quick] [--record]

`--quick`: a few rounds of each, to see that they work; their figures mean nothing. `--record`: keep the figures in
bench/figures/, from which `python -m bench.page` makes the tables of docs/performance.md.

A bench that misses its budget or breaks does not keep the next from running. Exit status 1 if any did, or if none
measured anything; a bench that is skipped for what this machine lacks is no failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import figures, verdict

RECORDED = ("shim", "verbs", "chains", "peer", "burst", "memory", "growth", "asking", "density")
"""Modules of this package, programs with the options of `bench.harness`."""

BENCHES = (*RECORDED, "builtin_plugins", "start", "cluster_memory", "traffic", "scrape", "hostile", "hotplug")
"""All benches: the recorded ones, and programs with options of their own, which a quick run skips."""

STATES = {verdict.OK: "ok", verdict.MISSED: "missed", verdict.SKIPPED: "skipped"}


@dataclass(frozen=True)
class Ended:
    """Exit status of a bench (negative: the signal that ended it) and the lines of its standard output."""

    status: int
    lines: tuple[str, ...] = ()


def main(run: Callable[[str], Ended], benches: Sequence[str]) -> None:
    """Call `run` with the name of each bench, print the summary, exit."""
    states, table = [], []
    for name in benches:
        print(f"== {name}", flush=True)
        state, findings = judge(run(name))
        print(flush=True)
        states.append(state)
        for number, finding in enumerate(findings):
            table.append(f"{'' if number else name:18}{'' if number else state:10}{finding}")
    print(f"{'bench':18}{'':10}result", *table, sep="\n")
    if "missed" in states or "failed" in states:
        sys.exit("not every bench ran within its budget")
    if "ok" not in states:
        sys.exit("nothing was measured")


def judge(ended: Ended) -> tuple[str, list[str]]:
    """Ok, missed, skipped or failed; and what there is to say of it, at least one line."""
    findings = [line.removeprefix(verdict.MARK) for line in ended.lines if line.startswith(verdict.MARK)]
    if ended.status not in STATES:
        return "failed", [*findings, f"ended with status {ended.status}; its output is above"]
    if not findings:
        return "failed", [f"ended with status {ended.status} and named no result"]
    return STATES[ended.status], findings


def start(name: str, arguments: Sequence[str] = ()) -> Ended:
    """Run a bench as a process of its own; its output is passed on as it comes."""
    command = [sys.executable, "-m", f"bench.{name}", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", env=environment)
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    finally:
        # After Ctrl-C too, which the bench gets as well: it takes its node down.
        status = process.wait()
    return Ended(status, tuple(lines))


def command(options: argparse.Namespace) -> None:
    """Run the benches that the command line selects."""
    arguments = ["--quick"] if options.quick else []
    arguments += ["--record", str(figures.FOLDER)] if options.record else []
    main(
        lambda name: start(name, arguments if name in RECORDED else ()),
        RECORDED if options.quick else BENCHES,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true")
    try:
        command(parser.parse_args())
    except KeyboardInterrupt:
        sys.exit(130)
