"""Put one fault at a time into a copy of the product, and see which test notices it.

    python -m tests.faults                              100 places drawn by a fixed seed, with the unit tier
    python -m tests.faults --tiers integration e2e --only 3 17
    python -m tests.faults --list                       print the places and run nothing

A fault is a small mistake: a comparison that is off by one, a forgotten condition, call, lock or raise, a deadline of a
hundred times the length. Each is put into a clone of HEAD. Of the tiers unit and integration only the test files run
that call the function with the fault, or the whole tier if none does; a run without a fault, with `callers` as a plugin
of pytest, finds them. A fault is noticed
where a test fails, and fails again. Places keep their order when other code changes.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Final

from tests.conftest import TIERS
from tests.faults import callers
from tests.faults.places import ROOT, Fault, drawn
from tests.programs import needed

RUN_SECONDS: Final = 3600
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Copy:
    """A clone of HEAD, in which the tests run."""

    def __init__(self, folder: Path, failing: Sequence[str] = (), calls: Mapping[str, list[str]] | None = None) -> None:
        subprocess.run([needed("git"), "clone", "--quiet", "--shared", ROOT, folder], check=True)
        self._folder, self._calls = folder, calls or {}
        self._failing = list(failing)

    def look(self, tiers: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
        """Run everything without a fault: the tests that fail anyway, and the test files by function that they call."""
        path = self._folder / "calls.json"
        failing: list[str] = []
        calls: dict[str, list[str]] = {}
        for tier in tiers:
            plugin = [] if tier == "e2e" else ["-p", callers.__name__]
            environ = {callers.CALLS_FILE: str(path)}
            failing += _FAILED.findall(self._pytest(tier, [*plugin, *self._whole(tier)], environ)[1])
            if plugin:
                calls |= {f"{tier} {name}": files for name, files in json.loads(path.read_text()).items()}
        return failing, calls

    def noticed(self, fault: Fault, tiers: Sequence[str]) -> str:
        """Return the test that fails with the fault, and fails again; empty where none does."""
        path = self._folder / fault.path
        source = path.read_bytes()
        path.write_bytes(fault.mutated(source))
        try:
            return next(filter(None, (self._by(tier, self._tests(tier, fault)) for tier in tiers)), "")
        finally:
            path.write_bytes(source)

    def _tests(self, tier: str, fault: Fault) -> list[str]:
        """Select the tests that can fail: the files that call the function, or one of the module, in their process."""
        key = f"{tier} {fault.path}:"
        if fault.function:
            found = self._calls.get(f"{key}{fault.function}", [])
        else:
            found = sorted({file for name, files in self._calls.items() if name.startswith(key) for file in files})
        return found if found or tier == "unit" else self._whole(tier)

    def _by(self, tier: str, tests: list[str]) -> str:
        left_out = list(self._failing)
        while tests:
            status, output = self._pytest(tier, [*tests, "-x", *(f"--deselect={test}" for test in left_out)])
            failed = _FAILED.findall(output)
            if status in (0, 5):
                break
            if not failed or self._pytest(tier, failed[:1])[0]:
                return failed[0] if failed else output.strip().rpartition("\n")[2][:100]
            # It failed by chance.
            left_out.append(failed[0])
        return ""

    def _whole(self, tier: str) -> list[str]:
        return [f"tests/{folder}" for folder in TIERS[tier]]

    def _pytest(self, tier: str, arguments: Sequence[str], more: Mapping[str, str] | None = None) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-m", tier, *arguments]
        environ = {**os.environ, "PYTHONPATH": str(self._folder), "HYPOTHESIS_PROFILE": "quick", **(more or {})}
        try:
            done = subprocess.run(
                command, cwd=self._folder, env=environ, capture_output=True, text=True, timeout=RUN_SECONDS
            )
        except subprocess.TimeoutExpired:
            return 1, f"no end within {RUN_SECONDS} s"
        return done.returncode, done.stdout


def main() -> int:
    """Return 0 where at most 5 of 100 are not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=["unit"])
    parser.add_argument("--only", nargs="+", type=int, metavar="NUMBER")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    numbered = enumerate(drawn(100, options.seed), 1)
    chosen = {number: fault for number, fault in numbered if not options.only or number in options.only}
    if options.list:
        print(*(f"| {number} | {fault} |" for number, fault in chosen.items()), sep="\n")
        return 0
    missed = 0
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def work(fault: Fault) -> str:
        copy = copies.get()
        try:
            return copy.noticed(fault, options.tiers)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, futures.ThreadPoolExecutor(options.jobs) as pool:
        failing, calls = Copy(Path(folder, "first")).look(options.tiers)
        print("fails without a fault:", *failing)
        for job in range(options.jobs):
            copies.put(Copy(Path(folder, str(job)), failing, calls))
        running = {pool.submit(work, fault): number for number, fault in chosen.items()}
        print("| | place | fault | noticed by |\n| --- | --- | --- | --- |", flush=True)
        for done in futures.as_completed(running):
            test = done.result()
            missed += not test
            print(f"| {running[done]} | {chosen[running[done]]} | {test or '**nothing**'} |", flush=True)
    print(f"{missed} of {len(chosen)} are not noticed")
    return int(missed * 20 > len(chosen))


if __name__ == "__main__":
    sys.exit(main())
