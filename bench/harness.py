"""The frame of every bench: options, a network namespace of its own, a time limit, and the exit status."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from bench import aims, figures, verdict
from bench.figures import Recording
from bench.stats import Figure

_ISOLATED = "BENCH_IN_OWN_NAMESPACE"


class Bench:
    """One bench: its options, its clock, and the figures that it finds."""

    def __init__(self, name: str, doc: str | None, *, seconds: float, **numbers: int) -> None:
        """`name` is that of the module; `numbers` are options with their defaults.

        `seconds`: no round begins later; twice that, and five minutes, end the bench.

        Returns in a network namespace of the bench's own, with its loopback device up.
        """
        self.name = name
        parser = argparse.ArgumentParser(
            prog=f"python -m bench.{self.name}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works")
        parser.add_argument("--record", type=Path, metavar="FOLDER", help="write the figures into <bench>.json there")
        parser.add_argument("--seconds", type=float, default=seconds, help="no round begins after so many")
        for name, default in numbers.items():
            parser.add_argument(f"--{name}", type=int, default=default)
        self.options = parser.parse_args()
        verdict.require_node()
        isolate(self.name)
        # The load that others make, before our own adds to it.
        self._load = os.getloadavg()[0]
        self._begun = time.monotonic()
        self.quick: bool = self.options.quick
        self.figures: dict[str, Figure] = {}
        self.versions: dict[str, str] = {}
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(int(self.options.seconds * 2) + 300)

    def number(self, name: str, quick: int) -> int:
        """An option's value, or `quick` if that is less and a quick run is wanted."""
        value: int = getattr(self.options, name)
        return min(value, quick) if self.quick else value

    def has_time(self, share: float = 1.0) -> bool:
        """Return whether a round of the first `share` of the bench may begin."""
        seconds: float = self.options.seconds
        return time.monotonic() - self._begun < seconds * share

    def add(self, key: str, figure: Figure) -> None:
        """A figure was found."""
        self.figures[key] = figure

    def end(self) -> NoReturn:
        """Print all figures, record them if asked to, and exit by the aims."""
        signal.alarm(0)
        after = os.getloadavg()[0]
        print(f"{figures.machine()}, load average before {self._load:.1f}, after {after:.1f}")
        for key, figure in self.figures.items():
            print(f"{key:52}{figure.value:10.2f} {figure.unit:8} {figure.low:9.2f} to {figure.high:.2f}  n={figure.n}")
        if self.options.record is not None:
            given = {key: value for key, value in vars(self.options).items() if key != "record"}
            recording = Recording(
                self.name,
                figures.commit(),
                figures.today(),
                figures.machine(),
                self.versions,
                (round(self._load, 1), round(after, 1)),
                given,
                self.figures,
            )
            # The tables know the sizes of the benches, which know this module.
            from bench import page

            kept = dataclasses.replace(recording, figures=page.used(recording))
            print(f"recorded in {kept.save(self.options.record)}")
        judged = aims.AIMS.get(self.name, {})
        results = [
            verdict.Result(aim.text, found.value, aim.limit, found.unit)
            for key, aim in judged.items()
            if (found := self.figures.get(key)) is not None
        ]
        if not results:
            verdict.skip("no figure that has an aim was measured: see above what is missing")
        verdict.end(*results)


def isolate(name: str) -> None:
    """Go on in a network namespace of our own: the reference plugins make their links where they are started."""
    if _ISOLATED not in os.environ:
        os.environ[_ISOLATED] = "1"
        again = [sys.executable, "-m", f"bench.{name}", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "--net", *again])
    del os.environ[_ISOLATED]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _too_long(*_: object) -> None:
    raise TimeoutError("the bench takes too long")
