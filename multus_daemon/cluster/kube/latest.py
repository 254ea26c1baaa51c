"""Values of which only the newest matters: pod conditions, device statuses, network-statuses.

They are written in the background, and again while the API server is away.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import claims, objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError, KubeError, NoAnswerError
from multus_daemon.runtime.aio import KeyedLock
from multus_daemon.runtime.deadline import backoff
from multus_daemon.runtime.recent import Recent
from multus_daemon.runtime.workqueue import WorkQueue
from multus_daemon.spec.attachment import Pod, PodCondition
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.nad.network_status import ANNOTATION
from multus_daemon.spec.nad.selection import NETWORKS_READY
from multus_daemon.spec.ports import StatusWriteError

log = logging.getLogger(__name__)

V = TypeVar("V")

PENDING_MAX: Final = 4096
# Final refusals: the object has gone, or is another one. 403 is not one: a role binding may be made later.
FOR_GOOD: Final = frozenset({400, 404, 405, 413, 415, 422})
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
MANAGER: Final = "multus-daemon"
AT_ONCE: Final = 8  # network-statuses
CONFLICTS_MAX: Final = 3
LEAST_SECONDS: Final = 0.25
"""The shortest pause after a failure, even if an answer of the API server ends the pause."""
_UNKNOWN: Final = "?"
"""Stands for an unknown reason; no reason of the API has this form."""

_Condition = tuple[bool, str, str]


def pause_of(most: float) -> Callable[[Exception, float], float]:
    """Return the `pause` of a WorkQueue: LEAST_SECONDS or as long as the API server asks, up to `most` seconds."""

    def pause(error: Exception, seconds: float) -> float:
        asked = error.retry_after if isinstance(error, KubeError) else None
        return max(LEAST_SECONDS, min(asked or 0.0, most), seconds)

    return pause


class LatestWriter(Generic[V]):
    """Writes the newest value of each key. `run` is a root task, `flush` returns when no value is left."""

    def __init__(
        self,
        client: ApiClient,
        write: Callable[[V], Awaitable[None]],
        *,
        retry: tuple[float, float],
        at_once: int = 1,
    ) -> None:
        """`write` makes one attempt. Raises KubeError. `retry`: the first and the longest pause in seconds."""
        self._client = client
        self._write = write
        # By key: what is written, for messages, and its value.
        self._pending: OrderedDict[str, tuple[str, V]] = OrderedDict()
        self._is_away = False
        """True if the last attempt had no answer."""
        self._queue = WorkQueue[str](
            self._write_pending,
            retry=retry,
            shared=True,
            failed=self._failed,
            pause=pause_of(retry[1]),
            at_once=at_once,
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
            log.error("%s is dropped: too many writes are pending", dropped)
        self._queue.add_after(key, 0)
        self._queue.resume()

    def newest(self, key: str) -> V | None:
        """Return the key's value that is still to be written; None if there is none."""
        item = self._pending.get(key)
        return item[1] if item else None

    def withdraw(self, key: str) -> None:
        """Drop the key's value, unless it is being written."""
        if self._pending.pop(key, None):
            self._queue.forget(key)

    def kick(self) -> None:
        """The API server has answered: write now what waited for it. A pause after a refusal continues."""
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

    async def _send(
        self, method: str, path: str, item: Any = None, kind: str = "application/json", **query: str
    ) -> bytes:
        """Make one attempt at a request; `kind` is the content type of `item`. Raises KubeError."""
        body, timeout = msgspec.json.encode(item) if item else None, deadlines.NETWORK_STATUS_ATTEMPT_SECONDS
        return await self._client.request(method, path, query=query, body=body, content_type=kind, timeout=timeout)


