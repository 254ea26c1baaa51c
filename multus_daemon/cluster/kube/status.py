"""Write the annotation network-status: one PATCH, repeated while the API server is away.

The PATCH goes to `pods/status`, so it needs no right to change pods. It carries the pod's UID, which is immutable: for
a new pod of the same name the API server answers 422 with the cause `metadata.uid`.

Upstream's ClusterRole grants `update` and not `patch`. If PATCH is refused with 403 and PUT is not, the writer stays
with PUT: it reads the pod and writes it back with its resourceVersion, again after a conflict.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, ApiUnavailableError, KubeError
from multus_daemon.cluster.kube.latest import FOR_GOOD, LatestWriter
from multus_daemon.runtime.aio import KeyedLock
from multus_daemon.runtime.deadline import backoff
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.nad.network_status import ANNOTATION
from multus_daemon.spec.ports import StatusWriteError

log = logging.getLogger(__name__)

AT_ONCE: Final = 8
MERGE_PATCH: Final = "application/merge-patch+json"
CONFLICTS_MAX: Final = 3


class _RefusedError(StatusWriteError):
    """The status will never be written: the pod is gone or another one, or the value is not valid."""


_Item = tuple[Pod, str]


class StatusWriter(LatestWriter[_Item]):
    """Writes network-statuses, at once or, if that fails, in the background."""

    def __init__(self, client: ApiClient, on_written: Callable[[], None] = lambda: None) -> None:
        """`on_written` is called after each success; it must not block or raise."""
        super().__init__(client, self._write_late, retry=deadlines.NETWORK_STATUS_RETRY_SECONDS, at_once=AT_ONCE)
        self._on_written = on_written
        # They keep an older value from overwriting a newer one.
        self._locks = KeyedLock()
        self._may_patch = True

    async def write(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """Write the status within the patience; the contract is that of `ports.ClusterStore.write_network_status`."""
        problem = "earlier value is still being written"
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

    async def _write_late(self, item: _Item) -> None:
        """Make one attempt at a status that was put off. Raises KubeError."""
        pod, value = item
        async with self._locks.hold(pod.uid):
            if self.newest(pod.uid) is not item:
                return
            try:
                await self._attempt(pod, value)
                log.info("%s of pod %s is written at last", ANNOTATION, pod)
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
        """PUT if PATCH was refused, or the reverse, and stay with it. Raises _RefusedError, KubeError."""
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
        body = msgspec.json.encode({"metadata": {"uid": pod.uid, "annotations": {ANNOTATION: value}}})
        await self._send("PATCH", f"{objects.pod_path(pod.namespace, pod.name)}/status", body, MERGE_PATCH)

    async def _put(self, pod: Pod, value: str) -> None:
        path = objects.pod_path(pod.namespace, pod.name)
        for attempt in range(1, CONFLICTS_MAX + 1):
            body = _with_annotation(await self._send("GET", path), pod, value)
            try:
                await self._send("PUT", f"{path}/status", body)
                break
            except ApiError as error:
                if error.status != 409 or attempt == CONFLICTS_MAX:
                    raise

    async def _send(
        self, method: str, path: str, body: bytes | None = None, content_type: str = "application/json"
    ) -> bytes:
        timeout = deadlines.NETWORK_STATUS_ATTEMPT_SECONDS
        return await self._client.request(method, path, body=body, content_type=content_type, timeout=timeout)

    def _put_off(self, pod: Pod, value: str) -> None:
        self.put(pod.uid, f"{ANNOTATION} of pod {pod}", (pod, value))


def _created_anew(pod: Pod) -> _RefusedError:
    return _RefusedError(f"{ANNOTATION} of pod {pod}: the pod has been created anew, its UID is no longer {pod.uid}")


def _with_annotation(body: bytes, pod: Pod, value: str) -> bytes:
    """Return the pod in `body` with the annotation; all other fields, such as resourceVersion, stay as they are.

    Raises _RefusedError for another pod of the name, ApiUnavailableError for a body that is not a pod.
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
    return msgspec.json.encode(item)
