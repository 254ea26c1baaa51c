"""JSON as Go's encoding/json reads and writes it, which is what every CNI configuration in the field relies on.

Reading: object keys match in any case, unknown keys are passed over, null is the same as absent, a value of the
wrong type is an error, and so is anything behind the value. Writing: `<`, `>`, `&`, U+2028 and U+2029 escaped,
everything else as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec


class JsonError(ValueError):
    """Text that is no JSON, or a value of another type than its reader needs; the message says which."""


_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_TRANSLATION: Final = str.maketrans(_ESCAPES)


def loads(data: bytes | str) -> Any:
    """The value of one JSON text. Raises JsonError."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        if not data.strip():
            raise JsonError("unexpected end of JSON input") from error
        raise JsonError(str(error)) from error


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
    if len(fields) > 1 or key not in fields:
        wanted = key.lower()
        found = None
        for name, value in fields.items():
            if name == key or name.lower() == wanted:
                found = value
        return found
    return fields[key]


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


def dumps(value: Any, *, sort_keys: bool = True) -> bytes:
    """Compact JSON, as `json.Marshal` writes a map (sorted) or a struct (not sorted)."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)
    return _escape(text)


def dumps_indented(value: Any, *, sort_keys: bool = True) -> bytes:
    """JSON with 4 spaces of indentation and no newline at the end, as `json.MarshalIndent` writes it."""
    text = json.dumps(value, ensure_ascii=False, indent=4, sort_keys=sort_keys)
    return _escape(text)


def _escape(text: str) -> bytes:
    # Lone surrogates can't be encoded; Go writes the replacement character for them.
    return text.translate(_TRANSLATION).encode("utf-8", "replace")
