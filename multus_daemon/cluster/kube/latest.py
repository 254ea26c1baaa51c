"""Values of which only the newest matters, written in the background and repeated while the API server is away."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import KubeError, NoAnswerError
from multus_daemon.runtime.workqueue import WorkQueue

log = logging.getLogger(__name__)

V = TypeVar("V")

PENDING_MAX: Final = 4096
# Final refusals: the object has gone, or is another one. 403 is not one: a role binding may be made later.
FOR_GOOD: Final = frozenset({400, 404, 405, 413, 415, 422})


class LatestWriter(Generic[V]):
    """Writes the newest value of each key. `run` is a root task, `flush` returns when no value is left."""

    def __init__(
        self,
        client: ApiClient,
        write: Callable[[V], Awaitable[None]],
        *,
        retry: tuple[float, float],
        least_seconds: float = 0.0,
        at_once: int = 1,
    ) -> None:
        """`write` makes one attempt. Raises KubeError. `retry`: the first and the longest pause in seconds.

        `least_seconds`: a pause is this long, or as long as the API server asks; a new value ends the rest of it. If 0,
        only `kick` ends a pause.
        """
        self._client = client
        self._write = write
        # By key: what is written, for messages, and its value.
        self._pending: OrderedDict[str, tuple[str, V]] = OrderedDict()
        self._is_away = False
        """True if the last attempt had no answer."""

        def least(error: Exception) -> float:
            asked = error.retry_after if isinstance(error, KubeError) else None
            return max(least_seconds, min(asked or 0.0, retry[1])) if least_seconds else 0.0

        self._ends_pauses = least_seconds > 0
        self._queue = WorkQueue[str](
            self._write_pending, retry=retry, jitter=0.2, shared=True, failed=self._failed, least=least, at_once=at_once
        )
        self.run = self._queue.run
        self.flush = self._queue.drain

    @property
    def pending(self) -> int:
        """The number of values that are not written yet."""
        return len(self._pending)

    def put(self, key: str, what: str, value: V) -> None:
        """Queue the value, in place of one of the same key that is not written yet. `what` names it in messages."""
        self._pending[key] = what, value
        if len(self._pending) > PENDING_MAX:
            oldest, (dropped, _) = self._pending.popitem(last=False)
            self._queue.forget(oldest)
            log.error("%s will not be written: too many are pending", dropped)
        self._queue.add_after(key, 0)
        if self._ends_pauses:
            self._queue.resume()

    def newest(self, key: str) -> V | None:
        """Return the value of the key that is not written yet."""
        item = self._pending.get(key)
        return item[1] if item else None

    def withdraw(self, key: str) -> None:
        """Do not write the value of the key, unless that is under way."""
        if self._pending.pop(key, None):
            self._queue.forget(key)

    def kick(self) -> None:
        """Write the pending values now if the API server was away: it has answered. A refusal keeps its pause."""
        if self._is_away:
            self._queue.resume()

    async def _write_pending(self, key: str) -> None:
        if self._queue.failures(key):
            await self._client.turn()
        # Compared by identity: the same value may be put twice.
        item = self._pending.get(key)
        if item is None:
            return
        what, value = item
        try:
            await self._write(value)
        except KubeError as error:
            self._is_away = isinstance(error, NoAnswerError)
            if error.status not in FOR_GOOD:
                raise
            log.info("%s is not written: %s", what, error)
        except Exception as error:
            # A fault in one value must not stop the daemon.
            log.error("%s is not written", what, exc_info=error)
        # A newer value may have come meanwhile: it is written next.
        if self._pending.get(key) is item:
            del self._pending[key]

    def _failed(self, key: str, error: Exception, seconds: float) -> None:
        # One that is refused for its own sake must not hold up the others, nor stay when there are too many.
        if key in self._pending:
            self._pending.move_to_end(key)
            log.debug("%s: %s; tried again in %.1f s", self._pending[key][0], error, seconds)
