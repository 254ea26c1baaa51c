"""The cluster store on Kubernetes: pods and networks from informers; status and Events go to the API server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.claims import Claims
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.condition import ConditionWriter
from multus_daemon.cluster.kube.device_status import DeviceStatusWriter
from multus_daemon.cluster.kube.events import EventRecorder
from multus_daemon.cluster.kube.informer import Informer
from multus_daemon.cluster.kube.lookup import NetworkLookup, as_port_errors, require_valid_name
from multus_daemon.cluster.kube.status import StatusWriter
from multus_daemon.metrics import ClusterMetrics
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.attachment import Pod, PodCondition
from multus_daemon.spec.cni.names import KubernetesArgs, Namespace, PodName, PodUid
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import PodNotFoundError, StoreUnavailableError

LABELS_MAX: Final = 1024
"""Namespaces whose labels are remembered."""
_SERVES: Final = frozenset({"Pending", "Running"})
"""Phases of a controller's pod that serves, or will soon."""
_STATIC_UID_ANNOTATIONS: Final = ("kubernetes.io/config.hash", "kubernetes.io/config.mirror")


class KubeStore:
    """The store on the event loop; `Cluster` makes it a `ports.ClusterStore`. `run` is a root task.

    Gates: `pods` and `networks`, for their first lists.
    """

    def __init__(
        self,
        client: ApiClient,
        node: str,
        gates: Gates,
        *,
        metrics: ClusterMetrics | None = None,
        pod_patience: float = deadlines.POD_EVENT_SECONDS,
        unsynced_patience: float = deadlines.UNSYNCED_SECONDS,
    ) -> None:
        """`node`: this node's name in the cluster; both patiences are in seconds."""
        self._client = client
        self._pod_patience = pod_patience
        self._unsynced_patience = min(pod_patience, unsynced_patience)
        metrics = metrics or ClusterMetrics()
        self.statuses = StatusWriter(client, self._answered)
        self.conditions = ConditionWriter(client, self._condition_of)
        self.devices = DeviceStatusWriter(client)
        self.events = EventRecorder(client, metrics, node)
        self.pods = Informer(client, objects.pods_of(node), gates, metrics, self._answered)
        self.networks = Informer(client, objects.networks(), gates, metrics, self._answered)
        self._lookup = NetworkLookup(client, self.networks, self._unsynced_patience, self._answered)
        self.claims = Claims(client, node, self.pods, metrics)
        self.pods.changed = self.claims.pod_changed
        self.networks.changed = self.claims.network_changed
        self._labels: OrderedDict[str, tuple[float, Mapping[str, str]]] = OrderedDict()
        # Methods of `ports.ClusterStore` that the parts implement.
        self.event = self.events.event
        self.node_event = self.events.node_event
        self.condition = self.conditions.put_condition
        self.device_status = self.devices.put_report
        self.write_network_status = self.statuses.write
        self.network = self._lookup.network

    async def run(self) -> None:
        """Watch, write and post for ever; ends with the first failure of one of these tasks."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.pods.run(), name="pods")
            group.create_task(self.networks.run(), name="networks")
            group.create_task(self.claims.run(), name="claims")
            group.create_task(self.statuses.run(), name="statuses")
            group.create_task(self.conditions.run(), name="conditions")
            group.create_task(self.devices.run(), name="device statuses")
            group.create_task(self.events.run(), name="events")

    async def drain(self, timeout: float) -> None:
        """Write pending statuses and Events for at most `timeout` seconds, after the end of `run`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.gather(self.statuses.flush(), self.events.flush())

    def known_pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod | None:
        """Return the pod if the informer has this incarnation."""
        pod = self.pods.get((namespace, name))
        return pod if pod is not None and is_incarnation(pod, uid) else None

    def asked_networks(self, args: KubernetesArgs) -> str:
        """Return the pod's network annotations as one text, equal for pods of one template. Safe in any thread.

        Empty for an unknown pod or a pod without these annotations.
        """
        pod = self.known_pod(args.namespace, args.name, args.uid)
        annotations = pod.annotations if pod is not None else {}
        keys = (selection.DEFAULT_NETWORK_ANNOTATION, selection.NETWORKS_ANNOTATION)
        return "\n".join(annotations[key] for key in keys if key in annotations)

    def known_network(self, namespace: str, name: str) -> NetworkAttachmentDefinition | None:
        """Return the network if the informer has it."""
        return self.networks.get((namespace, name))

    def namespaces_with_network(self, name: str) -> list[str]:
        """Return the namespaces with such a network, as far as the informer knows."""
        return sorted(namespace for namespace, network in self.networks.known() if network == name)

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """Wait for the watch's event, then ask the API server once. Raises as `ports.ClusterStore` says."""
        require_valid_name(f"pod {namespace}/{name}", namespace, name, PodNotFoundError)
        key = (namespace, name)
        deleted = self.pods.deleted_uid(key)
        # There are no further events of a deleted pod.
        if deleted is None or (uid and deleted != uid):
            patience = self._pod_patience if self.pods.connected else self._unsynced_patience
            pod = await self.pods.wait_for(key, lambda pod: is_incarnation(pod, uid), patience)
            if pod is not None:
                return pod
        with as_port_errors(f"pod {namespace}/{name}", self.pods, PodNotFoundError):
            return objects.decode_pod(await self._get(objects.pod_path(namespace, name))).value

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        """Call `callback` for each pod that is new or differs from what was known, and for those that are known.

        Also for one that has served hot-plug and is gone. On the event loop.
        """

        def changed(pod: Pod) -> None:
            self.claims.pod_changed(pod)
            callback(pod)

        def gone(pod: Pod) -> None:
            if pod.is_hotplug_controller:
                callback(pod)

        self.pods.changed, self.pods.gone = changed, gone
        for pod in self.pods.known().values():
            callback(pod)

    def hotplug_controller(self) -> str:
        """Return the name of a pod of this node that serves hot-plug. Safe in any thread."""
        pods = self.pods.known().values()
        return next((str(pod) for pod in pods if pod.is_hotplug_controller and pod.phase in _SERVES), "")

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Ask the API server for the namespace, at most once a minute. Raises StoreUnavailableError."""
        until, labels = self._labels.get(name, (float("-inf"), {}))
        if until > time.monotonic():
            return labels
        what = f"namespace {name}"
        try:
            require_valid_name(what, name, name, PodNotFoundError)
            with as_port_errors(what, self.pods, PodNotFoundError):
                labels = objects.decode_labels(await self._get(objects.namespace_path(name)))
        except PodNotFoundError:
            labels = {}
        self._labels[name] = time.monotonic() + deadlines.NAMESPACE_LABELS_SECONDS, labels
        self._labels.move_to_end(name)
        if len(self._labels) > LABELS_MAX:
            self._labels.popitem(last=False)
        return labels

    async def node_pods(self) -> list[Pod]:
        """Return the informer's pods. Raises StoreUnavailableError while it does not receive changes."""
        if not self.pods.synced.is_set() or not self.pods.connected:
            raise StoreUnavailableError(f"pods of this node: {self.pods.problem}")
        return list(self.pods.known().values())

    def report(self) -> dict[str, Any]:
        """Return the state of the informers and the status writer for `answers.status`. Safe in any thread."""
        informers: dict[str, Informer[Any]] = {"pods": self.pods, "networks": self.networks}
        if self.claims.slices.synced.is_set():
            informers["slices"] = self.claims.slices
        return {
            "kind": "kubernetes",
            "informers": [
                {
                    "resource": resource,
                    "objects": len(informer),
                    "staleSeconds": round(informer.stale_seconds, 1) if informer.synced.is_set() else None,
                    "heardSeconds": round(informer.heard_seconds, 1) if informer.synced.is_set() else None,
                    "problem": "" if informer.connected else informer.problem,
                }
                for resource, informer in informers.items()
            ],
            "pendingStatuses": self.statuses.pending,
        }

    def _condition_of(self, pod: Pod) -> PodCondition | None:
        known = self.pods.get((pod.namespace, pod.name))
        return known.networks_ready if known is not None and known.uid == pod.uid else None

    async def _get(self, path: str) -> bytes:
        body = await self._client.request("GET", path, timeout=deadlines.API_READ_SECONDS)
        self._answered()
        return body

    def _answered(self) -> None:
        """End all pauses: the API server has just answered."""
        self.statuses.kick()
        self.conditions.kick()
        self.devices.kick()
        self.pods.poke()
        self.networks.poke()
        self.claims.slices.poke()


