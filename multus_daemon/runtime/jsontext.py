"""Faults and repeated keys in JSON texts. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

# End of a message of msgspec, which has no attribute for the offset. Counted from 0.
_OFFSET: Final = re.compile(r" \(byte ([0-9]+)\)\Z")
_CUT_OFF: Final = "Input data was truncated"
_MALFORMED: Final = "JSON is malformed: "


def fault(data: bytes | str, error: Exception) -> str:
    """Return `not JSON: ` and msgspec's message about `data`, with line and column (from 1) instead of the offset."""
    message = f"not JSON: {str(error).removeprefix(_MALFORMED)}"
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if found := _OFFSET.search(message):
        message, offset = message[: found.start()], int(found[1])
    elif message.endswith(_CUT_OFF):
        message, offset = "not JSON: the text ends too early", len(raw.rstrip())
    else:
        return message
    start = raw.rfind(b"\n", 0, offset) + 1
    line = raw.count(b"\n", 0, offset) + 1
    return f"{message} (line {line}, column {len(raw[start:offset].decode('utf-8', 'replace')) + 1})"


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
