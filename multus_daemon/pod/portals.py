"""The blocking engine's way to the event loop: pods, networks, devices, plugin binaries, programs of the host.

Everything by which a request's thread reaches the loop is on this page. The thread reads the loop's objects directly
for what they know already.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from multus_daemon.runtime.portal import LoopPortal, Portal
from multus_daemon.spec import claims
from multus_daemon.spec.attachment import Allocation, Invocation, Pod, ToolExit
from multus_daemon.spec.cni import result
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.claims import Claims
    from multus_daemon.cluster.kube.store import KubeStore
    from multus_daemon.cluster.kubelet.source import KubeletDevices
    from multus_daemon.plugins.process import ProcessRunner
    from multus_daemon.plugins.tools import ToolRunner


class Cluster:
    """The `ports.ClusterStore` over the KubeStore, which lives on the event loop."""

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


class Devices:
    """The `ports.DeviceSource` over the kubelet's and the claims', which live on the event loop."""

    def __init__(self, source: KubeletDevices, portal: Portal, claims: Claims | None = None) -> None:
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
