"""Write the pod condition `multus.io/NetworksReady`, repeated while the API server is away.

A strategic merge patch of `pods/status`: conditions are merged by their type (core/v1 PodStatus, patchMergeKey), so
that those of the kubelet stay. It carries the pod's UID: for a new pod of the same name the API server answers 422.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import KubeError
from multus_daemon.runtime.deadline import backoff
from multus_daemon.spec.attachment import Pod, PodCondition
from multus_daemon.spec.nad.following import NETWORKS_READY

log = logging.getLogger(__name__)

STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
PENDING_MAX: Final = 4096
# Final refusals: the pod has gone, or is another one. 403 is not one: a role binding may be made later.
_FOR_GOOD: Final = frozenset({400, 404, 405, 413, 415, 422})

_UNKNOWN: Final = "?"
"""In place of a reason; no reason of the API has this form."""

_Value = tuple[bool, str, str]
_Pending = tuple[Pod, _Value]  # compared by identity: the same value may be put twice


class ConditionWriter:
    """Writes conditions, one after another. `run` is a root task."""

    def __init__(self, client: ApiClient, known: Callable[[Pod], PodCondition | None] = lambda _: None) -> None:
        """`known` returns the condition that the pod had when the API server last sent it."""
        self._client = client
        self._known = known
        # By the pod's UID.
        self._pending: OrderedDict[str, _Pending] = OrderedDict()
        self._written: OrderedDict[str, PodCondition] = OrderedDict()
        """What was written last; newer than what `known` returns."""
        self._arrived = asyncio.Event()
        self._kicked = asyncio.Event()

    def put(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """Queue the condition, in place of one that is not written yet. `run` drops it if the pod has it."""
        self._pending[pod.uid] = pod, (ready, reason, message)
        if len(self._pending) > PENDING_MAX:
            _, (dropped, _) = self._pending.popitem(last=False)
            log.error("condition %s of pod %s will not be written: too many are pending", NETWORKS_READY, dropped)
        self._arrived.set()
        self._kicked.set()

    def kick(self) -> None:
        """Write the pending conditions now: the API server has answered."""
        self._kicked.set()

    async def run(self) -> None:
        """Write for ever."""
        delays = backoff(*deadlines.CONDITION_RETRY_SECONDS, jitter=0.2)
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._pending:
                uid, item = next(iter(self._pending.items()))
                pod, value = item
                try:
                    await self._write(pod, value)
                    delays = backoff(*deadlines.CONDITION_RETRY_SECONDS, jitter=0.2)
                except KubeError as error:
                    if error.status not in _FOR_GOOD:
                        log.debug("condition %s of pod %s: %s; tried again", NETWORKS_READY, pod, error)
                        # One that is refused for its own sake must not hold up the others.
                        if uid in self._pending:
                            self._pending.move_to_end(uid)
                        await self._pause(next(delays), error.retry_after or 0.0)
                        continue
                    log.info("condition %s of pod %s is not written: %s", NETWORKS_READY, pod, error)
                # A newer value may have come meanwhile.
                if self._pending.get(uid) is item:
                    del self._pending[uid]

    async def _pause(self, seconds: float, asked: float) -> None:
        shortest, longest = deadlines.CONDITION_RETRY_SECONDS
        self._kicked.clear()
        await asyncio.sleep(max(shortest, min(asked, longest)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._kicked.wait(), max(0.0, seconds - shortest))

    async def _write(self, pod: Pod, value: _Value) -> None:
        """Write the condition unless the pod has it. Raises KubeError."""
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
        body = msgspec.json.encode({"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}})
        path = f"{objects.pod_path(pod.namespace, pod.name)}/status"
        timeout = deadlines.NETWORK_STATUS_ATTEMPT_SECONDS
        if before is not None:
            # After a failure nobody knows which of both the pod has: neither counts as written.
            self._note(pod, before._replace(reason=_UNKNOWN))
        await self._client.request("PATCH", path, body=body, content_type=STRATEGIC_PATCH, timeout=timeout)
        self._note(pod, PodCondition(is_ready, reason, message, since))

    def _note(self, pod: Pod, condition: PodCondition) -> None:
        self._written[pod.uid] = condition
        self._written.move_to_end(pod.uid)
        if len(self._written) > PENDING_MAX:
            self._written.popitem(last=False)
