"""Settings on the command line: one flag for each key, the flags of earlier daemons under their old names.

`multusAutoconfigDir` is `--multus-autoconfig-dir`. Spelling is Go's, as upstream's daemon reads it: one dash or two,
the value behind `=` or as the next word, a boolean without a value is true.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import types
from collections.abc import Collection, Sequence
from dataclasses import Field, fields
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from multus_daemon import settings

_GO_BOOLEANS: Final = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}
_WORD_ENDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class _Set(argparse.Action):
    """Keeps the flag as it was spelt, and its value, in the dict `flags` of the namespace: `settings.Flags`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.flags = {**namespace.flags, self.dest: (option_string, _value(self.metavar, str(values)))}


def add_to(
    parser: argparse.ArgumentParser,
    *,
    groups: Sequence[str] = tuple(settings.GROUPS),
    keys: Collection[str] | None = None,
    texts: bool,
) -> None:
    """Add the flags of the settings in `groups`, each group under its own head; `texts`: with what they do, for help.

    `keys`: of these settings only.

    What is given of them is in `flags` of the parsed namespace.
    """
    parser.set_defaults(flags={})
    described = descriptions() if texts else {}
    for name in groups:
        kind = settings.GROUPS[name]
        wanted = [item for item in fields(kind) if keys is None or item.metadata["key"] in keys]
        if not wanted:
            continue
        group = parser.add_argument_group(name, described.get((kind.__name__, ""), [""])[0])
        hints = get_type_hints(kind)
        for item in wanted:
            sort = _sort(hints[item.name])
            key = item.metadata["key"]
            summary = described.get((kind.__name__, item.name), [""])[0]
            text = f"{key}: {summary}".replace("%", "%%")
            optional: dict[str, Any] = {"nargs": "?", "const": "true"} if sort == "BOOL" else {}
            group.add_argument(
                *(f"--{flag}" for flag in _spellings(item)),
                action=_Set,
                dest=key,
                metavar=sort,
                help=text,
                default=argparse.SUPPRESS,
                **optional,
            )


def names() -> frozenset[str]:
    """Every flag, without dashes."""
    return frozenset(flag for kind in settings.GROUPS.values() for item in fields(kind) for flag in _spellings(item))


def _spellings(item: Field[Any]) -> list[str]:
    own = item.metadata["flag"] or flag_of(item.metadata["key"])
    return list(dict.fromkeys((own, *item.metadata["old_flags"])))


def flag_of(key: str) -> str:
    """`multusAutoconfigDir` -> `multus-autoconfig-dir`, `forceCNIVersion` -> `force-cni-version`."""
    return _WORD_ENDS.sub("-", key).lower()


def _sort(hint: Any) -> str:
    """What a value looks like on the command line."""
    if get_origin(hint) in (Union, types.UnionType):
        [hint] = [option for option in get_args(hint) if option is not type(None)]
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if get_origin(hint) is tuple and (get_args(hint)[0] is str or get_origin(get_args(hint)[0]) is Literal):
        return "A,B,..."
    return {str: "TEXT", bool: "BOOL", int: "NUMBER", float: "NUMBER"}.get(hint, "JSON")


def _value(sort: str | tuple[str, ...] | None, text: str) -> Any:
    """`text` as JSON has it; what is no such value stays text, which `settings` refuses with the flag's name."""
    if sort == "BOOL":
        return _GO_BOOLEANS.get(text, text)
    if sort == "A,B,..." and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    if sort in ("NUMBER", "JSON", "A,B,..."):
        try:
            return msgspec.json.decode(text)
        except (ValueError, RecursionError):
            return text
    return text


def descriptions() -> dict[tuple[str, str], list[str]]:
    """The paragraphs of the docstrings below the fields of `settings`, by class and field: only its source has them.

    The first says what the setting does, and is the help; the others are for the page of the documentation. That of a
    class itself is with an empty name.
    """
    found = {}
    for kind in ast.parse(inspect.getsource(settings)).body:
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
