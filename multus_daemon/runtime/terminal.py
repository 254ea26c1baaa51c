"""What programs for people print with: tables and colours of rich, and texts of others as they stand."""

from __future__ import annotations

from datetime import datetime

from rich import box, markup
from rich.console import Console
from rich.table import Column, Table


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Standard output or standard error; `width` in columns, the terminal's where None."""
    # rich takes `:cd:`, which may be a part of a MAC address, for the name of a picture.
    return Console(stderr=stderr, width=width, highlight=False, emoji=False)


def table(*headers: str, title: str | None = None) -> Table:
    """A table with these columns. What is too wide is folded: a name that is cut can't be copied."""
    return Table(*(Column(header, overflow="fold") for header in headers), title=title, box=box.ROUNDED)


def moment(seconds: float) -> str:
    """Return a Unix time as local time; `?` for one that no calendar has."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")[:19]
    except (OverflowError, OSError, ValueError):
        return "?"


def literal(text: str) -> str:
    """What others have written, for a console: on one line, neither markup nor a terminal's commands."""
    return markup.escape("".join(letter if letter.isprintable() else " " for letter in text))
