"""The annotation network-status: one PATCH, and patience where the API server has none.

The PATCH goes to `pods/status`, so that no right to change pods is needed, and touches our annotation only. It carries
the pod's UID, which is immutable: for a pod created anew under the same name the API server answers 422 and names
`metadata.uid` as the cause.

Upstream's ClusterRole grants `update` and not `patch`. Where a PATCH is refused with 403 and a PUT is not, the writer
stays with PUT: the pod is read, and written back with its resourceVersion. That is two requests, and a third or fourth
where somebody else has changed the pod in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError, KubeError
from multus_daemon.metrics import ClusterMetrics
from multus_daemon.runtime.aio import KeyedLock
from multus_daemon.runtime.backoff import backoff
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.nad.status import ANNOTATION
from multus_daemon.spec.ports import StatusWriteError

log = logging.getLogger(__name__)

PENDING_MAX: Final = 4096
AT_ONCE: Final = 8
MERGE_PATCH: Final = "application/merge-patch+json"
CONFLICTS_MAX: Final = 3
"""So many times a pod that was changed meanwhile is read again at once. Kubelet and controllers write to a new pod."""

_FOR_GOOD: Final = frozenset({400, 404, 405, 413, 415, 422})
"""Answers that no repetition changes. 403 is not one: a role binding may come later."""


class _RefusedError(StatusWriteError):
    """It will never be written: the pod has gone or is another one, or the value is no annotation."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    pod: Pod
    value: str


