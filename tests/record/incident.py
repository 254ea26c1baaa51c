"""An incident from a public report, and the program that shows it on either side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tests.record.side import Side


class Seen(NamedTuple):
    """What a program saw on one side."""

    fails: bool
    """True if it is as the report says."""
    text: str
    """What the side did: numbers, interfaces, the end of an error. A cell of the page: without `|`."""


@dataclass(frozen=True)
class Incident:
    """A row of the record. A module has one, and its name."""

    module: str
    """`__name__`."""
    title: str
    """A short sentence."""
    report: str
    """URL of the public report."""
    show: Callable[[Side], Seen]
    """It starts the daemon by `side.serve()`, and does the same on both sides."""
    upstream_is_right: bool = False
    """True if upstream's program does not fail, or no longer."""
    mended_in: str = ""
    """The release of upstream since which it does not fail."""

    @property
    def name(self) -> str:
        """The word that chooses it on the command line."""
        return self.module.rpartition(".")[2]

    def upstream_fails(self, release: str) -> bool:
        """Return what is expected of upstream's `release`."""
        return not self.upstream_is_right and self.mended_in != release
