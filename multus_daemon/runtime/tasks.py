"""Root tasks, which run until a signal or until one of them ends."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)


class StartError(Exception):
    """The program can't start; the message has reason and remedy."""


async def until_signal(tasks: Mapping[str, Coroutine[Any, Any, Any]]) -> list[asyncio.Task[Any]]:
    """Run root tasks until SIGTERM, SIGINT, or the end of one; return all of them, for the caller to end."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    named = {"signals": stopping.wait(), **tasks}
    running = [asyncio.create_task(work, name=name) for name, work in named.items()]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    return running


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the running tasks and wait for them. Raises the first failure of a task; the others are logged."""
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    failed: list[Exception] = []
    for task, result in zip(tasks, results, strict=True):
        if isinstance(result, Exception):
            if failed:
                log.error("%s: %s (root task %s)", type(result).__name__, result, task.get_name(), exc_info=result)
            result.add_note(f"root task {task.get_name()}")
            failed.append(result)
    if failed:
        raise failed[0]
