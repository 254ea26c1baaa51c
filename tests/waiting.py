"""Wait until something is so, as long as a busy machine needs for it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final

PATIENCE: Final = float(os.environ.get("TEST_PATIENCE", "30"))
"""Seconds until a test that waits in vain fails; of a program that it runs, too."""


def until(condition: Callable[[], object], seconds: float = PATIENCE, what: object = "waited in vain") -> None:
    """Return when the condition holds. `what`: what to say in vain, or a function that returns it then."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.005)


async def eventually(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return when the condition holds, while other tasks go on."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
