"""Events about pods and the node (core/v1), from component `multus` as upstream names it, never in the way of anything.

What is said about one of them within a moment becomes one Event per type and reason, the messages joined by `; `: one
object for an ADD with many networks, and each message still to be found in it. (Not by line ends: kubectl cuts a
message at the first one.) What was said before is counted up in the same object. Each may cause so many, as with
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
from typing import Any, Final
from urllib.parse import quote

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError, KubeError
from multus_daemon.cluster.kube.status import MERGE_PATCH
from multus_daemon.metrics import ClusterMetrics
from multus_daemon.runtime.backoff import backoff
from multus_daemon.spec.attachment import Pod

log = logging.getLogger(__name__)

COMPONENT: Final = "multus"
QUEUE_MAX: Final = 1000
"""Messages."""
GATHER_SECONDS: Final = 0.1
RETRY_SECONDS: Final = (0.5, 10.0)
MESSAGE_MAX: Final = 4096
REMEMBERED: Final = 1024
BURST: Final = 25
REFILL_SECONDS: Final = 300.0
"""A pod may cause `BURST` Events at once, and one more in each such time; the node the same."""
_NAME_MAX: Final = 253
_NODE_NAMESPACE: Final = "default"
"""Where Events about what has no namespace have to be."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What an Event is about; `namespace` is empty for a node."""

    kind: str
    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        name = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind.lower()} {name}"

    def reference(self) -> dict[str, str]:
        """The `involvedObject`."""
        fields = {"apiVersion": "v1", "kind": self.kind, "namespace": self.namespace}
        return {key: value for key, value in fields.items() if value} | {"name": self.name, "uid": self.uid}


@dataclass(slots=True)
class _Batch:
    """What was said about one subject; messages by type and reason, in the order in which they came."""

    subject: _Subject
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
        client: ApiClient,
        *,
        host: str = "",
        metrics: ClusterMetrics | None = None,
        queue_max: int = QUEUE_MAX,
        keep_trying: float = deadlines.EVENT_KEEP_TRYING_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`host`: the node's name; `clock`: Unix time; `keep_trying`: seconds for each Event."""
        self._client = client
        self._host = host
        self._metrics = metrics or ClusterMetrics()
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
        self._queue(_Subject("Pod", pod.namespace, pod.name, pod.uid), kind, reason, message)

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """See `ports.ClusterStore`. Dropped where the node's name is not known."""
        if not self._host:
            self._metrics.events_dropped.inc()
            return
        # The kubelet's own Events have the name in place of the UID; `kubectl describe node` looks for both.
        self._queue(_Subject("Node", "", self._host, self._host), kind, reason, message)

    def _queue(self, subject: _Subject, kind: str, reason: str, message: str) -> None:
        if self._queued >= self._queue_max:
            self._metrics.events_dropped.inc()
            return
        batch = self._batches.get(subject.uid)
        if batch is None:
            batch = self._batches[subject.uid] = _Batch(subject, time.monotonic() + GATHER_SECONDS)
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
                    await self._post(batch.subject, kind, reason, messages)
            finally:
                # Until here they count as queued: the queue's bound is on what is not posted yet.
                self._queued -= batch.size
        self._arrived.clear()

    async def _post(self, subject: _Subject, kind: str, reason: str, messages: list[str]) -> None:
        """One Event, made or counted up. Never raises KubeError."""
        if not self._allowed(subject.uid):
            self._metrics.events_dropped.inc(len(messages))
            return
        message = "; ".join(messages)
        message = message if len(message) <= MESSAGE_MAX else message[: MESSAGE_MAX - 3] + "..."
        deadline = time.monotonic() + self._keep_trying
        for delay in backoff(*RETRY_SECONDS, jitter=0.2):
            try:
                await self._attempt(subject, kind, reason, message)
                return
            except KubeError as error:
                # A namespace that is being deleted takes none: 403.
                if isinstance(error, ApiError) or time.monotonic() + delay > deadline:
                    log.info("Event %s of %s is dropped: %s", reason, subject, error)
                    self._metrics.events_dropped.inc(len(messages))
                    return
                asked = error.retry_after if isinstance(error, ApiUnavailableError) else None
            await asyncio.sleep(max(delay, min(asked or 0.0, self._keep_trying)))

    async def _attempt(self, subject: _Subject, kind: str, reason: str, message: str) -> None:
        key = (subject.uid, kind, reason, message)
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
        collection = f"/api/v1/namespaces/{quote(subject.namespace or _NODE_NAMESPACE, safe='')}/events"
        suffix = f".{time.time_ns():x}"
        name = subject.name[: _NAME_MAX - len(suffix)].rstrip(".-") + suffix
        await self._send(
            "POST", collection, self._object(subject, name, kind, reason, message, now), "application/json"
        )
        self._posted[key] = _Posted(f"{collection}/{quote(name, safe='')}")
        if len(self._posted) > REMEMBERED:
            self._posted.popitem(last=False)

    async def _send(self, method: str, path: str, body: dict[str, Any], content_type: str) -> None:
        await self._client.request(
            method,
            path,
            body=msgspec.json.encode(body),
            content_type=content_type,
            timeout=deadlines.EVENT_ATTEMPT_SECONDS,
        )

    def _object(self, subject: _Subject, name: str, kind: str, reason: str, message: str, now: str) -> dict[str, Any]:
        source = {"component": COMPONENT} | ({"host": self._host} if self._host else {})
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": subject.namespace or _NODE_NAMESPACE, "name": name},
            "involvedObject": subject.reference(),
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
        """Whether the subject may cause one more Event now."""
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
