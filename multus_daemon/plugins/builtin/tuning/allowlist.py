"""Which sysctls the node's administrator allows: `/etc/cni/tuning/allowlist.conf`, a regular expression on each line.

The expressions are Go's (RE2 syntax), searched for anywhere in the key. One that can't be read as such here is
refused, never passed over: what it was to allow is not allowed then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from multus_daemon.runtime import fs
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError, IoFailureError

PATH: Final = "/etc/cni/tuning/allowlist.conf"
"""As the host sees it."""
_LIMIT: Final = 1024 * 1024
# An escape, a set (in which `]` may come first, and named classes), a single character.
_PIECE: Final = re.compile(r"\\.|\[\^?\]?(?:\[:\^?[a-z]+:\]|\\.|[^\]\\])*\]|.", re.DOTALL)
_NAMED: Final = re.compile(r"\[:(\^?)([a-z]+):\]")
_CLASSES: Final[Mapping[str, str]] = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": r"\x00-\x7f",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}


def require_allowed(keys: Iterable[str], path: Path) -> None:
    """Refuse a key that no line of the file at `path` allows; without the file every one is allowed. Blocks.

    Raises InvalidNetworkConfigError, IoFailureError.
    """
    patterns = _lines(path)
    if patterns is None:
        return
    for key in keys:
        if not is_allowed(key, patterns):
            raise InvalidNetworkConfigError(
                f"Sysctl {key} is not allowed. Only the following sysctls are allowed: [{' '.join(patterns)}]",
                f"the node's {PATH} says so",
            )


def _lines(path: Path) -> list[str] | None:
    try:
        text = fs.read_limited(path, limit=_LIMIT).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IoFailureError(f"open {path}: {error.strerror}", "the allowlist of sysctls") from error
    return [line.strip() for line in text.split("\n") if line.strip()]


def is_allowed(key: str, patterns: Sequence[str]) -> bool:
    """Whether one of the expressions is found in the key. Raises InvalidNetworkConfigError for one that is none."""
    for pattern in patterns:
        try:
            if re.search(_translated(pattern), key, re.ASCII):
                return True
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidNetworkConfigError(
                f"error parsing regexp: {error}: `{pattern}`", f"a line of the node's {PATH}"
            ) from error
    return False


def _translated(pattern: str) -> str:
    """The expression in Python's syntax, where that differs: `$`, `\\z`, named classes."""
    return "".join(_piece(found[0]) for found in _PIECE.finditer(pattern))


def _piece(piece: str) -> str:
    if piece in ("$", r"\z"):
        # Python's `$` also stands before a newline at the end.
        return r"\Z"
    if piece == r"\Z":
        raise re.error(r"invalid escape sequence: \Z")
    return _NAMED.sub(_named, piece) if len(piece) > 1 and piece.startswith("[") else piece


def _named(found: re.Match[str]) -> str:
    if found[1] or found[2] not in _CLASSES:
        raise re.error(f"invalid character class range: {found[0]}")
    return _CLASSES[found[2]]
