"""The cluster store on Kubernetes: pods and networks from informers; status and Events go to the API server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects, taint
from multus_daemon.cluster.kube.claims import Claims
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, KubeError
from multus_daemon.cluster.kube.events import EventRecorder
from multus_daemon.cluster.kube.informer import Informer
from multus_daemon.cluster.kube.latest import ConditionWriter, DeviceStatusWriter, StatusWriter
from multus_daemon.cluster.kube.objects import Key
from multus_daemon.metrics import Metrics
from multus_daemon.runtime.aio import SharedCalls, at_most
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.runtime.recent import Recent
from multus_daemon.spec import addresses
from multus_daemon.spec.attachment import Pod, PodCondition
from multus_daemon.spec.cni import names
from multus_daemon.spec.cni.names import KubernetesArgs, Namespace, PodName, PodUid
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError, PodNotFoundError, StoreUnavailableError

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.reservations import KubeReservations

T = TypeVar("T")

LABELS_MAX: Final = 1024
"""Namespaces whose labels are remembered."""
_SERVES: Final = frozenset({"Pending", "Running"})
"""Phases of a controller's pod that runs or will run."""
_STATIC_UID_ANNOTATIONS: Final = ("kubernetes.io/config.hash", "kubernetes.io/config.mirror")


class NetworkLookup:
    """Finds NetworkAttachmentDefinitions: in the informer, else by one request."""

    def __init__(
        self,
        client: ApiClient,
        informer: Informer[NetworkAttachmentDefinition],
        patience: float = deadlines.UNSYNCED_SECONDS,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """`patience`: seconds to wait for the informer's first list. `on_answer`: called if the API server answers."""
        self._client = client
        self._informer = informer
        self._patience = patience
        self._on_answer = on_answer
        self._asking = SharedCalls()

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """Return the network; ask the API server once if the informer lacks it. Raises as `ports.ClusterStore` says."""
        what = f"NetworkAttachmentDefinition {namespace}/{name}"
        key = (namespace, name)
        if (network := self._informer.get(key)) is not None:
            return network
        require_valid_name(what, namespace, name, NetworkNotFoundError)
        if not self._informer.synced.is_set():
            network = await self._informer.wait_for(key, lambda _: True, self._patience)
            if network is not None:
                return network
        # Many pods may ask for the same network at the same time.
        return await self._asking.of(key, functools.partial(self._read, what, key))

    async def _read(self, what: str, key: Key) -> NetworkAttachmentDefinition:
        path = f"{objects.API}/namespaces/{key[0]}/{selection.PLURAL}/{key[1]}"
        with as_port_errors(what, self._informer, NetworkNotFoundError):
            body = await self._client.request("GET", path, timeout=deadlines.API_READ_SECONDS)
            self._on_answer()
            return objects.decode_network(body).value


def require_valid_name(what: str, namespace: str, name: str, missing: type[LookupError]) -> None:
    """Raise `missing` for an invalid name, which must not become part of a path."""
    problem = names.label_problem(namespace) or names.subdomain_problem(name)
    if problem:
        raise missing(f"{what}: the name {problem}")


@contextlib.contextmanager
def as_port_errors(what: str, informer: Informer[T], missing: type[LookupError]) -> Iterator[None]:
    """Turn errors of the API into those of `ports.ClusterStore`; `missing` for 404."""
    try:
        yield
    except ApiError as error:
        if error.status == 404:
            raise missing(f"the API server has no {what}") from error
        raise StoreUnavailableError(f"{what}: the API server refuses the request: {error}", error.advice) from error
    except KubeError as error:
        behind = "" if informer.synced.is_set() else f" ({informer.problem})"
        raise StoreUnavailableError(f"{what}: the API server can't be asked: {error}{behind}") from error
    except objects.DECODE_ERRORS as error:
        raise StoreUnavailableError(f"{what}: the API server's answer can't be decoded: {error}") from error


class KubeStore:
    """The part of the store that runs on the event loop, with which `Cluster` works. `run` is a root task.

    Gates: `pods` and `networks`, for their first lists.
    """

    def __init__(
        self,
        client: ApiClient,
        node: str,
        gates: Gates,
        *,
        metrics: Metrics | None = None,
        namespace: str = addresses.NAMESPACE,
        startup_taint: str = "",
    ) -> None:
        """`node`: this node's name in the cluster; `namespace`: of the addresses that the cluster shares.

        `startup_taint`: key of the taint that goes when the daemon is ready; empty: none.
        """
        self._namespace = namespace
        self._startup_taint, self._gates = startup_taint, gates
        self.node = node
        self._client = client
        self._pod_patience, self._unsynced_patience = deadlines.POD_EVENT_SECONDS, deadlines.UNSYNCED_SECONDS
        metrics = self._metrics = metrics or Metrics()
        self.statuses = StatusWriter(client, self._answered)
        self.conditions = ConditionWriter(client, self._condition_of)
        self.devices = DeviceStatusWriter(client)
        self.events = EventRecorder(client, metrics, node)
        self.pods = Informer(client, objects.pods_of(node), gates, metrics, self._answered)
        self.networks = Informer(client, objects.networks(), gates, metrics, self._answered)
        self._lookup = NetworkLookup(client, self.networks, self._unsynced_patience, self._answered)
        self.claims = Claims(client, node, self.pods)
        self.pods.changed = self.claims.pod_changed
        self.shares_addresses = asyncio.Event()
        """Set once a network's configuration names whereabouts."""
        self.networks.changed = self._network_changed
        self._labels: Recent[str, Mapping[str, str]] = Recent(LABELS_MAX, deadlines.NAMESPACE_LABELS_SECONDS)
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
            if self._startup_taint:
                work = taint.clear(self._client, self.node, self._startup_taint, self._gates)
                group.create_task(work, name="startup taint")

    async def drain(self, timeout: float) -> None:
        """Write pending statuses and Events for at most `timeout` seconds, after the end of `run`."""
        await at_most(timeout, asyncio.gather(self.statuses.flush(), self.events.flush()))

    def known_pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod | None:
        """Return the pod if the informer has one with this UID; else None."""
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

    def namespaces_with_network(self, name: str) -> list[str]:
        """Return the namespaces with a network `name`, as far as the informer knows."""
        return sorted(namespace for namespace, network in self.networks.known() if network == name)

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """Wait for the watch to report the pod, then ask the API server once. Raises as `ports.ClusterStore` says."""
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
        """Call `callback` on the event loop for each pod that is known now, and for each that is new or changes later.

        Also for a pod of multus-dynamic-networks-controller that is removed.
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
        """Return the name of this node's hot-plug controller pod, empty without one. Safe in any thread."""
        pods = self.pods.known().values()
        return next((str(pod) for pod in pods if pod.is_hotplug_controller and pod.phase in _SERVES), "")

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Ask the API server for the namespace, at most once a minute. Raises StoreUnavailableError."""
        if (labels := self._labels.get(name)) is not None:
            return labels
        what = f"namespace {name}"
        try:
            require_valid_name(what, name, name, PodNotFoundError)
            with as_port_errors(what, self.pods, PodNotFoundError):
                namespace = objects.decode_versioned(await self._get(f"/api/v1/namespaces/{name}"))
                labels = namespace.metadata.labels or {}
        except PodNotFoundError:
            labels = {}
        self._labels[name] = labels
        return labels

    def _network_changed(self, network: NetworkAttachmentDefinition) -> None:
        self.claims.network_changed(network)
        if '"whereabouts"' in network.config:
            self.shares_addresses.set()

    def reservations(self) -> KubeReservations:
        """Return the addresses that the cluster shares."""
        # Only some nodes have such an address.
        from multus_daemon.cluster.kube.reservations import KubeReservations

        return KubeReservations(self._client, self._namespace, self._metrics)

    async def node_pods(self) -> list[Pod]:
        """Return the informer's pods. Raises StoreUnavailableError while the informer does not receive changes."""
        if not self.pods.synced.is_set() or not self.pods.connected:
            raise StoreUnavailableError(f"pods of this node are not known: {self.pods.problem}")
        return list(self.pods.known().values())

    def report(self) -> dict[str, Any]:
        """Return the state of the informers and the status writer for `answers.status`. Safe in any thread."""
        informers: dict[str, Informer[Any]] = {"pods": self.pods, "networks": self.networks}
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


class Cluster:
    """The `ports.ClusterStore` for the threads of requests; uses a KubeStore on the event loop."""

    def __init__(self, store: KubeStore, portal: LoopPortal) -> None:
        self._store = store
        self._portal = portal
        # What is in memory is read in any thread.
        self.namespaces_with_network = store.namespaces_with_network
        self.hotplug_controller = store.hotplug_controller
        self.node_pods = portal.calling(store.node_pods)
        self.namespace_labels = portal.calling(store.namespace_labels)
        self.write_network_status = portal.calling(store.statuses.write)
        self.event = portal.telling(store.events.event)
        self.node_event = portal.telling(store.events.node_event)
        self.condition = portal.telling(store.conditions.put_condition)
        self.device_status = portal.telling(store.devices.put_report)

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """Return the pod, from memory if possible."""
        known = self._store.known_pod(namespace, name, uid)
        return known if known is not None else self._portal.call(self._store.pod, namespace, name, uid)

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """Return the NetworkAttachmentDefinition, from memory if possible."""
        known = self._store.networks.get((namespace, name))
        return known if known is not None else self._portal.call(self._store.network, namespace, name)


def is_incarnation(pod: Pod, uid: str) -> bool:
    """Return True if `uid`, which the runtime got from the kubelet, may be that of this pod."""
    # The API has the mirror of a static pod, with its own UID; the kubelet's UID is in its annotations.
    if not uid or uid == pod.uid or pod.is_static:
        return True
    return any(pod.annotations.get(key) == uid for key in _STATIC_UID_ANNOTATIONS)
