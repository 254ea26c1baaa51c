"""Values of which only the newest matters, written one after another and repeated while the API server is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from multus_daemon import deadlines
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import KubeError, NoAnswerError
from multus_daemon.runtime.deadline import backoff

log = logging.getLogger(__name__)

V = TypeVar("V")

PENDING_MAX: Final = 4096
# Final refusals: the object has gone, or is another one. 403 is not one: a role binding may be made later.
_FOR_GOOD: Final = frozenset({400, 404, 405, 413, 415, 422})


class LatestWriter(Generic[V]):
    """Writes the newest value of each key. `run` is a root task."""

    def __init__(self, client: ApiClient, write: Callable[[V], Awaitable[None]]) -> None:
        """`write` makes one attempt. Raises KubeError."""
        self._client = client
        self._write = write
        # By key: what is written, for messages, and its value.
        self._pending: OrderedDict[str, tuple[str, V]] = OrderedDict()
        self._arrived = asyncio.Event()
        self._kicked = asyncio.Event()
        self._is_away = False
        """True if the last attempt had no answer."""

    def put(self, key: str, what: str, value: V) -> None:
        """Queue the value, in place of one of the same key that is not written yet. `what` names it in messages."""
        self._pending[key] = what, value
        if len(self._pending) > PENDING_MAX:
            _, (dropped, _) = self._pending.popitem(last=False)
            log.error("%s will not be written: too many are pending", dropped)
        self._arrived.set()
        self._kicked.set()

    def kick(self) -> None:
        """Write the pending values now if the API server was away: it has answered. A refusal keeps its pause."""
        if self._is_away:
            self._kicked.set()

    async def run(self) -> None:
        """Write for ever."""
        delays = backoff(*deadlines.CONDITION_RETRY_SECONDS, jitter=0.2)
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._pending:
                # Compared by identity: the same value may be put twice.
                key, item = next(iter(self._pending.items()))
                what, value = item
                try:
                    await self._write(value)
                    delays = backoff(*deadlines.CONDITION_RETRY_SECONDS, jitter=0.2)
                except KubeError as error:
                    self._is_away = isinstance(error, NoAnswerError)
                    if error.status not in _FOR_GOOD:
                        log.debug("%s: %s; tried again", what, error)
                        # One that is refused for its own sake must not hold up the others.
                        if key in self._pending:
                            self._pending.move_to_end(key)
                        await self._pause(next(delays), error.retry_after or 0.0)
                        continue
                    log.info("%s is not written: %s", what, error)
                # A newer value may have come meanwhile.
                if self._pending.get(key) is item:
                    del self._pending[key]

    async def _pause(self, seconds: float, asked: float) -> None:
        shortest, longest = deadlines.CONDITION_RETRY_SECONDS
        self._kicked.clear()
        await asyncio.sleep(max(shortest, min(asked, longest)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._kicked.wait(), max(0.0, seconds - shortest))
        await self._client.turn()
