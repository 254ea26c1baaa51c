"""Events about pods and the node (core/v1), from component `multus` as upstream's. They never delay or fail a request.

Messages about the same object within a moment become one Event per type and reason, joined by `; `: an ADD with many
networks makes one Event. (kubectl cuts a message at the first newline.) A repeated message increments the count of its
Event. Each object has a limited rate, as in client-go.
"""

from __future__ import annotations

import datetime
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, KubeError
from multus_daemon.cluster.kube.latest import MERGE_PATCH, pause_of
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.recent import Recent
from multus_daemon.runtime.workqueue import WorkQueue
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX

log = logging.getLogger(__name__)

COMPONENT: Final = "multus"
QUEUE_MAX: Final = 1000  # messages
GATHER_SECONDS: Final = 0.1
RETRY_SECONDS: Final = (0.5, 10.0)
MESSAGE_MAX: Final = 4096
REMEMBERED: Final = 1024
BURST: Final = 25
REFILL_SECONDS: Final = 300.0
"""Each pod, and the node, may cause `BURST` Events at once, and one more after each interval."""
_NAME_MAX: Final = 253
_NODE_NAMESPACE: Final = "default"  # required by the API for objects without a namespace


_Subject = dict[str, str]  # the `involvedObject` of an Event; a node has no namespace


_Key = tuple[str, str, str]
"""Identifies an Event: UID of its object, type and reason."""


@dataclass(slots=True)
class _Event:
    """The queued messages of one Event, in the order of their arrival."""

    subject: _Subject
    messages: list[str] = field(default_factory=list)
    expires: float = 0.0
    """When the messages are dropped, on the monotonic clock; 0 before the first attempt."""


class EventRecorder:
    """Queues Events and posts them. `run` is a root task, `flush` returns when no Event is left."""

    def __init__(self, client: ApiClient, metrics: Metrics, host: str) -> None:
        """`host`: the node's name."""
        self._client = client
        self._host = host
        self._metrics = metrics
        self._waiting: dict[_Key, _Event] = {}
        self._queued = 0
        pause = pause_of(deadlines.EVENT_KEEP_TRYING_SECONDS)
        self._work = WorkQueue[_Key](self._post, retry=RETRY_SECONDS, shared=True, pause=pause)
        self.run = self._work.run
        self.flush = self._work.drain
        # Path and count of the last Event objects, by UID, type, reason and message.
        self._posted: Recent[tuple[str, str, str, str], tuple[str, int]] = Recent(REMEMBERED)
        # The tokens of a subject at a time, by UID.
        self._allowances: Recent[str, tuple[float, float]] = Recent(REMEMBERED)

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the pod, `kind` Normal or Warning. Never blocks, never raises."""
        self._queue(
            {"kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}, kind, reason, message
        )

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the node, as `event` does."""
        # The kubelet's own Events have the name in place of the UID; `kubectl describe node` searches for both.
        self._queue({"kind": "Node", "name": self._host, "uid": self._host}, kind, reason, message)

    def _queue(self, subject: _Subject, kind: str, reason: str, message: str) -> None:
        if self._queued >= QUEUE_MAX:
            self._metrics.events_dropped.inc()
            return
        key, message = (subject["uid"], kind, reason), message[:EVENT_MESSAGE_MAX]
        event = self._waiting.setdefault(key, _Event(subject))
        if message not in event.messages:
            event.messages.append(message)
            self._queued += 1
        self._work.add_after(key, GATHER_SECONDS)

    async def _post(self, key: _Key) -> None:
        """Create the Event or increment its count, or drop it. Raises KubeError if the queue must try again."""
        uid, kind, reason = key
        event = self._waiting[key]
        messages = event.messages[:]
        if event.expires:
            await self._client.turn()
        else:
            event.expires = time.monotonic() + deadlines.EVENT_KEEP_TRYING_SECONDS
            if not self._take_token(uid):
                self._done(key, messages, dropped=True)
                return
        text = "; ".join(messages)
        text = text if len(text) <= MESSAGE_MAX else text[: MESSAGE_MAX - 3] + "..."
        try:
            await self._attempt(event.subject, kind, reason, text)
        except Exception as error:
            # A namespace that is being deleted answers 403. A fault in one Event must not stop the daemon.
            is_fault = not isinstance(error, KubeError)
            if not (is_fault or isinstance(error, ApiError)) and time.monotonic() < event.expires:
                raise
            subject = "/".join(event.subject.values())
            log.info("Event %s about %s is dropped: %s", reason, subject, error, exc_info=is_fault)
            self._done(key, messages, dropped=True)
        else:
            self._done(key, messages)

    def _done(self, key: _Key, messages: list[str], *, dropped: bool = False) -> None:
        """Remove messages that were posted or dropped; keep those that were queued meanwhile."""
        event = self._waiting[key]
        # Only now: a message counts as queued until it is posted.
        self._queued -= len(messages)
        del event.messages[: len(messages)]
        event.expires = 0.0
        if not event.messages:
            del self._waiting[key]
        if dropped:
            self._metrics.events_dropped.inc(len(messages))

    async def _attempt(self, subject: _Subject, kind: str, reason: str, message: str) -> None:
        key = (subject["uid"], kind, reason, message)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if posted := self._posted.get(key):
            path, count = posted
            try:
                await self._send("PATCH", path, {"count": count + 1, "lastTimestamp": now}, MERGE_PATCH)
                self._posted[key] = path, count + 1
                return
            except ApiError as error:
                # The API server forgets Events after an hour.
                if error.status != 404:
                    raise
                self._posted.forget(key)
        namespace = subject.get("namespace", _NODE_NAMESPACE)
        collection = f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
        suffix = f".{time.time_ns():x}"
        name = subject["name"][: _NAME_MAX - len(suffix)].rstrip(".-") + suffix
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"namespace": namespace, "name": name},
            "involvedObject": {"apiVersion": "v1", **subject},
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": COMPONENT, "host": self._host},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._host,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self._send("POST", collection, event, "application/json")
        self._posted[key] = f"{collection}/{quote(name, safe='')}", 1

    async def _send(self, method: str, path: str, body: dict[str, Any], content_type: str) -> None:
        data, timeout = msgspec.json.encode(body), deadlines.EVENT_ATTEMPT_SECONDS
        await self._client.request(method, path, body=data, content_type=content_type, timeout=timeout)

    def _take_token(self, uid: str) -> bool:
        """Take one token of the object's rate limit; False if none is left."""
        now = time.monotonic()
        tokens, since = self._allowances.get(uid) or (BURST, now)
        tokens = min(BURST, tokens + (now - since) / REFILL_SECONDS)
        allowed = tokens >= 1
        self._allowances[uid] = tokens - 1 if allowed else tokens, now
        return allowed
