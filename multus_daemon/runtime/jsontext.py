"""Positions in JSON texts: of faults, of values, and of repeated keys. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

# End of a message of msgspec, which has no attribute for the offset. Counted from 0.
_OFFSET: Final = re.compile(r" \(byte ([0-9]+)\)\Z")
_CUT_OFF: Final = "Input data was truncated"
_PLACE: Final = re.compile(r" \(line ([0-9]+), column ([0-9]+)\)")
_TOKEN: Final = re.compile(r'[{}\[\],:]|"[^"\\]*(?:\\.[^"\\]*)*"|[^\s{}\[\],:"]+', re.DOTALL)

Path = tuple[str | int, ...]
"""Path of a value: keys of objects, indexes of arrays."""


class Span(NamedTuple):
    """Position of a value, in characters from 0."""

    key: int
    """Start of its key, or of the value in an array."""
    start: int
    end: int


def fault(data: bytes | str, error: Exception) -> str:
    """Return the message of msgspec's error about `data`, with line and column from 1 instead of the byte offset."""
    message = str(error)
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if found := _OFFSET.search(message):
        message, offset = message[: found.start()], int(found[1])
    elif message == _CUT_OFF:
        offset = len(raw.rstrip())
    else:
        return message
    start = raw.rfind(b"\n", 0, offset) + 1
    line = raw.count(b"\n", 0, offset) + 1
    return f"{message} (line {line}, column {len(raw[start:offset].decode('utf-8', 'replace')) + 1})"


def place_of_fault(message: str) -> tuple[str, tuple[int, int] | None]:
    """Split a message that contains one of `fault` into the text without line and column, and these."""
    if (found := _PLACE.search(message)) is None:
        return message, None
    return message[: found.start()] + message[found.end() :], (int(found[1]), int(found[2]))


def positions(text: str) -> dict[Path, Span]:
    """Return the position of each value of valid JSON by its path; the last one for a repeated key."""
    found: dict[Path, Span] = {}
    tokens = _TOKEN.finditer(text)

    def read(token: re.Match[str], path: Path, key_at: int) -> None:
        opening, end = token[0], token.end()
        if opening in "{[":
            index = 0
            while (inner := next(tokens))[0] not in "}]":
                if inner[0] == ",":
                    inner = next(tokens)
                at = inner.start()
                if opening == "{":
                    name: str | int = json.loads(inner[0])
                    next(tokens)
                    inner = next(tokens)
                else:
                    name, index = index, index + 1
                read(inner, (*path, name), at)
            end = inner.end()
        found[path] = Span(key_at, token.start(), end)

    first = next(tokens)
    read(first, (), first.start())
    return found


def shown_path(path: Path) -> str:
    """Return the path as `a.b[0].c`."""
    text = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in path)
    return text.removeprefix(".")


def repeated_keys(data: bytes, *, same: Callable[[str], str] = lambda key: key) -> list[str]:
    """Return the paths of repeated keys in valid JSON. `same` normalises keys of the top level."""
    value = json.loads(data, object_pairs_hook=_Pairs)
    return list(dict.fromkeys(_repeated(value, "", same)))


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, in the order of the text."""


def _repeated(value: Any, path: str, same: Callable[[str], str]) -> Iterator[str]:
    if isinstance(value, _Pairs):
        counts = Counter(same(key) for key, _ in value)
        for key, inner in value:
            if counts[same(key)] > 1:
                yield f"{path}{key}"
            yield from _repeated(inner, f"{path}{key}.", str)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _repeated(inner, f"{path.removesuffix('.')}[{index}].", str)
