"""Tables of commands that list, with kubectl's `-o wide`, `--no-headers` and `-w`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multus_tools import terminal
from multus_tools.terminal import literal, moment, say

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
        table = terminal.table(*columns, **folding)
        table.show_header = self._headers
        if plain := self.wide or self.rows_only:
            table.unframe()
        for column, least in zip(table.columns, self._widths, strict=False):
            column.min_width = least
        for row in shown:
            table.add_row(*row)
        if self._watch:
            self._headers = False
            # Columns stay where they are.
            self._widths = [column.min_width for column in table.columns]
        # A terminal wraps rows without a frame.
        terminal.console(width=terminal.LONGEST if plain else None).print(table)

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
