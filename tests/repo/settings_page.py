"""Make the tables of docs/configuration.md from the docstrings, types and defaults of the settings.

    python -m tests.repo.settings_page            # after a change of multus_daemon/settings/keys.py

A table stands between `<!-- settings: NAME -->` and `<!-- end of settings -->`; what is between them is replaced.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from multus_daemon import settings
from multus_daemon.settings import keys

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
WITHOUT_EFFECT: Final = "without effect"
_BLOCK: Final = re.compile(r"(<!-- settings: ([\w ]+) -->\n).*?(<!-- end of settings -->)", re.DOTALL)
_ANY: Final = 1_000_000
"""A bound of this size or more is never reached in practice."""
_NOUNS: Final = {str: "string", bool: "boolean", int: "integer", float: "number", Any: "object"}


def main() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text()))


def filled(text: str) -> str:
    """The page with its tables. Raises KeyError for a table that does not exist."""
    return _BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}{block[3]}", text)


# --- a row -----------------------------------------------------------------------------------------------------------


def type_of(hint: Any) -> str:
    """Return the page's name of the type: `number, 0 to 600`."""
    if get_origin(hint) is Annotated:
        kind, *metadata = get_args(hint)
        (limits,) = [item for item in metadata if isinstance(item, msgspec.Meta)]
        return type_of(kind) + _range(limits)
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [option for option in get_args(hint) if option is not type(None)]
        return type_of(hint)
    if get_origin(hint) is Literal:
        *others, last = [f"`{value}`" for value in get_args(hint)]
        return f"{', '.join(others)} or {last}"
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return f"list of {type_of(item)}" if get_origin(item) is Literal else f"list of {type_of(item)}s"
    if get_origin(hint) is dict:
        value = get_args(hint)[1]
        return "object" if value is Any else f"object of {type_of(value)}s"
    return _NOUNS.get(hint, "object")


def _range(limits: msgspec.Meta) -> str:
    low, above, high = limits.ge, limits.gt, limits.le
    if high is None and low is None and above is None:
        return ""
    if high is None or high >= _ANY:
        return f", from {low:g}"
    return f", {low:g} to {high:g}" if low is not None else f", above {above:g}, to {high:g}"


def default_of(value: Any) -> str:
    """Return the page's text for a default."""
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None:
        return "none"
    if value in ("", (), {}) or isinstance(value, msgspec.Struct):
        return "empty"
    if isinstance(value, tuple):
        return f"`{json.dumps(list(value))}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _row(key: str, hint: Any, default: Any, paragraphs: Sequence[str]) -> str:
    return f"| `{key}` | {type_of(hint)} | {default_of(default)} | {' '.join(paragraphs)} |"


def descriptions() -> dict[tuple[str, str], list[str]]:
    """Return the paragraphs of the docstrings below the fields of `settings`, by class and field.

    Only the source has them. That of a class itself is with an empty name.
    """
    found = {}
    for kind in ast.parse(inspect.getsource(keys)).body:
        if isinstance(kind, ast.ClassDef):
            paragraphs = (ast.get_docstring(kind) or "").split("\n\n")
            found[kind.name, ""] = [" ".join(item.split()) for item in paragraphs]
            for before, after in zip(kind.body, kind.body[1:], strict=False):
                if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
                    continue
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    paragraphs = str(after.value.value).split("\n\n")
                    found[kind.name, before.target.id] = [" ".join(item.split()) for item in paragraphs]
    return found


# --- the tables ------------------------------------------------------------------------------------------------------


def _table(head: str, rows: Iterator[str]) -> str:
    columns = head.count("|") - 1
    return "\n".join([head, "|" + " --- |" * columns, *rows]) + "\n"


def _rows(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """A field without a docstring has no row."""
    described = descriptions()
    hints = get_type_hints(kind, include_extras=True)
    for key, name, default in _fields(kind):
        if paragraphs := described.get((kind.__name__, name)):
            yield _row(prefix + key, hints[name], default, paragraphs)
        if inner := INNER.get(key):
            yield from _rows(inner, f"{key}.")


def _fields(kind: type[Any]) -> Iterator[tuple[str, str, Any]]:
    """Key, name and default of each."""
    if issubclass(kind, msgspec.Struct):
        yield from ((item.encode_name, item.name, item.default) for item in msgspec.structs.fields(kind))
        return
    for item in fields(kind):
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        yield item.metadata["key"], item.name, default


def _group(kind: type[Any]) -> Callable[[], str]:
    return lambda: _table("| key | type | default | effect |", _rows(kind))


def _without_effect() -> str:
    values = {
        f"{key}: {value}": f"removed: `{instead}` is used" for (key, value), instead in settings.REMOVED_VALUES.items()
    }
    reasons = {**settings.WITHOUT_EFFECT, **values}
    rows = (f"| `{key}` | {reason} |" for key, reason in sorted(reasons.items()))
    return _table("| key | why |", rows)


INNER: Final[Mapping[str, type[Any]]] = {
    "perNodeCertificate": keys.PerNodeCertificate,
    "logOptions": keys.LogOptions,
    "metricsTLS": keys.MetricsTls,
}
"""Keys whose values have keys of their own."""
TABLES: Final[Mapping[str, Callable[[], str]]] = {
    **{name: _group(kind) for name, kind in keys.GROUPS.items()},
    WITHOUT_EFFECT: _without_effect,
}


if __name__ == "__main__":
    main()
