"""End a bench: report its figures against its budget, on standard output and in the exit status."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import Final, NoReturn

OK: Final = 0
MISSED: Final = 3
"""A value is over its budget. Not 1 or 2: Python ends with these after an exception and after a wrong argument."""
SKIPPED: Final = 4
"""Nothing was measured: this machine lacks something."""

MARK: Final = "=> "
"""Begins each line that `python -m bench` repeats in its summary."""


@dataclass(frozen=True)
class Result:
    """A measured value and the most that it may be, both in `unit`."""

    what: str
    value: float
    budget: float
    unit: str

    @property
    def is_met(self) -> bool:
        """Return whether the value is within the budget."""
        return self.value <= self.budget

    def __str__(self) -> str:
        verdict = "within" if self.is_met else "over"
        return f"{self.what}: {self.value:.2f} {self.unit}, {verdict} the budget of {self.budget:g} {self.unit}"


def end(*results: Result) -> NoReturn:
    """Print the results. Exit with OK if all of them are met, else with MISSED."""
    for result in results:
        print(f"{MARK}{result}")
    sys.exit(OK if all(result.is_met for result in results) else MISSED)


def skip(why: str) -> NoReturn:
    """Print what is missing and how to get it. Exit with SKIPPED."""
    print(f"{MARK}{why}")
    sys.exit(SKIPPED)


def require_node() -> None:
    """Skip the bench where no scratch node can be made."""
    if os.geteuid() != 0:
        skip("needs root, to make network namespaces")
    if shutil.which("ip") is None:
        skip("needs the program `ip`: install iproute2")
