"""The cluster store on a cluster: pods and networks from informers, status and events to the API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final, TypeVar

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, KubeError
from multus_daemon.cluster.kube.events import EventRecorder
from multus_daemon.cluster.kube.informer import Informer
from multus_daemon.cluster.kube.objects import Key
from multus_daemon.cluster.kube.status import StatusWriter
from multus_daemon.metrics import ClusterMetrics
from multus_daemon.runtime.aio import KeyedLock
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.args import KubernetesArgs
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad import names, selection
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError, PodNotFoundError, StoreUnavailableError

T = TypeVar("T")

ABSENT_SECONDS: Final = 1.0
"""A network that the API server did not have is not asked for again so soon."""
ABSENT_MAX: Final = 1024

_STATIC_UID_ANNOTATIONS: Final = ("kubernetes.io/config.hash", "kubernetes.io/config.mirror")


class KubeStore:
    """Implements `pod.portals.LoopStore`. Making one touches nothing; `run` is a root task.

    Gates: `pods` and `networks`, each open once it has been listed.
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
        """`node`: the name under which the cluster knows this node; patience in seconds."""
        self._client = client
        self._pod_patience = pod_patience
        self._unsynced_patience = min(pod_patience, unsynced_patience)
        self.statuses = StatusWriter(client, metrics=metrics, on_written=self._answered)
        self.events = EventRecorder(client, host=node, metrics=metrics)
        self.pods = Informer(client, objects.pods_of(node), gates, metrics=metrics, on_connected=self._answered)
        self.networks = Informer(client, objects.networks(), gates, metrics=metrics, on_connected=self._answered)
        self._absent: OrderedDict[Key, float] = OrderedDict()
        self._lookups = KeyedLock()

    async def run(self) -> None:
        """Watch, write and post for ever; ends only by cancellation, or with the failure of one of its tasks."""
        async with asyncio.TaskGroup() as group:
            for name, work in (
                ("pods", self.pods.run()),
                ("networks", self.networks.run()),
                ("statuses", self.statuses.run()),
                ("events", self.events.run()),
            ):
                group.create_task(work, name=name)

    async def drain(self, timeout: float) -> None:
        """Write and post what still waits, for `timeout` seconds at most; for a daemon that stops, after `run`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.gather(self.statuses.flush(), self.events.flush())

    # --- portals.LoopStore ---

    def known_pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod | None:
        """See `pod.portals.LoopStore`."""
        found = self.pods.get((namespace, name))
        return found if found is not None and is_incarnation(found, uid) else None

    def asked_networks(self, args: KubernetesArgs) -> str:
        """What the pod's annotations say of its networks, as text: the same for pods of one template.

        Empty where it says nothing, or is not known. From any thread.
        """
        pod = self.known_pod(args.namespace, args.name, args.uid)
        annotations = pod.annotations if pod is not None else {}
        keys = (selection.DEFAULT_NETWORK_ANNOTATION, selection.NETWORKS_ANNOTATION)
        return "\n".join(annotations[key] for key in keys if key in annotations)

    def known_network(self, namespace: str, name: str) -> NetworkAttachmentDefinition | None:
        """See `pod.portals.LoopStore`."""
        return self.networks.get((namespace, name))

    def namespaces_with_network(self, name: str) -> list[str]:
        """See `ports.ClusterStore`."""
        return sorted(namespace for namespace, found in self.networks.names() if found == name)

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """See `ports.ClusterStore`. Waits for the watch's event, then asks the API server once."""
        _check(f"pod {namespace}/{name}", namespace, name, PodNotFoundError)
        key = (namespace, name)
        deleted = self.pods.deleted_uid(key)
        # Of a pod that has been seen to go nothing more is heard.
        if deleted is None or (uid and deleted != uid):
            patience = self._pod_patience if self.pods.connected else self._unsynced_patience
            found = await self.pods.wait_for(key, lambda pod: is_incarnation(pod, uid), patience)
            if found is not None:
                return found
        with _asking(f"pod {namespace}/{name}", self.pods, PodNotFoundError):
            body = await self._client.request(
                "GET", objects.pod_path(namespace, name), timeout=deadlines.API_READ_SECONDS
            )
            self._answered()
            return objects.decode_pod(body).value

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """See `ports.ClusterStore`. Asks the API server once for what the informer does not have."""
        what = f"NetworkAttachmentDefinition {namespace}/{name}"
        key = (namespace, name)
        if (found := self.networks.get(key)) is not None:
            return found
        _check(what, namespace, name, NetworkNotFoundError)
        if not self.networks.synced.is_set():
            found = await self.networks.wait_for(key, lambda _: True, self._unsynced_patience)
            if found is not None:
                return found
        # Side by side, many pods may ask for the same network that is not there.
        async with self._lookups.hold(f"{namespace}/{name}"):
            if (found := self.networks.get(key)) is not None:
                return found
            if self._absent.get(key, float("-inf")) > _now():
                raise NetworkNotFoundError(f"the API server has no {what}")
            return await self._live_network(what, key)

    async def _live_network(self, what: str, key: Key) -> NetworkAttachmentDefinition:
        try:
            with _asking(what, self.networks, NetworkNotFoundError):
                body = await self._client.request("GET", objects.network_path(*key), timeout=deadlines.API_READ_SECONDS)
                self._answered()
                return objects.decode_network(body).value
        except NetworkNotFoundError:
            self._absent[key] = _now() + ABSENT_SECONDS
            self._absent.move_to_end(key)
            if len(self._absent) > ABSENT_MAX:
                self._absent.popitem(last=False)
            raise

    def report(self) -> dict[str, Any]:
        """How well the cluster is known now; for `diagnosis.status`. From any thread."""
        informers: dict[str, Informer[Any]] = {"pods": self.pods, "networks": self.networks}
        return {
            "kind": "kubernetes",
            "informers": [
                {
                    "resource": resource,
                    "objects": len(informer),
                    "staleSeconds": round(informer.stale_seconds, 1) if informer.synced.is_set() else None,
                    "problem": "" if informer.connected else informer.problem,
                }
                for resource, informer in informers.items()
            ],
            "pendingStatuses": self.statuses.pending,
        }

    async def node_pods(self) -> list[Pod]:
        """See `ports.ClusterStore`. What the informer has, while it hears of changes."""
        if not self.pods.synced.is_set() or not self.pods.connected:
            raise StoreUnavailableError(f"pods of this node: {self.pods.problem}")
        return self.pods.values()

    async def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """See `ports.ClusterStore`. One PATCH, repeated for 2 s at most, and then behind the scenes."""
        await self.statuses.write(pod, value, keep_trying=keep_trying)

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """See `ports.ClusterStore`."""
        self.events.event(pod, kind, reason, message)

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """See `ports.ClusterStore`."""
        self.events.node_event(kind, reason, message)

    def _answered(self) -> None:
        """The API server has just answered: nobody needs to wait out a pause any more."""
        self.statuses.kick()
        self.pods.poke()
        self.networks.poke()


