"""Output of programs for people: tables and colours of rich, and safe texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final

from rich import box, markup
from rich.console import Console
from rich.table import Column, Table

SAME: Final = "the same"
_CONTEXT: Final = re.compile(r"^pod \S+: | \((?:pod|network|plugin|interface|annotation)\b[^()]*\)")


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console of standard output or standard error; `width` in columns, None: the terminal's."""
    # rich replaces `:cd:`, which may be a part of a MAC address, with a picture.
    return Console(stderr=stderr, width=width, highlight=False, emoji=False)


def table(*headers: str, title: str | None = None) -> Table:
    """Return a table with these columns. Wide texts are folded, as a cut name can't be copied."""
    return Table(*(Column(header, overflow="fold") for header in headers), title=title, box=box.ROUNDED)


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
