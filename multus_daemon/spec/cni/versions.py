"""CNI versions: the supported ones, their order, and their verbs (containernetworking/cni `pkg/version`)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

SUPPORTED: Final = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
CURRENT: Final = "1.1.0"
# Version of a configuration without `cniVersion`.
IMPLIED: Final = "0.1.0"
_NUMBERS: Final = re.compile(r"([0-9]+)(?:\.([0-9]+)(?:\.([0-9]+))?)?")
# The first version with the verb.
FIRST_WITH: Final = {"CHECK": (0, 4, 0), "STATUS": (1, 1, 0), "GC": (1, 1, 0)}


@lru_cache(maxsize=64)
def parse(version: str) -> tuple[int, int, int]:
    """Return the three numbers of a version such as "0.3.1". Missing ones are 0; "" means 0.1.0. Raises ValueError."""
    if not (found := _NUMBERS.fullmatch(version or IMPLIED)):
        raise ValueError(f"CNI version {version!r}: one to three numbers with dots between them are needed")
    return int(found[1]), int(found[2] or 0), int(found[3] or 0)


def at_least(version: str, minimum: str) -> bool:
    """Return True if `version` is `minimum` or newer. Raises ValueError."""
    return parse(version) >= parse(minimum)


def allows(version: str, verb: str) -> bool:
    """Return True if a configuration of `version` allows `verb`. Raises ValueError."""
    return parse(version) >= FIRST_WITH.get(verb, (0, 0, 0))


def is_supported(version: str) -> bool:
    """Return True for `SUPPORTED` and for "", which means 0.1.0."""
    return (version or IMPLIED) in SUPPORTED
