"""Tables of rich: with a frame in a terminal, one line for each row in a pipe; with `-w`, only changed rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from rich import box, markup
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

from multus_tools.terminal import literal, moment, say

LONGEST: Final = 100_000
"""A width in columns at which rich neither cuts nor folds a cell."""


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console of standard output or standard error; `width` in columns, None: the terminal's."""
    # rich replaces `:cd:`, which may be a part of a MAC address, with a picture.
    return Console(stderr=stderr, width=width or (None if is_seen() else LONGEST), highlight=False, emoji=False)


def is_seen() -> bool:
    """Return True if standard output is a terminal."""
    # watch(1) reads from a pipe, and sets the width.
    return sys.stdout.isatty() or "COLUMNS" in os.environ


class Rows(Table):
    """A table with a frame for a terminal; for a pipe, a line for each row, without a frame.

    Only the columns `texts` are folded, as a folded name can't be copied. In a narrow terminal the columns `least` are
    left out, in this order.
    """

    def __init__(
        self, *headers: str, title: str | None = None, texts: Collection[str] = (), least: Sequence[str] = ()
    ) -> None:
        columns = [Column(name, overflow="fold", no_wrap=name not in texts, min_width=len(name)) for name in headers]
        self._least = list(least)
        super().__init__(*columns, title=title, box=box.ROUNDED)
        if not is_seen():
            self.unframe()

    def unframe(self) -> None:
        """Remove the frame: each row that is added after that is one line."""
        self.title_justify, self.box, self.pad_edge, self.padding = "left", None, False, (0, 3, 0, 0)

    def add_row(self, *cells: Any, **style: Any) -> None:
        """Add a row of cells, which are rich markup."""
        lines = [cell if self.box else cell.replace("\n", ", ") for cell in cells]
        for column, cell in zip(self.columns, lines, strict=False):
            if column.no_wrap or not self.box:
                # rich takes the longest word for the least width.
                widths = map(cell_len, markup.render(cell).plain.split("\n"))
                column.min_width = max(column.min_width or 0, *widths)
        super().add_row(*lines, **style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        while Measurement.get(console, options.update(width=LONGEST), self).minimum > options.max_width:
            if not self._least:
                # A folded name is better than a cut one.
                for column in self.columns:
                    column.no_wrap, column.min_width = False, None
                break
            name = self._least.pop(0)
            self.columns = [column for column in self.columns if column.header != name]
            self.caption = f"{self.caption}, {name}" if self.caption else f"the terminal is too narrow for {name}"
        return super().__rich_console__(console, options)


class Listing:
    """The format of a command's table; with `watch` each table after the first shows only what has changed."""

    def __init__(self, *, wide: bool = False, headers: bool = True, watch: bool = False) -> None:
        self.wide = wide
        self.rows_only = watch or not headers
        """Print one table, and no summary."""
        self._headers, self._watch = headers, watch
        self._before: Iterable[tuple[str, ...]] = ()
        self._notes: Sequence[str] = ()
        self._widths: Sequence[int | None] = ()

    def rows(
        self,
        headers: Sequence[str],
        rows: Iterable[tuple[str, ...]],
        *,
        wide: Sequence[str] = (),
        key: int = 1,
        framed: bool = False,
        **folding: Any,
    ) -> None:
        """Print rows with a cell for each of `headers` and `wide`: columns for `-o wide`; `framed`: in a frame, too.

        The first `key` columns identify a row; `folding`: arguments for `Rows`. With `-w`, a row that is no longer in
        the table is printed once more, with `gone` in its last column.
        """
        columns = [*headers, *(wide if self.wide else ())]
        present = dict.fromkeys(row[: len(columns)] for row in rows)
        shown = [row for row in present if row not in self._before]
        keys = {row[:key] for row in present}
        empty = ("",) * (len(columns) - key - 1)
        shown += [(*row[:key], *empty, "gone") for row in self._before if row[:key] not in keys]
        if self._watch:
            self._before = present
        if not shown:
            return
        made = Rows(*columns, **folding)
        made.show_header = self._headers
        if plain := self.rows_only or (self.wide and not framed):
            made.unframe()
        for column, least in zip(made.columns, self._widths, strict=False):
            column.min_width = least
        for row in shown:
            made.add_row(*row)
        if self._watch:
            self._headers = False
            # Columns stay where they are.
            self._widths = [column.min_width for column in made.columns]
        # A terminal wraps rows without a frame.
        console(width=LONGEST if plain else None).print(made)

    def note(self, *lines: str) -> None:
        """Print lines of markup on standard error; with `watch` only new ones."""
        say(*(line for line in lines if line not in self._notes), stderr=True)
        self._notes = lines if self._watch else ()


def leaks(listing: Listing, containers: Iterable[Mapping[str, Any]]) -> None:
    """Print a row for each leftover container; its node is the first column if it is known."""
    node: list[str] = []
    rows = []
    for item in containers:
        node = ["node"] if "node" in item else []
        aside = f"since {moment(item['setAside'])} " if item.get("setAside") else ""
        networks = (f"{entry['network']} {' '.join(entry['addresses'])}" for entry in item["attachments"])
        problem, cause, remedy = item["problem"].partition(": ")[0], aside + item["problem"], item["advice"]
        container = item["container"] if listing.wide else item["container"][:13]
        names = [*map(item.get, node), item["pod"], container, moment(item["since"])]
        rows.append(tuple(map(literal, [*names, problem, ", ".join(networks), cause, remedy])))
    headers = (*node, "pod", "container", "since", "problem")
    least = ("since", "container", "problem")
    listing.rows(headers, rows, wide=("networks", "cause", "remedy"), key=len(node) + 2, least=least)
