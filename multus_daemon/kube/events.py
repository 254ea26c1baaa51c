"""Events about pods (core/v1), from component `multus` as upstream names it, never in the way of anything.

What is said about one pod within a moment becomes one Event per type and reason, the messages joined by `; `: one
object for an ADD with many networks, and each message still to be found in it. (Not by line ends: kubectl cuts a
message at the first one.) What was said before is counted up in the same object. Each pod may cause so many, as with
client-go.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec

from multus_daemon.base.aio import backoff
from multus_daemon.kube.errors import ApiError, ApiUnavailableError, KubeError
from multus_daemon.kube.observer import NullObserver, Observer
from multus_daemon.kube.status import MERGE_PATCH
from multus_daemon.ports import Pod

log = logging.getLogger(__name__)

COMPONENT: Final = "multus"
QUEUE_MAX: Final = 1000
"""Messages."""
GATHER_SECONDS: Final = 0.1
KEEP_TRYING_SECONDS: Final = 60.0
"""After that an Event is dropped, and the next one has its turn."""
ATTEMPT_SECONDS: Final = 5.0
RETRY_SECONDS: Final = (0.5, 10.0)
MESSAGE_MAX: Final = 4096
REMEMBERED: Final = 1024
BURST: Final = 25
REFILL_SECONDS: Final = 300.0
"""A pod may cause `BURST` Events at once, and one more in each such time."""
_NAME_MAX: Final = 253


class Client(Protocol):
    """What is needed of the API client."""

    async def request(self, method: str, path: str, *, body: bytes, content_type: str, timeout: float) -> bytes:
        """The body of the answer. Raises KubeError."""
        ...


@dataclass(slots=True)
class _Batch:
    """What was said about one pod; messages by type and reason, in the order in which they came."""

    pod: Pod
    due: float
    messages: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    size: int = 0


@dataclass(slots=True)
class _Posted:
    """An Event object that exists."""

    path: str
    count: int = 1


@dataclass(slots=True)
class _Allowance:
    tokens: float
    since: float


class EventRecorder:
    """Queues Events and posts them; `run` is a root task."""

    def __init__(
        self,
        client: Client,
        *,
        host: str = "",
        observer: Observer | None = None,
        queue_max: int = QUEUE_MAX,
        keep_trying: float = KEEP_TRYING_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`host`: the node's name; `clock`: Unix time; `keep_trying`: seconds for each Event."""
        self._client = client
        self._host = host
        self._observer = observer or NullObserver()
        self._queue_max = queue_max
        self._keep_trying = keep_trying
        self._clock = clock
        self._batches: OrderedDict[str, _Batch] = OrderedDict()
        self._queued = 0
        self._arrived = asyncio.Event()
        self._posted: OrderedDict[tuple[str, str, str, str], _Posted] = OrderedDict()
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """See `ports.ClusterStore`."""
        if self._queued >= self._queue_max:
            self._observer.events_dropped(1)
            return
        batch = self._batches.get(pod.uid)
        if batch is None:
            batch = self._batches[pod.uid] = _Batch(pod, time.monotonic() + GATHER_SECONDS)
        messages = batch.messages.setdefault((kind, reason), [])
        if message not in messages:
            messages.append(message)
            batch.size += 1
            self._queued += 1
        self._arrived.set()

    async def run(self) -> None:
        """Post what is queued, for ever."""
        while True:
            await self._arrived.wait()
            await self.flush()

    async def flush(self) -> None:
        """Post all that is queued; returns when nothing is."""
        while self._batches:
            first = next(iter(self._batches.values()))
            await asyncio.sleep(max(0.0, first.due - time.monotonic()))
            _, batch = self._batches.popitem(last=False)
            try:
                for (kind, reason), messages in batch.messages.items():
                    await self._post(batch.pod, kind, reason, messages)
            finally:
                # Until here they count as queued: the queue's bound is on what is not posted yet.
                self._queued -= batch.size
        self._arrived.clear()

    async def _post(self, pod: Pod, kind: str, reason: str, messages: list[str]) -> None:
        """One Event, made or counted up. Never raises KubeError."""
        if not self._allowed(pod.uid):
            self._observer.events_dropped(len(messages))
            return
        message = "; ".join(messages)
        message = message if len(message) <= MESSAGE_MAX else message[: MESSAGE_MAX - 3] + "..."
        deadline = time.monotonic() + self._keep_trying
        for delay in backoff(*RETRY_SECONDS, jitter=0.2):
            try:
                await self._attempt(pod, kind, reason, message)
                self._observer.event_written()
                return
            except KubeError as error:
                # A namespace that is being deleted takes none: 403.
                if isinstance(error, ApiError) or time.monotonic() + delay > deadline:
                    log.info("Event %s of pod %s is dropped: %s", reason, pod, error)
                    self._observer.events_dropped(len(messages))
                    return
                asked = error.retry_after if isinstance(error, ApiUnavailableError) else None
            await asyncio.sleep(max(delay, min(asked or 0.0, self._keep_trying)))

    async def _attempt(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        key = (pod.uid, kind, reason, message)
        now = _timestamp(self._clock())
        if posted := self._posted.get(key):
            body = {"count": posted.count + 1, "lastTimestamp": now}
            try:
                await self._send("PATCH", posted.path, body, MERGE_PATCH)
                posted.count += 1
                return
            except ApiError as error:
                # The API server forgets Events after an hour.
                if error.status != 404:
                    raise
                del self._posted[key]
        collection = f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/events"
        suffix = f".{time.time_ns():x}"
        name = pod.name[: _NAME_MAX - len(suffix)].rstrip(".-") + suffix
        await self._send("POST", collection, self._object(pod, name, kind, reason, message, now), "application/json")
        self._posted[key] = _Posted(f"{collection}/{quote(name, safe='')}")
        if len(self._posted) > REMEMBERED:
            self._posted.popitem(last=False)

    async def _send(self, method: str, path: str, body: dict[str, Any], content_type: str) -> None:
        await self._client.request(
            method, path, body=msgspec.json.encode(body), content_type=content_type, timeout=ATTEMPT_SECONDS
        )

    def _object(self, pod: Pod, name: str, kind: str, reason: str, message: str, now: str) -> dict[str, Any]:
        source = {"component": COMPONENT} | ({"host": self._host} if self._host else {})
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": pod.namespace, "name": name},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": pod.namespace,
                "name": pod.name,
                "uid": pod.uid,
            },
            "type": kind,
            "reason": reason,
            "message": message,
            "source": source,
            "reportingComponent": COMPONENT,
            "reportingInstance": self._host,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }

    def _allowed(self, uid: str) -> bool:
        """Whether the pod may cause one more Event now."""
        now = time.monotonic()
        allowance = self._allowances.setdefault(uid, _Allowance(BURST, now))
        self._allowances.move_to_end(uid)
        if len(self._allowances) > REMEMBERED:
            self._allowances.popitem(last=False)
        allowance.tokens = min(BURST, allowance.tokens + (now - allowance.since) / REFILL_SECONDS)
        allowance.since = now
        if allowance.tokens < 1:
            return False
        allowance.tokens -= 1
        return True


def _timestamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
