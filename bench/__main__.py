"""Run every bench in turn, and say at the end how each did against its budget.

    python -m bench

A bench that misses its budget or breaks does not keep the next from running. Exit status 1 if any did, or if none
measured anything; a bench that is skipped for what this machine lacks is no failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from bench import verdict

BENCHES = ("add_latency", "builtin_plugins", "networks", "start", "cluster_memory")
"""Modules of this package; each is a program."""

STATES = {verdict.OK: "ok", verdict.MISSED: "missed", verdict.SKIPPED: "skipped"}


@dataclass(frozen=True)
class Ended:
    """What a bench left: its exit status (negative: the signal that ended it), and the lines of its standard output."""

    status: int
    lines: tuple[str, ...] = ()


def main(run: Callable[[str], Ended]) -> None:
    """Call `run` with the name of each bench, print the summary, exit."""
    states, table = [], []
    for name in BENCHES:
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


def start(name: str) -> Ended:
    """Run a bench as a process of its own; its output is passed on as it comes."""
    command = [sys.executable, "-m", f"bench.{name}"]
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


if __name__ == "__main__":
    try:
        main(start)
    except KeyboardInterrupt:
        sys.exit(130)
