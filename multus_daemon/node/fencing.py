"""Which nodes can hold no addresses any more, for an ADD that finds a range full."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from multus_daemon import deadlines
from multus_daemon.runtime.recent import Recent
from multus_daemon.spec.ports import StoreUnavailableError

log = logging.getLogger(__name__)

KEPT_MAX: Final = 4096
"""Maximum number of nodes that are remembered."""


class Fencing:
    """Asks the API server for nodes, within a limit. For the event loop."""

    def __init__(self, why_gone: Callable[[str], Awaitable[str]]) -> None:
        """`why_gone` returns why a node can hold nothing any more, or raises StoreUnavailableError."""
        self._why_gone = why_gone
        clock = asyncio.get_running_loop().time
        self._present: Recent[str, bool] = Recent(KEPT_MAX, deadlines.NODE_PRESENT_SECONDS, clock=clock)
        """Nodes that can hold addresses."""

    async def gone(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return which of these nodes can hold nothing any more, and why; as far as the API server says it in time.

        Skips nodes that were present a moment ago: in a large cluster many ADDs may find a range full.
        """
        found: dict[str, str] = {}
        problem: Exception | None = None
        try:
            async with asyncio.timeout(deadlines.NODES_GONE_SECONDS):
                for node in nodes:
                    if self._present.get(node):
                        continue
                    try:
                        if why := await self._why_gone(node):
                            found[node] = why
                        else:
                            self._present[node] = True
                    except StoreUnavailableError as error:
                        problem = error
        except TimeoutError:
            problem = problem or TimeoutError(f"not all answers came within {deadlines.NODES_GONE_SECONDS:g} s")
        if problem:
            log.warning("cannot determine which of %d nodes are gone: %s", len(nodes), problem)
        return found
