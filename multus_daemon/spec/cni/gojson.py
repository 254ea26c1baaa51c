"""JSON as Go's encoding/json reads and writes it, which is what every CNI configuration in the field relies on.

Reading: object keys match in any case, unknown keys are passed over, null is the same as absent, a value of the
wrong type is an error, and so is anything behind the value; 1.0 and 1e3 are integers, as they are in what Go writes.
Writing: `<`, `>`, `&`, U+2028 and U+2029 escaped, everything else as it is.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from multus_daemon.runtime import jsontext


class JsonError(ValueError):
    """Text that is no JSON, or a value of another type than its reader needs; the message says which."""


_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_TRANSLATION: Final = str.maketrans(_ESCAPES)
_SURROGATES: Final = re.compile("[\ud800-\udfff]")

# Far beyond any real configuration, and far below where the interpreter gives up: what could be read can be written
# again, whatever the depth of the call.
NESTING_MAX: Final = 200
# An empty one is 2 bytes of text and 100 of memory. A list for GC has one for each interface of the node.
CONTAINERS_MAX: Final = 100_000
# From here on Go's library writes an exponent, and so does Python's.
_EXPONENT_FROM: Final = 1e21


def loads(data: bytes | str) -> Any:
    """The value of one JSON text, of at most CONTAINERS_MAX objects and arrays, NESTING_MAX deep. Raises JsonError."""
    if (brackets := containers(data)) > CONTAINERS_MAX:
        raise JsonError(f"more than {CONTAINERS_MAX} objects and arrays")
    try:
        value = _DECODER.decode(data)
    except (ValueError, RecursionError) as error:
        if not data.strip():
            raise JsonError("unexpected end of JSON input") from error
        raise JsonError(jsontext.fault(data, error)) from error
    if brackets > NESTING_MAX and _is_deeper(value, NESTING_MAX):
        raise JsonError(f"nested deeper than {NESTING_MAX} levels")
    return value


def _number(text: str) -> int | float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text} is out of range")
    return int(value) if value.is_integer() and abs(value) < _EXPONENT_FROM else value


_DECODER: Final = msgspec.json.Decoder(float_hook=_number)
# Made once: `json.dumps` makes one for each call, which takes as long as the encoding.
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_sorted: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


def containers(data: bytes | str) -> int:
    """How many objects and arrays a text can have, at most; without reading it."""
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


def loads_object(data: bytes | str) -> dict[str, Any]:
    """The value of a JSON text that must be an object. Raises JsonError."""
    value = loads(data)
    if not isinstance(value, dict):
        raise JsonError(f"a JSON object is needed, not {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """What a value is called in JSON, with its article, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def get(fields: Mapping[str, Any], key: str) -> Any:
    """The value of `key` in any case, the last one in the text where there are several; None if absent or null."""
    wanted, length = key.lower(), len(key)
    found = None
    for name, value in fields.items():
        if name == key or (len(name) == length and name.lower() == wanted):
            found = value
    return found


def with_keys(fields: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with `updates` set. Other spellings of these keys go: a reader that ignores case could prefer them."""
    taken = {key.lower() for key in updates}
    return {key: value for key, value in fields.items() if key.lower() not in taken} | dict(updates)


def _typed(fields: Mapping[str, Any], key: str, kind: type | tuple[type, ...], wanted: str) -> Any:
    value = get(fields, key)
    # bool is a subclass of int: no boolean passes where a number is wanted.
    if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    raise JsonError(f"{key}: {wanted} is needed, not {kind_of(value)}")


def get_str(fields: Mapping[str, Any], key: str) -> str | None:
    """The string at `key`, None if absent or null. Raises JsonError for another type."""
    value: str | None = _typed(fields, key, str, "a string")
    return value


def get_bytes(fields: Mapping[str, Any], key: str) -> bytes | None:
    """The bytes at `key`, in base64 with padding as Go writes them; None if absent or null. Raises JsonError."""
    text = get_str(fields, key)
    if text is None:
        return None
    try:
        # Go's decoder passes over line ends and over nothing else.
        return base64.b64decode(text.translate({10: None, 13: None}), validate=True)
    except ValueError as error:
        raise JsonError(f"{key}: standard base64 with padding is needed: {error}") from error


def get_int(fields: Mapping[str, Any], key: str) -> int | None:
    """The integer at `key`, None if absent or null. Raises JsonError for another type, a fraction included."""
    value = _typed(fields, key, (int, float), "an integer")
    if isinstance(value, float):
        if not value.is_integer():
            raise JsonError(f"{key}: an integer is needed, not {value}")
        return int(value)
    result: int | None = value
    return result


def get_bool(fields: Mapping[str, Any], key: str) -> bool | None:
    """The boolean at `key`, None if absent or null. Raises JsonError for another type."""
    value: bool | None = _typed(fields, key, bool, "a boolean")
    return value


def get_object(fields: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """The object at `key`, None if absent or null. Raises JsonError for another type."""
    value: dict[str, Any] | None = _typed(fields, key, dict, "an object")
    return value


def get_list(fields: Mapping[str, Any], key: str) -> list[Any] | None:
    """The array at `key`, None if absent or null. Raises JsonError for another type."""
    value: list[Any] | None = _typed(fields, key, list, "an array")
    return value


def get_strings(fields: Mapping[str, Any], key: str) -> list[str] | None:
    """The array of strings at `key`, None if absent or null. Raises JsonError for another type."""
    values = get_list(fields, key)
    for index, value in enumerate(values or ()):
        if not isinstance(value, str):
            raise JsonError(f"{key}[{index}]: a string is needed, not {kind_of(value)}")
    return values


def get_objects(fields: Mapping[str, Any], key: str) -> list[dict[str, Any]] | None:
    """The array of objects at `key`, None if absent or null. Raises JsonError for another type."""
    values = get_list(fields, key)
    for index, value in enumerate(values or ()):
        if not isinstance(value, dict):
            raise JsonError(f"{key}[{index}]: an object is needed, not {kind_of(value)}")
    return values


def get_flag(fields: Mapping[str, Any], key: str) -> bool:
    """A boolean that CNI 0.4.0 documented as the strings "true" and "false"; False if absent or null.

    Raises JsonError for anything else.
    """
    value = get(fields, key)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value is None or isinstance(value, bool):
        return bool(value)
    raise JsonError(f'{key}: a boolean, or "true" or "false", is needed, not {kind_of(value)}')


def dumps(value: Any, *, sort_keys: bool = True) -> bytes:
    """Compact JSON, as `json.Marshal` writes a map (sorted) or a struct (not sorted)."""
    return _escape(_encode_sorted(value) if sort_keys else _encode(value))


def dumps_indented(value: Any, *, sort_keys: bool = True) -> bytes:
    """JSON with 4 spaces of indentation and no newline at the end, as `json.MarshalIndent` writes it."""
    # json's own indentation is done in Python, which took 0.2 ms for a result.
    return msgspec.json.format(dumps(value, sort_keys=sort_keys), indent=4)


def _escape(text: str) -> bytes:
    text = text.translate(_TRANSLATION)
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Lone surrogates can't be encoded; Go writes the replacement character for them.
        return _SURROGATES.sub("\ufffd", text).encode()