class StatusWriter:
    """Writes network-statuses. `run` is a root task and writes what could not be written at once."""

    def __init__(
        self,
        client: ApiClient,
        *,
        metrics: ClusterMetrics | None = None,
        on_written: Callable[[], None] = lambda: None,
        patience: float = deadlines.NETWORK_STATUS_PATIENCE_SECONDS,
        retry: tuple[float, float] = deadlines.NETWORK_STATUS_RETRY_SECONDS,
        pending_max: int = PENDING_MAX,
    ) -> None:
        """`patience`: seconds; `pending_max`: how many wait at most, the oldest gives way.

        `on_written`: called with each success; must not block or raise.
        """
        self._client = client
        self._metrics = metrics or ClusterMetrics()
        self._on_written = on_written
        self._patience = patience
        self._retry = retry
        self._pending_max = pending_max
        # By the pod's UID, oldest first. One lock for each UID, so that an older value never lands on a newer one.
        self._pending: OrderedDict[str, _Pending] = OrderedDict()
        self._locks = KeyedLock()
        self._arrived = asyncio.Event()
        self._kicked = asyncio.Event()
        self._may_patch = True

    @property
    def pending(self) -> int:
        """How many wait to be written."""
        return len(self._pending)

    async def write(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """See `ports.ClusterStore.write_network_status`."""
        problem = "earlier value is still being written"
        # What waits is older than this value, whatever becomes of it.
        self._remove(self._pending.get(pod.uid))
        try:
            async with asyncio.timeout(self._patience), self._locks.hold(pod.uid):
                for delay in backoff(0.1, 0.5, jitter=0.2):
                    try:
                        await self._attempt(pod, value)
                        return
                    except KubeError as error:
                        problem = str(error)
                        asked = error.retry_after if isinstance(error, ApiUnavailableError) else None
                    await asyncio.sleep(max(delay, asked or 0.0))
        except _RefusedError:
            self._metrics.statuses_dropped.inc()
            raise
        except TimeoutError:
            if not keep_trying:
                raise StatusWriteError(f"{ANNOTATION} of pod {pod}: {problem}") from None
            self._put_off(pod, value)
            raise StatusWriteError(f"{ANNOTATION} of pod {pod}: {problem}; it is tried again") from None
        except asyncio.CancelledError:
            # Whoever waited has gone; the pod still needs it.
            if keep_trying:
                self._put_off(pod, value)
            raise

    def kick(self) -> None:
        """The API server is back: try now what waits."""
        self._kicked.set()

    async def run(self) -> None:
        """Write what waits, for ever."""
        while True:
            await self._arrived.wait()
            await self.flush()

    async def flush(self) -> None:
        """Write all that waits; returns when nothing does."""
        delays = backoff(*self._retry, jitter=0.2)
        while self._pending:
            # One is tried alone: a server that is away is not to be asked by all of them.
            if await self._try_again(next(iter(self._pending.values()))):
                delays = backoff(*self._retry, jitter=0.2)
                await self._write_side_by_side()
            if self._pending:
                self._kicked.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(next(delays)):
                        await self._kicked.wait()
        self._arrived.clear()

    async def _write_side_by_side(self) -> None:
        """Everything that waits now, until one fails."""
        waiting = list(self._pending.values())

        async def worker() -> None:
            while waiting:
                if not await self._try_again(waiting.pop()):
                    waiting.clear()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(waiting))):
                group.create_task(worker())

    async def _try_again(self, item: _Pending) -> bool:
        """One attempt; False where it is to be tried again, behind the others."""
        async with self._locks.hold(item.pod.uid):
            if self._pending.get(item.pod.uid) is not item:
                return True
            try:
                await self._attempt(item.pod, item.value)
            except _RefusedError as error:
                log.info("%s", error)
                self._metrics.statuses_dropped.inc()
            except KubeError as error:
                log.debug("%s of pod %s: %s", ANNOTATION, item.pod, error)
                if self._pending.get(item.pod.uid) is item:
                    self._pending.move_to_end(item.pod.uid)
                return False
            else:
                log.info("%s of pod %s is written at last", ANNOTATION, item.pod)
            self._remove(item)
            return True

    async def _attempt(self, pod: Pod, value: str) -> None:
        """Write it, by the way that worked last. Raises _RefusedError, KubeError."""
        try:
            try:
                await (self._patch if self._may_patch else self._put)(pod, value)
            except ApiError as error:
                if error.status != 403:
                    raise
                await self._take_other_way(pod, value, error)
        except ApiError as error:
            if error.status == 404:
                raise _RefusedError(f"{ANNOTATION} of pod {pod}: the pod has gone") from error
            if error.status == 422 and "metadata.uid" in error.fields:
                raise _created_anew(pod) from error
            if error.status in _FOR_GOOD:
                raise _RefusedError(f"{ANNOTATION} of pod {pod}: {error}") from error
            raise
        self._on_written()

    async def _take_other_way(self, pod: Pod, value: str, refusal: ApiError) -> None:
        """PUT where PATCH was refused, or the reverse, and stay with it. Raises _RefusedError, KubeError."""
        may_patch = not self._may_patch
        try:
            await (self._patch if may_patch else self._put)(pod, value)
        except ApiError as error:
            # Neither is allowed: what was allowed last may be again, as soon as somebody binds the role.
            raise (refusal if error.status == 403 else error) from error
        if self._may_patch == may_patch:
            return
        self._may_patch = may_patch
        if may_patch:
            log.info("pods/status: PATCH is allowed, network-status is written with one request again")
        else:
            log.warning(
                "pods/status: PATCH is forbidden and PUT is not, so network-status is written with GET and PUT from "
                "now on: grant the verb patch on pods/status to the daemon's ClusterRole. %s",
                refusal,
            )

    async def _patch(self, pod: Pod, value: str) -> None:
        """Raises KubeError."""
        body = {"metadata": {"uid": pod.uid, "annotations": {ANNOTATION: value}}}
        await self._client.request(
            "PATCH",
            _status_path(pod),
            body=msgspec.json.encode(body),
            content_type=MERGE_PATCH,
            timeout=deadlines.NETWORK_STATUS_ATTEMPT_SECONDS,
        )

    async def _put(self, pod: Pod, value: str) -> None:
        """Raises _RefusedError, KubeError."""
        for attempt in range(1, CONFLICTS_MAX + 1):
            body = await self._client.request(
                "GET", objects.pod_path(pod.namespace, pod.name), timeout=deadlines.NETWORK_STATUS_ATTEMPT_SECONDS
            )
            try:
                await self._client.request(
                    "PUT",
                    _status_path(pod),
                    body=_with_annotation(body, pod, value),
                    content_type="application/json",
                    timeout=deadlines.NETWORK_STATUS_ATTEMPT_SECONDS,
                )
            except ApiError as error:
                if error.status != 409 or attempt == CONFLICTS_MAX:
                    raise
            else:
                self._metrics.statuses_put.inc()
                return

    def _put_off(self, pod: Pod, value: str) -> None:
        self._pending.pop(pod.uid, None)
        self._pending[pod.uid] = _Pending(pod, value)
        if len(self._pending) > self._pending_max:
            _, dropped = self._pending.popitem(last=False)
            log.error("%s of pod %s will not be written: too many wait", ANNOTATION, dropped.pod)
            self._metrics.statuses_dropped.inc()
        self._arrived.set()

    def _remove(self, item: _Pending | None) -> None:
        if item and self._pending.get(item.pod.uid) is item:
            del self._pending[item.pod.uid]


def _status_path(pod: Pod) -> str:
    return f"{objects.pod_path(pod.namespace, pod.name)}/status"


def _created_anew(pod: Pod) -> _RefusedError:
    return _RefusedError(f"{ANNOTATION} of pod {pod}: the pod has been created anew, its UID is no longer {pod.uid}")


def _with_annotation(body: bytes, pod: Pod, value: str) -> bytes:
    """The pod in `body` with the annotation: all else, the resourceVersion above all, as it came.

    Raises _RefusedError for another pod of the name, ApiUnavailableError for what is not a pod.
    """
    try:
        found = msgspec.json.decode(body)
        metadata = found["metadata"]
        uid = metadata["uid"]
        metadata["annotations"] = {**(metadata.get("annotations") or {}), ANNOTATION: value}
    except (*objects.DECODE_ERRORS, KeyError, TypeError, AttributeError) as error:
        raise ApiUnavailableError(f"GET of pod {pod}: not a pod: {error!r}") from error
    if uid != pod.uid:
        raise _created_anew(pod)
    return msgspec.json.encode(found)
