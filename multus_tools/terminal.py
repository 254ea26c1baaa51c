"""Print lines for people, coloured on a terminal, and escape foreign texts. Without rich, which loads slowly."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

SAME: Final = "see above"
ANSWERS: Final = {"no": "red", "in part": "yellow", "yes": "green"}
"""Colours of `podsGetNetworks` (`answers.status`), the worst first."""
_CONTEXT: Final = re.compile(r"^pod \S+: | \((?:pod|network|plugin|interface|annotation)\b[^()]*\)")
_TAG: Final = re.compile(r"(\\*)(\[([a-z#/@][^[]*?)])")
"""A tag of rich's markup; after an odd number of backslashes it is text."""
_STYLES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def say(*parts: Any, stderr: bool = False) -> None:
    """Print lines of markup, and tables; the terminal wraps the lines, so that their text can be copied."""
    to = sys.stderr if stderr else sys.stdout
    coloured = to.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") not in ("dumb", "unknown")
    for part in parts:
        if isinstance(part, str):
            to.write(_TAG.sub(_coloured if coloured else _plain, part) + "\n")
        else:
            from multus_tools.tables import console

            console(stderr=stderr).print(part)


def progress(text: str) -> None:
    """Show on a terminal what the program is doing; an empty text removes the line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _coloured(found: re.Match[str]) -> str:
    codes = ";".join(_STYLES.get(name, "0") for name in found[3].split())
    return _plain(found) if len(found[1]) % 2 else f"{_plain(found)}\x1b[{codes}m"


def _plain(found: re.Match[str]) -> str:
    return found[1][: len(found[1]) // 2] + (found[2] if len(found[1]) % 2 else "")


def moment(seconds: float) -> str:
    """Return a Unix time as local time; `?` if it is out of range."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")[:19]
    except (OverflowError, OSError, ValueError):
        return "?"


def literal(text: str) -> str:
    """Return a foreign text for a console: one line, without markup and control characters."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    text = _TAG.sub(r"\1\1\\\2", text)
    return text + "\\" if text.endswith("\\") and not text.endswith("\\\\") else text


def counting(number: int, what: str) -> str:
    """Return the number and the noun in the right form, such as `1 error`, `2 errors`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class Said:
    """Remembers the messages that were shown, to show each once. A text has messages joined by `; ` (`cni.errors`)."""

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