class Cluster:
    """The `ports.ClusterStore` over the store on the event loop, for the threads of requests."""

    def __init__(self, store: KubeStore, portal: LoopPortal) -> None:
        self._store = store
        self._portal = portal
        # What is in memory is read in any thread.
        self.namespaces_with_network = store.namespaces_with_network
        self.hotplug_controller = store.hotplug_controller
        self.node_pods = portal.calling(store.node_pods)
        self.namespace_labels = portal.calling(store.namespace_labels)
        self.write_network_status = portal.calling(store.write_network_status)
        self.event = portal.telling(store.event)
        self.node_event = portal.telling(store.node_event)
        self.condition = portal.telling(store.condition)
        self.device_status = portal.telling(store.device_status)

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """Return the pod, from memory if possible."""
        known = self._store.known_pod(namespace, name, uid)
        return known if known is not None else self._portal.call(self._store.pod, namespace, name, uid)

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """Return the NetworkAttachmentDefinition, from memory if possible."""
        known = self._store.known_network(namespace, name)
        return known if known is not None else self._portal.call(self._store.network, namespace, name)


def is_incarnation(pod: Pod, uid: str) -> bool:
    """Return whether `uid`, which the runtime has from the kubelet, may be this pod's."""
    # The API has the mirror of a static pod, with its own UID; the kubelet's UID is in its annotations.
    if not uid or uid == pod.uid or pod.is_static:
        return True
    return any(pod.annotations.get(key) == uid for key in _STATIC_UID_ANNOTATIONS)
