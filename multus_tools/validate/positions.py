"""Positions in JSON texts: of faults and of values. Pure."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

_PLACE: Final = re.compile(r" \(line ([0-9]+), column ([0-9]+)\)")
_TOKEN: Final = re.compile(r'[{}\[\],:]|"[^"\\]*(?:\\.[^"\\]*)*"|[^\s{}\[\],:"]+', re.DOTALL)

Path = tuple[str | int, ...]
"""Path of a value: keys of objects, indexes of arrays."""


class Span(NamedTuple):
    """Position of a value, in characters from 0."""

    key: int
    """Start of the value's key; in an array, of the value."""
    start: int
    end: int


def place_of_fault(message: str) -> tuple[str, tuple[int, int] | None]:
    """Split a message with a text of `jsontext.fault` into the text without the place, and the place (line, column)."""
    if (found := _PLACE.search(message)) is None:
        return message, None
    return message[: found.start()] + message[found.end() :], (int(found[1]), int(found[2]))


def positions(text: str) -> tuple[dict[Path, Span], list[tuple[Path, int]]]:
    """Return the position of each value of valid JSON by its path, and each repetition of a key.

    If a key is repeated, the first returned value has the position of its last occurrence.
    """
    found: dict[Path, Span] = {}
    repeated: list[tuple[Path, int]] = []
    tokens = _TOKEN.finditer(text)

    def read(token: re.Match[str], path: Path, key_at: int) -> None:
        opening, end = token[0], token.end()
        if opening in "{[":
            index, names = 0, set()
            while (inner := next(tokens))[0] not in "}]":
                if inner[0] == ",":
                    inner = next(tokens)
                at = inner.start()
                if opening == "{":
                    name: str | int = json.loads(inner[0])
                    if name in names:
                        repeated.append(((*path, name), at))
                    names.add(name)
                    next(tokens)
                    inner = next(tokens)
                else:
                    name, index = index, index + 1
                read(inner, (*path, name), at)
            end = inner.end()
        found[path] = Span(key_at, token.start(), end)

    first = next(tokens)
    read(first, (), first.start())
    return found, repeated


def shown_path(path: Path) -> str:
    """Return the path as `a.b[0].c`."""
    text = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path)
    return text.removeprefix(".")
