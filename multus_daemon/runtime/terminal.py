"""Output of programs for people: tables and colours of rich, and safe texts."""

from __future__ import annotations

from datetime import datetime

from rich import box, markup
from rich.console import Console
from rich.table import Column, Table


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