def is_incarnation(pod: Pod, uid: str) -> bool:
    """Whether `uid`, which the runtime has from the kubelet, may be this pod's.

    Of a static pod the API has the mirror, with a UID of its own; the kubelet's is in annotations of it.
    """
    if not uid or uid == pod.uid or pod.is_static:
        return True
    return any(pod.annotations.get(key) == uid for key in _STATIC_UID_ANNOTATIONS)


def _check(what: str, namespace: str, name: str, missing: type[LookupError]) -> None:
    """A name that no object can have is not asked for: it would be part of a path. Raises `missing`."""
    problem = names.label_problem(namespace) or names.subdomain_problem(name)
    if problem:
        raise missing(f"{what}: the name {problem}")


@contextlib.contextmanager
def _asking(what: str, informer: Informer[T], missing: type[LookupError]) -> Iterator[None]:
    """The edge at which errors of the API become the port's."""
    try:
        yield
    except ApiError as error:
        if error.status == 404:
            raise missing(f"the API server has no {what}") from error
        raise StoreUnavailableError(f"{what}: the API server refuses: {error}") from error
    except KubeError as error:
        behind = "" if informer.synced.is_set() else f"; {informer.problem}"
        raise StoreUnavailableError(f"{what}: the API server can't be asked: {error}{behind}") from error
    except objects.DECODE_ERRORS as error:
        raise StoreUnavailableError(f"{what}: the API server's answer is no such object: {error}") from error


def _now() -> float:
    return asyncio.get_running_loop().time()
