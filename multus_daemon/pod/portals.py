"""The blocking engine's way to the event loop: pods, networks, devices, plugin binaries, programs of the host.

Everything by which a request's thread reaches the loop is on this page. The thread reads the loop's objects directly
for what they know already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from multus_daemon.runtime.portal import LoopPortal, Portal
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, Invocation, Pod, ToolExit
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni import result
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import Events

if TYPE_CHECKING:
    from multus_daemon.cluster.kubelet.source import KubeletDevices
    from multus_daemon.plugins.process import ProcessRunner
    from multus_daemon.plugins.tools import ToolRunner


class LoopStore(Events, Protocol):
    """The asynchronous form of `ports.ClusterStore`; KubeStore and StandaloneStore have it."""

    def known_pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod | None:
        """Return the pod if it is known without waiting or asking. From any thread."""

    def known_network(self, namespace: str, name: str) -> NetworkAttachmentDefinition | None:
        """Return the NetworkAttachmentDefinition if it is known without waiting or asking. From any thread."""

    def namespaces_with_network(self, name: str) -> list[str]:
        """Return the namespaces that are known to have the network. From any thread."""

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """Return the pod."""

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """Return the NetworkAttachmentDefinition."""

    async def node_pods(self) -> list[Pod]:
        """Return every pod of the node."""

    def condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """Queue the pod's condition `multus.io/NetworksReady`; a newer one replaces one that is not written yet."""

    def device_status(self, pod: Pod, report: DeviceReport) -> None:
        """Queue what the pod has of a ResourceClaim."""

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a namespace."""

    def hotplug_controller(self) -> str:
        """Return the name of a pod of this node that serves hot-plug. From any thread."""

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        """Call `callback`, which never raises, on the loop for each pod that is new or has other annotations.

        Also for a pod that has served hot-plug and is gone.
        """

    async def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """Replace the pod's network-status."""


class Cluster:
    """The `ports.ClusterStore` over one of the loop's."""

    def __init__(self, store: LoopStore, portal: LoopPortal) -> None:
        self._store = store
        self._portal = portal

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """Return the pod, from memory if possible."""
        known = self._store.known_pod(namespace, name, uid)
        return known if known is not None else self._portal.call(self._store.pod, namespace, name, uid)

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """Return the NetworkAttachmentDefinition, from memory if possible."""
        known = self._store.known_network(namespace, name)
        return known if known is not None else self._portal.call(self._store.network, namespace, name)

    def namespaces_with_network(self, name: str) -> list[str]:
        """Return the namespaces that are known to have the network."""
        return self._store.namespaces_with_network(name)

    def node_pods(self) -> list[Pod]:
        """Return every pod of the node."""
        return self._portal.call(self._store.node_pods)

    def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a namespace."""
        return self._portal.call(self._store.namespace_labels, name)

    def hotplug_controller(self) -> str:
        """Return the name of a pod of this node that serves hot-plug."""
        return self._store.hotplug_controller()

    def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """Replace the pod's network-status."""
        self._portal.call(self._store.write_network_status, pod, value, keep_trying=keep_trying)

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the pod."""
        self._portal.tell(self._store.event, pod, kind, reason, message)

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the node."""
        self._portal.tell(self._store.node_event, kind, reason, message)

    def condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """Queue the pod's condition."""
        self._portal.tell(self._store.condition, pod, ready=ready, reason=reason, message=message)

    def device_status(self, pod: Pod, report: DeviceReport) -> None:
        """Queue what the pod has of a ResourceClaim."""
        self._portal.tell(self._store.device_status, pod, report)


class ClaimSource(Protocol):
    """The devices of ResourceClaims."""

    def known(self, pod: Pod) -> Allocation | None:
        """Return the devices if they are known without waiting or asking. From any thread."""

    async def allocated(self, pod: Pod) -> Allocation:
        """Return the devices. Raises DevicesUnavailableError."""


class Devices:
    """The `ports.DeviceSource` over the kubelet's and the claims', which live on the event loop."""

    def __init__(self, source: KubeletDevices, portal: Portal, claims: ClaimSource | None = None) -> None:
        """`claims`: None if pods have none."""
        self._source = source
        self._portal = portal
        self._claims = claims

    def allocated(self, pod: Pod, resources: Collection[str]) -> Allocation:
        """Return the devices of the pod. Raises DevicesUnavailableError."""
        of_claims = self._claims.known(pod) if self._claims else Allocation()
        if self._claims and of_claims is None:
            of_claims = self._portal.call(self._claims.allocated, pod)
        if of_claims and not pod.asks_for_extended_resources and of_claims.devices.keys() >= set(resources):
            # The kubelet knows no more. Its client is 10 MB.
            return of_claims
        of_kubelet = Allocation(self._portal.call(self._source.allocated, pod))
        return claims.merged(of_kubelet, of_claims or Allocation())


class Binaries:
    """The BinaryRunner over a ProcessRunner: the event loop runs the process, the calling thread waits."""

    def __init__(self, runner: ProcessRunner, portal: Portal) -> None:
        self._portal = portal
        self._run = runner.run
        self.locate = runner.locate
        self.refuse_multus = runner.refuse_multus

    def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> Result:
        """Run the binary and decode the result of an ADD. Raises CniError (`ProcessRunner.run`)."""
        stdout = self._portal.call(self._run, plugin_type, invocation, path)
        return result.decode(stdout, invocation.cni_version) if invocation.verb == "ADD" else Result()


class Tools:
    """The HostTools over a ToolRunner: the event loop runs the program, the calling thread waits."""

    def __init__(self, tools: ToolRunner, portal: Portal) -> None:
        self._tools = tools
        self._portal = portal

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Run the program to its end. Raises ToolNotFoundError, CniError (`ToolRunner.run`)."""
        return self._portal.call(self._tools.run, tool, arguments, stdin)
