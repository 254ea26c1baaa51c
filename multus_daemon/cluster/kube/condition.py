"""Write the pod condition `multus.io/NetworksReady`, repeated while the API server is away.

A strategic merge patch of `pods/status`: conditions are merged by their type (core/v1 PodStatus, patchMergeKey), so
that those of the kubelet stay. It carries the pod's UID: for a new pod of the same name the API server answers 422.
"""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.latest import PENDING_MAX, LatestWriter
from multus_daemon.spec.attachment import Pod, PodCondition
from multus_daemon.spec.nad.following import NETWORKS_READY

STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
_UNKNOWN: Final = "?"
"""In place of a reason; no reason of the API has this form."""

_Value = tuple[bool, str, str]


class ConditionWriter(LatestWriter[tuple[Pod, _Value]]):
    """Writes conditions."""

    def __init__(self, client: ApiClient, known: Callable[[Pod], PodCondition | None] = lambda _: None) -> None:
        """`known` returns the condition that the pod had when the API server last sent it."""
        retry = deadlines.CONDITION_RETRY_SECONDS
        super().__init__(client, lambda item: self._write_condition(*item), retry=retry, least_seconds=retry[0])
        self._known = known
        self._written: OrderedDict[str, PodCondition] = OrderedDict()
        """The condition that was written last, by the pod's UID; newer than the one that `known` returns."""

    def put_condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """Queue the condition, in place of one that is not written yet. `run` drops it if the pod has it."""
        self.put(pod.uid, f"condition {NETWORKS_READY} of pod {pod}", (pod, (ready, reason, message)))

    async def _write_condition(self, pod: Pod, value: _Value) -> None:
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
            # After a failure the pod may have either: neither counts as written.
            self._note(pod, before._replace(reason=_UNKNOWN))
        await self._client.request("PATCH", path, body=body, content_type=STRATEGIC_PATCH, timeout=timeout)
        self._note(pod, PodCondition(is_ready, reason, message, since))

    def _note(self, pod: Pod, condition: PodCondition) -> None:
        self._written[pod.uid] = condition
        self._written.move_to_end(pod.uid)
        if len(self._written) > PENDING_MAX:
            self._written.popitem(last=False)
