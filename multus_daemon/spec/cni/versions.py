"""CNI versions: which there are, how they compare, what each allows (containernetworking/cni `pkg/version`)."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

SUPPORTED: Final = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
CURRENT: Final = "1.1.0"
# A configuration without `cniVersion` is one of the first specification.
IMPLIED: Final = "0.1.0"

# The first version that has the verb.
FIRST_WITH: Final = {"CHECK": (0, 4, 0), "STATUS": (1, 1, 0), "GC": (1, 1, 0)}


@lru_cache(maxsize=64)
def parse(version: str) -> tuple[int, int, int]:
    """`"0.3.1"` as numbers. One to three parts, missing ones are 0, the empty string is 0.1.0. Raises ValueError."""
    parts = (version or IMPLIED).split(".")
    if len(parts) > 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"CNI version {version!r}: one to three numbers with dots between them are needed")
    numbers = [int(part) for part in parts] + [0, 0]
    return numbers[0], numbers[1], numbers[2]


def at_least(version: str, minimum: str) -> bool:
    """True where `version` is `minimum` or newer. Raises ValueError."""
    return parse(version) >= parse(minimum)


def allows(version: str, verb: str) -> bool:
    """True where a configuration of `version` may be called with `verb`. Raises ValueError."""
    return parse(version) >= FIRST_WITH.get(verb, (0, 0, 0))


def is_supported(version: str) -> bool:
    """True for the versions that the libraries of the field advertise, "" (0.1.0) included."""
    return (version or IMPLIED) in SUPPORTED
