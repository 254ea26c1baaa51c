"""Output of programs for people: tables and colours of rich, and safe texts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rich import box, markup
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

LONGEST: Final = 100_000
"""Width in columns at which nothing is cut or folded."""
SAME: Final = "see above"
_CONTEXT: Final = re.compile(r"^pod \S+: | \((?:pod|network|plugin|interface|annotation)\b[^()]*\)")


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console of standard output or standard error; `width` in columns, None: the terminal's."""
    # rich replaces `:cd:`, which may be a part of a MAC address, with a picture.
    return Console(stderr=stderr, width=width or (None if _is_seen() else LONGEST), highlight=False, emoji=False)


def say(*parts: str | Table, stderr: bool = False) -> None:
    """Print tables, and lines of markup; the terminal wraps the lines, so that their text can be copied."""
    to = console(stderr=stderr)
    for part in parts:
        to.print(part, soft_wrap=isinstance(part, str))


def _is_seen() -> bool:
    # watch(1) reads from a pipe, and sets the width.
    return sys.stdout.isatty() or "COLUMNS" in os.environ


class Rows(Table):
    """A table with a frame for a terminal; for a pipe, a line for each row, without a frame."""

    def __init__(self, headers: Sequence[str], title: str | None, texts: Collection[str], least: Sequence[str]) -> None:
        columns = [Column(name, overflow="fold", no_wrap=name not in texts, min_width=len(name)) for name in headers]
        self._least = list(least)
        super().__init__(*columns, title=title, box=box.ROUNDED)
        if not _is_seen():
            self.unframe()

    def unframe(self) -> None:
        """Leave the frame out: each row that is added then is one line."""
        self.title_justify, self.box, self.pad_edge, self.padding = "left", None, False, (0, 3, 0, 0)

    def add_row(self, *cells: Any, **style: Any) -> None:
        """Add a row of markup."""
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
        return super().__rich_console__(console, options)


def table(*headers: str, title: str | None = None, texts: Collection[str] = (), least: Sequence[str] = ()) -> Rows:
    """Return a table with these columns. Only the `texts` among them are folded: a name in pieces can't be copied.

    `least`: the columns that a narrow terminal does without, in this order.
    """
    return Rows(headers, title, texts, least)


def moment(seconds: float) -> str:
    """Return a Unix time as local time; `?` if it is out of range."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")[:19]
    except (OverflowError, OSError, ValueError):
        return "?"


def literal(text: str) -> str:
    """Return a foreign text for a console: one line, without markup and control characters."""
    return markup.escape("".join(letter if letter.isprintable() else " " for letter in text))


class Said:
    """Show each message once. Messages are joined by `; ` and end with their context in brackets (`cni.errors`)."""

    def __init__(self, text: str = "") -> None:
        self._shown = [_CONTEXT.sub("", part) for part in text.split("; ")]

    def new(self, text: str) -> str:
        """Return `text` without the messages shown before, escaped for rich; SAME if nothing is left."""
        left = []
        for part in text.split("; "):
            bare = _CONTEXT.sub("", part)
            if not any(re.search(rf"(?<!\w){re.escape(bare)}(?!\w)", shown) for shown in self._shown):
                # A shorter message may be a part of another by chance.
                known = next((shown for shown in self._shown if shown.count(" ") > 1 and shown in bare), None)
                left.append(bare.replace(known, SAME) if known else part)
                self._shown.append(bare)
        return literal("; ".join(left)) or SAME


def counted(items: Iterable[tuple[str, str, int]]) -> Iterator[str]:
    """Return a line of markup for each `what` of the items (when, what, count), with its last `when`."""
    groups: dict[str, tuple[str, int]] = {}
    for when, what, count in items:
        groups[what] = when, groups.get(what, ("", 0))[1] + count
    for what, (when, count) in groups.items():
        yield f"  {when} {what}" + (f" [dim]({count} times)[/]" if count > 1 else "")


Row = tuple[str, ...]


class Listing:
    """The format of a command's table; with `watch` each table after the first shows only what has changed."""

    def __init__(self, *, wide: bool = False, headers: bool = True, watch: bool = False) -> None:
        self.wide = wide
        self.rows_only = watch or not headers
        """Print one table, and no summary."""
        self._headers, self._watch = headers, watch
        self._before: Iterable[Row] = ()
        self._notes: Sequence[str] = ()
        self._widths: Sequence[int | None] = ()

    def rows(
        self, headers: Sequence[str], rows: Iterable[Row], *, wide: Sequence[str] = (), key: int = 1, **folding: Any
    ) -> None:
        """Print rows with a cell for each of `headers` and `wide`, the columns of `-o wide`.

        The first `key` columns identify a row; `folding` is for `terminal.table`. A row that has left the table is
        printed once more, with `gone` in its last column.
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
        made = table(*columns, **folding)
        made.show_header = self._headers
        if plain := self.wide or self.rows_only:
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
    """Print a row for each container that nothing will delete; its node is the first column if it is known."""
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
