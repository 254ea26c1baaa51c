"""Exponential backoff."""

from __future__ import annotations

import random
from collections.abc import Iterator


def backoff(first: float, last: float, *, jitter: float = 0.0) -> Iterator[float]:
    """Yield delays in seconds that double from `first` to `last`, each changed by up to `jitter` of itself."""
    delay = first
    while True:
        yield delay * (1 + random.uniform(-jitter, jitter))
        delay = min(delay * 2, last)
