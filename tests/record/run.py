"""Run one incident on both sides, within its time, and judge what was seen."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from tests.e2e.apiserver import ApiServer
from tests.e2e.build_tools import ToolError
from tests.record.incident import Incident, Seen
from tests.record.side import side

LIMIT: Final = 60.0
"""Seconds for both sides of an incident together."""


class TooLongError(Exception):
    """An incident took more than its time."""


@dataclass
class Result:
    """What came of an incident."""

    row: Incident
    release: str
    seen: dict[str, Seen] = field(default_factory=dict)
    """By the title of the side, upstream's first."""
    skipped: str = ""
    """What is missing here, and how to get it."""
    broken: str = ""
    """Why a side could not be judged."""
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        """Return what is not as the page says."""
        if self.broken or self.skipped:
            return [self.broken] if self.broken else []
        upstream, here = self.seen.values()
        expected = self.row.upstream_fails(self.release)
        return [
            *["upstream no longer fails: take the row from the page"] * (expected and not upstream.fails),
            *["upstream fails, and the page says that it does not"] * (upstream.fails and not expected),
            *["ours fails"] * here.fails,
        ]

    @property
    def verdict(self) -> str:
        """One line."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        if self.faults:
            return f"NOT AS THE PAGE SAYS: {'; '.join(self.faults)}"
        is_fault = self.row.upstream_fails(self.release)
        return "upstream fails as reported, ours does not" if is_fault else "upstream is right here, and so is ours"


def run(row: Incident, server: ApiServer, number: int, release: str) -> Result:
    """Run it; `number`: for the names of its namespaces."""
    begin = time.monotonic()
    result = Result(row, release)
    try:
        for index, each in enumerate((release, "")):
            with side(server, each, 2 * number + index) as made, limited(LIMIT - (time.monotonic() - begin)):
                result.seen[made.title] = row.show(made)
    except (ToolError, pytest.skip.Exception) as error:
        result.skipped = str(error)
    except TooLongError:
        result.broken = f"it took more than {LIMIT:.0f} s"
    except Exception as error:
        traceback.print_exc()
        result.broken = f"{type(error).__name__}: {error}"
    result.seconds = time.monotonic() - begin
    return result


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLongError in the block once the time is over; in the main thread only."""

    def ring(*_: Any) -> None:
        raise TooLongError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