class ConditionWriter(LatestWriter[tuple[Pod, _Condition]]):
    """Writes the pod condition `multus.io/NetworksReady`.

    A strategic merge patch of `pods/status`: conditions are merged by their type (core/v1 PodStatus, patchMergeKey), so
    that those of the kubelet stay. It carries the pod's UID: for a new pod of the same name the API server answers 422.
    """

    def __init__(self, client: ApiClient, known: Callable[[Pod], PodCondition | None] = lambda _: None) -> None:
        """`known` returns the pod's condition in the last state that the API server sent."""
        super().__init__(client, lambda item: self._write_condition(*item), retry=deadlines.CONDITION_RETRY_SECONDS)
        self._known = known
        self._written: Recent[str, PodCondition] = Recent(PENDING_MAX)
        """The condition that was written last, by the pod's UID; newer than the one that `known` returns."""

    def put_condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """Queue the condition, in place of one that is not written yet. `run` drops it if the pod has it already."""
        self.put(pod.uid, f"condition {NETWORKS_READY} of pod {pod}", (pod, (ready, reason, message)))

    async def _write_condition(self, pod: Pod, value: _Condition) -> None:
        before = self._written.get(pod.uid) or self._known(pod)
        if before is not None and before[:3] == value:
            return
        is_ready, reason, message = value
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        since = before.since if before is not None and before.since and before.is_ready is is_ready else now
        condition = {
            "type": NETWORKS_READY,
            "status": "True" if is_ready else "False",
            "reason": reason,
            "message": message,
            "lastTransitionTime": since,
        }
        item = {"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}
        if before is not None:
            # After a failure the pod may have either: neither counts as written.
            self._written[pod.uid] = before._replace(reason=_UNKNOWN)
        await self._send("PATCH", f"{objects.pod_path(pod.namespace, pod.name)}/status", item, STRATEGIC_PATCH)
        self._written[pod.uid] = PodCondition(is_ready, reason, message, since)


class DeviceStatusWriter(LatestWriter[tuple[Pod, DeviceReport]]):
    """Reports claimed devices in `ResourceClaim.status.devices` (KEP-4817), where the daemon's role allows it.

    A server-side apply of `resourceclaims/status` with the claim's UID: for another claim of the name the API server
    answers 409. Each pod is a field manager of its own, so its entries can be removed, and those of others stay. Fields
    that another manager has set to something else, as the device's driver may, are left alone (409 too).
    """

    def __init__(self, client: ApiClient) -> None:
        super().__init__(client, lambda item: self._apply(*item), retry=deadlines.CONDITION_RETRY_SECONDS)
        self._forbidden_until = float("-inf")

    def put_report(self, pod: Pod, report: DeviceReport) -> None:
        """Queue the report, in place of one that is not written yet."""
        what = f"device status of ResourceClaim {pod.namespace}/{report.claim}"
        self.put(f"{report.claim_uid}/{pod.uid}", what, (pod, report))

    async def _apply(self, pod: Pod, report: DeviceReport) -> None:
        if time.monotonic() < self._forbidden_until:
            return
        item = {
            "apiVersion": claims.API_VERSION,
            "kind": "ResourceClaim",
            "metadata": {"namespace": pod.namespace, "name": report.claim, "uid": report.claim_uid},
            "status": {"devices": report.entries} if report.entries else {},
        }
        path = f"{claims.claim_path(pod.namespace, report.claim)}/status"
        try:
            await self._send("PATCH", path, item, APPLY_PATCH, fieldManager=f"{MANAGER}/{pod.uid}")
        except ApiError as error:
            if error.status == 403:
                log.info("devices of ResourceClaims are not reported, as the role does not allow it: %s", error)
                self._forbidden_until = time.monotonic() + deadlines.FORBIDDEN_SECONDS
            elif error.status == 409:
                log.info("device status of ResourceClaim %s/%s is left alone: %s", pod.namespace, report.claim, error)
            else:
                raise


class _RefusedError(StatusWriteError):
    """The status can never be written: the pod is gone or replaced, or the value is invalid."""


class StatusWriter(LatestWriter[tuple[Pod, str]]):
    """Writes the annotation network-status: one PATCH, at once or, if that fails, in the background.

    The PATCH goes to `pods/status`, so it needs no right to change pods. It carries the pod's UID, which is immutable:
    for a new pod of the same name the API server answers 422 with the cause `metadata.uid`.

    Upstream's ClusterRole grants `update` and not `patch`. If PATCH is refused with 403 and PUT is not, the writer
    stays with PUT: it reads the pod and writes it back with its resourceVersion, again after a conflict.
    """

    def __init__(self, client: ApiClient, on_written: Callable[[], None] = lambda: None) -> None:
        """`on_written` is called after each success; it must not block or raise."""
        super().__init__(client, self._write_late, retry=deadlines.NETWORK_STATUS_RETRY_SECONDS, at_once=AT_ONCE)
        self._on_written = on_written
        # They keep an older value from overwriting a newer one.
        self._locks = KeyedLock()
        self._may_patch = True

    async def write(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """Do what `ports.ClusterStore.write_network_status` says, within NETWORK_STATUS_PATIENCE_SECONDS."""
        problem = "an earlier value is still being written"
        # A pending value is older than this one.
        self.withdraw(pod.uid)
        try:
            async with asyncio.timeout(deadlines.NETWORK_STATUS_PATIENCE_SECONDS), self._locks.hold(pod.uid):
                for delay in backoff(0.1, 0.5, jitter=0.2):
                    try:
                        await self._attempt(pod, value)
                        return
                    except KubeError as error:
                        problem, asked = str(error), error.retry_after or 0.0
                    await asyncio.sleep(max(delay, asked))
        except TimeoutError:
            if keep_trying:
                self._put_off(pod, value)
                problem += "; it is tried again"
            raise StatusWriteError(f"{ANNOTATION} of pod {pod} was not written: {problem}") from None
        except asyncio.CancelledError:
            # The caller is gone, but the pod still needs its status.
            if keep_trying:
                self._put_off(pod, value)
            raise

    async def _write_late(self, item: tuple[Pod, str]) -> None:
        """Make one background attempt at a status. Raises KubeError."""
        pod, value = item
        async with self._locks.hold(pod.uid):
            if self.newest(pod.uid) is not item:
                return
            try:
                await self._attempt(pod, value)
                log.info("%s of pod %s is written now, after earlier failures", ANNOTATION, pod)
            except _RefusedError as error:
                log.info("%s", error)

    async def _attempt(self, pod: Pod, value: str) -> None:
        """Write the status with the method that worked last. Raises _RefusedError, KubeError."""
        try:
            try:
                await (self._patch if self._may_patch else self._put)(pod, value)
            except ApiError as error:
                if error.status != 403:
                    raise
                await self._switch_method(pod, value, error)
        except ApiError as error:
            if error.status == 422 and "metadata.uid" in error.fields:
                raise _created_anew(pod) from error
            if error.status in FOR_GOOD:
                problem = "the pod has gone" if error.status == 404 else error
                raise _RefusedError(f"{ANNOTATION} of pod {pod}: {problem}") from error
            raise
        self._on_written()

    async def _switch_method(self, pod: Pod, value: str, refusal: ApiError) -> None:
        """Use PUT after PATCH was refused, or the reverse, also for later writes. Raises _RefusedError, KubeError."""
        may_patch = not self._may_patch
        try:
            await (self._patch if may_patch else self._put)(pod, value)
        except ApiError as error:
            # Neither is allowed. Stay with the present method: the role may be bound again.
            raise (refusal if error.status == 403 else error) from error
        changed, self._may_patch = self._may_patch != may_patch, may_patch
        if changed and may_patch:
            log.info("pods/status: PATCH is allowed, network-status is written with one request again")
        elif changed:
            log.warning(
                "pods/status: PATCH is forbidden and PUT is not, so network-status is written with GET and PUT from "
                "now on: grant the verb patch on pods/status to the daemon's ClusterRole. %s",
                refusal,
            )

    async def _patch(self, pod: Pod, value: str) -> None:
        item = {"metadata": {"uid": pod.uid, "annotations": {ANNOTATION: value}}}
        await self._send("PATCH", f"{objects.pod_path(pod.namespace, pod.name)}/status", item, MERGE_PATCH)

    async def _put(self, pod: Pod, value: str) -> None:
        path = objects.pod_path(pod.namespace, pod.name)
        for attempt in range(1, CONFLICTS_MAX + 1):
            item = _with_annotation(await self._send("GET", path), pod, value)
            try:
                await self._send("PUT", f"{path}/status", item)
                break
            except ApiError as error:
                if error.status != 409 or attempt == CONFLICTS_MAX:
                    raise

    def _put_off(self, pod: Pod, value: str) -> None:
        self.put(pod.uid, f"{ANNOTATION} of pod {pod}", (pod, value))


def _created_anew(pod: Pod) -> _RefusedError:
    return _RefusedError(f"{ANNOTATION} of pod {pod}: the pod has been created anew, its UID is no longer {pod.uid}")


def _with_annotation(body: bytes, pod: Pod, value: str) -> Any:
    """Return the pod in `body` with the annotation; all other fields, such as resourceVersion, stay as they are.

    Raises _RefusedError for a pod with another UID, ApiUnavailableError for a body that is not a pod.
    """
    try:
        item = msgspec.json.decode(body)
        metadata = item["metadata"]
        uid = metadata["uid"]
        metadata["annotations"] = {**(metadata.get("annotations") or {}), ANNOTATION: value}
    except (*objects.DECODE_ERRORS, KeyError, TypeError, AttributeError) as error:
        raise ApiUnavailableError(f"GET of pod {pod}: not a pod: {error!r}") from error
    if uid != pod.uid:
        raise _created_anew(pod)
    return item
