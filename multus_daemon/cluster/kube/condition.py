"""Write the pod condition `multus.io/NetworksReady`, repeated while the API server is away.

A strategic merge patch of `pods/status`: conditions are merged by their type (core/v1 PodStatus, patchMergeKey), so
that those of the kubelet stay. It carries the pod's UID: for a new pod of the same name the API server answers 422.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import OrderedDict
from typing import Final

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import KubeError
from multus_daemon.runtime.deadline import backoff
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.nad.following import NETWORKS_READY

log = logging.getLogger(__name__)

STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
PENDING_MAX: Final = 4096
# Final refusals: the pod has gone, or is another one.
_FOR_GOOD: Final = frozenset({400, 404, 405, 413, 415, 422})

_Value = tuple[bool, str, str]


class ConditionWriter:
    """Writes conditions. `run` is a root task."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        # By the pod's UID.
        self._pending: OrderedDict[str, tuple[Pod, _Value]] = OrderedDict()
        self._written: OrderedDict[str, tuple[_Value, str]] = OrderedDict()
        """The last values, with the time of the last transition."""
        self._arrived = asyncio.Event()

    def put(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """Queue the condition, unless the pod has it."""
        value = (ready, reason, message)
        written = self._written.get(pod.uid)
        if written is not None and written[0] == value:
            self._pending.pop(pod.uid, None)
            return
        self._pending[pod.uid] = pod, value
        if len(self._pending) > PENDING_MAX:
            _, (dropped, _) = self._pending.popitem(last=False)
            log.error("condition %s of pod %s will not be written: too many are pending", NETWORKS_READY, dropped)
        self._arrived.set()

    async def run(self) -> None:
        """Write for ever."""
        delays = backoff(*deadlines.CONDITION_RETRY_SECONDS, jitter=0.2)
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._pending:
                uid, (pod, value) = next(iter(self._pending.items()))
                try:
                    await self._write(pod, value)
                    delays = backoff(*deadlines.CONDITION_RETRY_SECONDS, jitter=0.2)
                except KubeError as error:
                    if error.status not in _FOR_GOOD:
                        log.debug("condition %s of pod %s: %s; tried again", NETWORKS_READY, pod, error)
                        await asyncio.sleep(max(next(delays), error.retry_after or 0.0))
                        continue
                    log.info("condition %s of pod %s is not written: %s", NETWORKS_READY, pod, error)
                # A newer value may have come meanwhile.
                if self._pending.get(uid) == (pod, value):
                    del self._pending[uid]

    async def _write(self, pod: Pod, value: _Value) -> None:
        ready, reason, message = value
        before = self._written.get(pod.uid)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        since = before[1] if before is not None and before[0][0] is ready else now
        condition = {
            "type": NETWORKS_READY,
            "status": "True" if ready else "False",
            "reason": reason,
            "message": message,
            "lastTransitionTime": since,
        }
        body = msgspec.json.encode({"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}})
        path = f"{objects.pod_path(pod.namespace, pod.name)}/status"
        timeout = deadlines.NETWORK_STATUS_ATTEMPT_SECONDS
        await self._client.request("PATCH", path, body=body, content_type=STRATEGIC_PATCH, timeout=timeout)
        self._written[pod.uid] = value, since
        if len(self._written) > PENDING_MAX:
            self._written.popitem(last=False)
