"""A cluster store in memory. No smarter than the real ones: what is not put into it is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad import network_status
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import (
    EVENT_MESSAGE_MAX,
    NetworkNotFoundError,
    PodNotFoundError,
    StatusWriteError,
    StoreUnavailableError,
)


class FakeClusterStore:
    """Implements `ports.ClusterStore`; records its calls and fails at the one it is told to.

    `unsynced`: it does not know every pod now.
    """

    def __init__(self, pods: Iterable[Pod] = (), networks: Iterable[NetworkAttachmentDefinition] = ()) -> None:
        self.pods = {(pod.namespace, pod.name): pod for pod in pods}
        self.networks = {(network.namespace, network.name): network for network in networks}
        self.statuses: dict[str, str] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.conditions: dict[str, tuple[bool, str, str]] = {}
        self.device_reports: dict[str, DeviceReport] = {}
        self.events: list[tuple[str, str, str, str]] = []
        self.calls: list[tuple[str, ...]] = []
        self.unsynced = False
        self._failures: dict[int, BaseException] = {}
        self._guard = threading.Lock()

    def fail_at(self, number: int, error: BaseException) -> None:
        """Raise `error` at the call `number`, counted from 1; events do not count, they never raise."""
        self._failures[number] = error

    def put_pod(self, pod: Pod) -> None:
        """Declare the pod, in place of one of the same name."""
        self.pods[pod.namespace, pod.name] = pod

    def put_network(self, network: NetworkAttachmentDefinition) -> None:
        """Declare the network, in place of one of the same name."""
        self.networks[network.namespace, network.name] = network

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """See `ports.ClusterStore`."""
        self._call("pod", namespace, name, uid)
        found = self.pods.get((namespace, name))
        if found is None:
            raise PodNotFoundError(f"pod {namespace}/{name} is not in the fake store")
        return found

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """See `ports.ClusterStore`."""
        self._call("network", namespace, name)
        found = self.networks.get((namespace, name))
        if found is None:
            raise NetworkNotFoundError(f"network {namespace}/{name} is not in the fake store")
        return found

    def namespaces_with_network(self, name: str) -> list[str]:
        """See `ports.ClusterStore`."""
        return sorted(namespace for namespace, found in self.networks if found == name)

    def node_pods(self) -> list[Pod]:
        """See `ports.ClusterStore`."""
        self._call("node_pods")
        if self.unsynced:
            raise StoreUnavailableError("the fake store is told not to know")
        return list(self.pods.values())

    def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """See `ports.ClusterStore`; kept in `statuses` by `namespace/name`."""
        self._call("write_network_status", str(pod), value)
        present = self.pods.get((pod.namespace, pod.name))
        if present is None or present.uid != pod.uid:
            raise StatusWriteError(
                f"{network_status.ANNOTATION} of pod {pod}: another incarnation is in the fake store"
            )
        self.statuses[str(pod)] = value

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """See `ports.ClusterStore`; kept in `events`."""
        self.events.append((str(pod), kind, reason, message[:EVENT_MESSAGE_MAX]))

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """See `ports.ClusterStore`; kept in `events`, about "node"."""
        self.events.append(("node", kind, reason, message[:EVENT_MESSAGE_MAX]))

    def namespace_labels(self, name: str) -> Mapping[str, str]:
        """See `ports.ClusterStore`; those in `labels`."""
        self._call("namespace_labels", name)
        return self.labels.get(name, {})

    def hotplug_controller(self) -> str:
        """See `ports.ClusterStore`; a pod that says so."""
        return next((str(pod) for pod in self.pods.values() if pod.is_hotplug_controller), "")

    def condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """See `ports.ClusterStore`; kept in `conditions` by `namespace/name`."""
        self.conditions[str(pod)] = (ready, reason, message)

    def device_status(self, pod: Pod, report: DeviceReport) -> None:
        """See `ports.ClusterStore`; the last of each claim is in `device_reports`."""
        self.device_reports[report.claim] = report

    def _call(self, *call: str) -> None:
        with self._guard:
            self.calls.append(call)
            number = len(self.calls)
        if error := self._failures.pop(number, None):
            raise error


class WarmStore:
    """A cluster store on the event loop that knows every answer; writing a status is its only request."""

    def __init__(self, networks: Mapping[str, str], pod: Pod) -> None:
        self._networks = networks
        self._pod = pod
        self.written: list[str] = []
        self.networks = self.statuses = self.conditions = self.devices = self.events = self

    def known_pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod | None:
        return self._pod

    def get(self, key: tuple[str, str]) -> NetworkAttachmentDefinition:
        return NetworkAttachmentDefinition(*key, self._networks[key[1]])

    def namespaces_with_network(self, name: str) -> list[str]:
        raise AssertionError("no network is missing")

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        raise AssertionError("it is known")

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        raise AssertionError("it is known")

    async def node_pods(self) -> list[Pod]:
        return [self._pod]

    async def write(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        self.written.append(value)

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        return {}

    def hotplug_controller(self) -> str:
        return ""

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        pass

    def put_condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        pass

    def put_report(self, pod: Pod, report: DeviceReport) -> None:
        pass

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        pass

    def node_event(self, kind: str, reason: str, message: str) -> None:
        pass
