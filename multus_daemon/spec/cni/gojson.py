"""JSON as Go's encoding/json reads and writes it, as CNI configurations expect.

Reading: object keys match in any case, unknown keys are ignored, null means absent, a value of the wrong type is an
error, and so is text after the value; 1.0 and 1e3 are integers. Writing: `<`, `>`, `&`, U+2028 and U+2029 are escaped.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from multus_daemon.runtime import jsontext

T = TypeVar("T")


class JsonError(ValueError):
    """The text is not JSON, or a value has the wrong type."""


_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_TRANSLATION: Final = str.maketrans(_ESCAPES)
_SURROGATES: Final = re.compile("[\ud800-\udfff]")

# Far above any real configuration, and far below the interpreter's limit: a value that was read can be written again.
NESTING_MAX: Final = 200
# An empty container takes 2 bytes of text and 100 of memory. A list for GC has one for each interface of the node.
CONTAINERS_MAX: Final = 100_000
# Go's library writes larger numbers with an exponent, and so does Python's.
_EXPONENT_FROM: Final = 1e21


def loads(data: bytes | str) -> Any:
    """Read one JSON text with at most CONTAINERS_MAX objects and arrays, NESTING_MAX deep. Raises JsonError."""
    if (brackets := containers(data)) > CONTAINERS_MAX:
        raise JsonError(f"more than {CONTAINERS_MAX} objects and arrays")
    try:
        value = _DECODER.decode(data)
        if brackets > NESTING_MAX and _is_deeper(value, NESTING_MAX):
            raise RecursionError
    except RecursionError as error:
        raise JsonError(f"nested deeper than {NESTING_MAX} levels") from error
    except ValueError as error:
        if not data.strip():
            raise JsonError("unexpected end of JSON input") from error
        raise JsonError(jsontext.fault(data, error)) from error
    return value


def _number(text: str) -> int | float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text} is out of range")
    return int(value) if value.is_integer() and abs(value) < _EXPONENT_FROM else value


_DECODER: Final = msgspec.json.Decoder(float_hook=_number)
# `json.dumps` makes an encoder for each call, which takes as long as the encoding.
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_sorted: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


def containers(data: bytes | str) -> int:
    """Return an upper bound of the number of objects and arrays in a text, without parsing it."""
    if isinstance(data, str):
        return data.count("{") + data.count("[")
    return data.count(b"{") + data.count(b"[")


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels + 1):
        containers = [item for item in layer if isinstance(item, dict | list)]
        layer = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
        if not containers:
            return False
    return True


def loads_object(data: bytes | str, *, nullable: bool = False) -> dict[str, Any]:
    """Read one JSON text, an object; `nullable`: null too, read as an empty object, as in Go. Raises JsonError."""
    value = loads(data)
    if value is None and nullable:
        return {}
    if not isinstance(value, dict):
        raise JsonError(f"a JSON object is needed, not {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """Return the JSON type of a value with its article, for messages."""
    return _KINDS.get(type(value), "an object")


_KINDS: Final = {
    type(None): "null",
    bool: "a boolean",
    str: "a string",
    list: "an array",
    **dict.fromkeys((int, float), "a number"),
}


def get(fields: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key`, spelt in any case; the last one if it is repeated. None if absent or null."""
    wanted, length = key.lower(), len(key)
    found = None
    for name in fields:
        if len(name) == length and (name == key or name.lower() == wanted):
            found = fields[name]
    return found


def with_keys(fields: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with `updates` set. Keys that differ only in case are removed: Go might read those."""
    taken = {key.lower() for key in updates}
    return {key: value for key, value in fields.items() if key.lower() not in taken} | dict(updates)


def _getter(kind: type[T], wanted: str) -> Callable[[Mapping[str, Any], str], T | None]:
    """Return a function that reads the value at a key: None if absent or null. It raises JsonError for another type."""

    def read(fields: Mapping[str, Any], key: str) -> T | None:
        value = get(fields, key)
        # bool is a subclass of int: a boolean is not a number.
        if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        raise JsonError(f"{key}: {wanted} is needed, not {kind_of(value)}")

    return read


get_str = _getter(str, "a string")
get_bool = _getter(bool, "a boolean")
get_object: Callable[[Mapping[str, Any], str], dict[str, Any] | None] = _getter(dict, "an object")
get_list: Callable[[Mapping[str, Any], str], list[Any] | None] = _getter(list, "an array")


def get_bytes(fields: Mapping[str, Any], key: str) -> bytes | None:
    """Return the decoded bytes at `key`, a base64 text with padding, as Go writes them. Raises JsonError."""
    text = get_str(fields, key)
    if text is None:
        return None
    try:
        # Go's decoder ignores line ends and nothing else.
        return base64.b64decode(text.translate({10: None, 13: None}), validate=True)
    except ValueError as error:
        raise JsonError(f"{key}: standard base64 with padding is needed: {error}") from error


def get_int(fields: Mapping[str, Any], key: str) -> int | None:
    """Return the integer at `key`, None if absent or null. Raises JsonError, also for a fraction."""
    value = get(fields, key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if not isinstance(value, float):
        raise JsonError(f"{key}: an integer is needed, not {kind_of(value)}")
    if not value.is_integer():
        raise JsonError(f"{key}: an integer is needed, not {value}")
    return int(value)


def _items_getter(kind: type[T], wanted: str) -> Callable[[Mapping[str, Any], str], list[T] | None]:
    def read(fields: Mapping[str, Any], key: str) -> list[T] | None:
        values = get_list(fields, key)
        for index, value in enumerate(values or ()):
            if not isinstance(value, kind):
                raise JsonError(f"{key}[{index}]: {wanted} is needed, not {kind_of(value)}")
        return values

    return read


get_strings = _items_getter(str, "a string")
get_objects: Callable[[Mapping[str, Any], str], list[dict[str, Any]] | None] = _items_getter(dict, "an object")


def get_flag(fields: Mapping[str, Any], key: str) -> bool:
    """Return the boolean at `key`, also "true" and "false" (CNI 0.4.0); False if absent. Raises JsonError."""
    value = get(fields, key)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value is None or isinstance(value, bool):
        return bool(value)
    raise JsonError(f'{key}: a boolean, or "true" or "false", is needed, not {kind_of(value)}')


def dumps(value: Any, *, sort_keys: bool = True) -> bytes:
    """Return compact JSON, as `json.Marshal` writes a map (sorted) or a struct (not sorted)."""
    return _escape(_encode_sorted(value) if sort_keys else _encode(value))


def dumps_indented(value: Any, *, sort_keys: bool = True) -> bytes:
    """Return JSON with 4 spaces of indentation and no newline at the end, as `json.MarshalIndent` writes it."""
    # The indentation of `json` is written in Python: 0.2 ms for a result.
    return msgspec.json.format(dumps(value, sort_keys=sort_keys), indent=4)


def _escape(text: str) -> bytes:
    text = text.translate(_TRANSLATION)
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Go writes the replacement character for lone surrogates.
        return _SURROGATES.sub("\ufffd", text).encode()
