"""What the blocking engine needs of the event loop: pods, networks, devices, plugin binaries, programs of the host.

Everything by which a request's thread reaches the loop is on this page. What the loop's objects know already is read
without going there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from multus_daemon.runtime.portal import LoopPortal, Portal
from multus_daemon.spec.attachment import Invocation, Pod, ToolExit
from multus_daemon.spec.cni import result
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition
from multus_daemon.spec.ports import Events


class LoopStore(Events, Protocol):
    """A `ports.ClusterStore` that lives on the event loop: kube, standalone."""

    def known_pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod | None:
        """The pod, where that can be told without waiting or asking. From any thread."""
        ...

    def known_network(self, namespace: str, name: str) -> NetworkAttachmentDefinition | None:
        """The NetworkAttachmentDefinition, where that can be told without waiting or asking. From any thread."""
        ...

    def namespaces_with_network(self, name: str) -> list[str]:
        """See `ports.ClusterStore`. From any thread."""
        ...

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """See `ports.ClusterStore`."""
        ...

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """See `ports.ClusterStore`."""
        ...

    async def node_pods(self) -> list[Pod]:
        """See `ports.ClusterStore`."""
        ...

    async def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """See `ports.ClusterStore`."""
        ...


class Cluster:
    """The `ports.ClusterStore` over one of the loop's."""

    def __init__(self, store: LoopStore, portal: LoopPortal) -> None:
        self._store = store
        self._portal = portal

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """See `ports.ClusterStore`."""
        known = self._store.known_pod(namespace, name, uid)
        return known if known is not None else self._portal.call(self._store.pod, namespace, name, uid)

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """See `ports.ClusterStore`."""
        known = self._store.known_network(namespace, name)
        return known if known is not None else self._portal.call(self._store.network, namespace, name)

    def namespaces_with_network(self, name: str) -> list[str]:
        """See `ports.ClusterStore`."""
        return self._store.namespaces_with_network(name)

    def node_pods(self) -> list[Pod]:
        """See `ports.ClusterStore`."""
        return self._portal.call(self._store.node_pods)

    def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """See `ports.ClusterStore`."""
        self._portal.call(self._store.write_network_status, pod, value, keep_trying=keep_trying)

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """See `ports.Events`."""
        self._portal.tell(self._store.event, pod, kind, reason, message)

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """See `ports.Events`."""
        self._portal.tell(self._store.node_event, kind, reason, message)


class LoopDevices(Protocol):
    """A `ports.DeviceSource` that lives on the event loop: kubelet."""

    async def allocated(self, pod: Pod) -> Mapping[str, Sequence[str]]:
        """See `ports.DeviceSource`."""
        ...


class Devices:
    """The `ports.DeviceSource` over the loop's."""

    def __init__(self, source: LoopDevices, portal: Portal) -> None:
        self._source = source
        self._portal = portal

    def allocated(self, pod: Pod) -> Mapping[str, Sequence[str]]:
        """See `ports.DeviceSource`."""
        return self._portal.call(self._source.allocated, pod)


class LoopRunner(Protocol):
    """A `ports.BinaryRunner` that lives on the event loop: delegates.process."""

    def locate(self, plugin_type: str) -> str:
        """See `ports.PluginRunner`. From any thread."""
        ...

    def refuse_multus(self, plugin_type: str, path: str) -> None:
        """See `ports.BinaryRunner`. From any thread."""
        ...

    async def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> bytes:
        """What it printed; see `ports.BinaryRunner`."""
        ...


class Binaries:
    """The `ports.BinaryRunner` over the loop's: it starts them, the thread waits."""

    def __init__(self, runner: LoopRunner, portal: Portal) -> None:
        self._runner = runner
        self._portal = portal

    def locate(self, plugin_type: str) -> str:
        """See `ports.PluginRunner`."""
        return self._runner.locate(plugin_type)

    def refuse_multus(self, plugin_type: str, path: str) -> None:
        """See `ports.BinaryRunner`."""
        self._runner.refuse_multus(plugin_type, path)

    def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> Result:
        """See `ports.BinaryRunner`."""
        stdout = self._portal.call(self._runner.run, plugin_type, invocation, path)
        return result.decode(stdout, invocation.cni_version) if invocation.verb == "ADD" else Result()


class LoopTools(Protocol):
    """`ports.HostTools` that live on the event loop: delegates.tools."""

    async def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """See `ports.HostTools`."""
        ...


class Tools:
    """The `ports.HostTools` over the loop's."""

    def __init__(self, tools: LoopTools, portal: Portal) -> None:
        self._tools = tools
        self._portal = portal

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """See `ports.HostTools`."""
        return self._portal.call(self._tools.run, tool, arguments, stdin)
