"""How many nodes have answered: a bar on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """A context manager; the bar is gone after it. Without a terminal it does nothing."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, nodes: int) -> None:
        """So many more are asked now."""
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("asking nodes"), BarColumn(), MofNCompleteColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=0)
        total = self._bar.tasks[0].total or 0
        self._bar.update(self._task, total=total + nodes)

    def one_done(self) -> None:
        """One of them has answered, or is given up."""
        if self._bar is not None:
            self._bar.advance(self._task)
