"""The sysctls that the node's administrator allows: `/etc/cni/tuning/allowlist.conf`, a regular expression per line.

The expressions are Go's (RE2 syntax) and match anywhere in the key. One that can't be translated is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from multus_daemon.runtime import fs
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError, IoFailureError

PATH: Final = "/etc/cni/tuning/allowlist.conf"
_LIMIT: Final = 1024 * 1024
# An escape, a set (`]` may come first, named classes are allowed), or a single character.
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
    """Raise InvalidNetworkConfigError for a key that the file at `path` does not allow, IoFailureError if unreadable.

    Without the file every key is allowed. Blocks.
    """
    try:
        text = fs.read_limited(path, limit=_LIMIT).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return
    except OSError as error:
        raise IoFailureError(f"open {path}: {error.strerror}", "the allowlist of sysctls") from error
    patterns = [line.strip() for line in text.split("\n") if line.strip()]
    for key in keys:
        if not is_allowed(key, patterns):
            raise InvalidNetworkConfigError(
                f"Sysctl {key} is not allowed. Only the following sysctls are allowed: [{' '.join(patterns)}]",
                f"see the node's {PATH}",
            )


def is_allowed(key: str, patterns: Sequence[str]) -> bool:
    """Report whether an expression matches in the key. Raises InvalidNetworkConfigError for a malformed one."""
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
    """Translate an expression to Python's syntax, which differs in `$`, `\\z` and named classes."""
    return "".join(_piece(found[0]) for found in _PIECE.finditer(pattern))


def _piece(piece: str) -> str:
    if piece in ("$", r"\z"):
        # Python's `$` also matches before a newline at the end.
        return r"\Z"
    if piece == r"\Z":
        raise re.error(r"invalid escape sequence: \Z")
    return _NAMED.sub(_named, piece) if len(piece) > 1 and piece.startswith("[") else piece


def _named(found: re.Match[str]) -> str:
    if found[1] or found[2] not in _CLASSES:
        raise re.error(f"invalid character class range: {found[0]}")
    return _CLASSES[found[2]]
