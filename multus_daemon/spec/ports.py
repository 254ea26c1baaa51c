"""The ports of the engine: small Protocols, and the errors that they raise.

Implementations: ClusterStore - cluster.kube and cluster.standalone; ConfFiles - cluster.conf_files; DelegateStore -
pod.store; DeviceSource, DeviceFiles - cluster.devices. The contract of each is
in its docstring; `tests/contract/` runs one suite over every implementation and the fakes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Final, Protocol

from multus_daemon.spec.attachment import Allocation, Attachment, ContainerRecord, Pod, SetAside
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from multus_daemon.spec.nad.device_info import DeviceInfo
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition

# --- errors ----------------------------------------------------------------------------------------------------------


class PodNotFoundError(LookupError):
    """The store has no such pod; the message names the pod and the place that was searched."""


class NetworkNotFoundError(LookupError):
    """The store has no such NetworkAttachmentDefinition; the message names it and the place that was searched."""


class StoreUnavailableError(Exception):
    """The store is not available (API server unreachable, directory unreadable); the message says why."""

    def __init__(self, message: str, advice: str = "") -> None:
        """`advice`: what to do, if it is more than to bring the store back."""
        super().__init__(message)
        self.advice = advice


class DevicesUnavailableError(Exception):
    """The devices of a pod cannot be determined now; the message says why."""


class StatusWriteError(Exception):
    """The network-status could not be written."""


class CorruptRecordError(Exception):
    """A stored record cannot be read or recovered from other files; the message names the file."""


# --- protocols -------------------------------------------------------------------------------------------------------


EVENT_MESSAGE_MAX: Final = 1000
"""Maximum length of a message in characters; messages that arrive together are joined in one Event."""


class Events(Protocol):
    """Queues Kubernetes Events. Never blocks, never raises."""

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the pod, `kind` Normal or Warning."""

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the node."""


class ClusterStore(Events, Protocol):
    """Reads pods and networks from the cluster, and writes events and the network-status."""

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """Return the pod. `uid`, may be empty, is a hint: a store may wait until it has that incarnation.

        The pod may have another UID, which the caller must check. Raises PodNotFoundError, StoreUnavailableError.
        """

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """Return the NetworkAttachmentDefinition. Raises NetworkNotFoundError, StoreUnavailableError."""

    def namespaces_with_network(self, name: str) -> list[str]:
        """Return the sorted namespaces that have a NetworkAttachmentDefinition of that name, for messages.

        Reads only the cache, which may be incomplete.
        """

    def node_pods(self) -> list[Pod]:
        """Return every pod of this node, including terminating pods. Raises StoreUnavailableError.

        Also raises it if the cache may be stale, because the caller treats a pod that is not listed as gone.
        """

    def condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """Queue the pod's condition `multus.io/NetworksReady`; a newer one replaces one that is not written yet."""

    def device_status(self, pod: Pod, report: DeviceReport) -> None:
        """Queue what the pod has of a ResourceClaim; a newer report replaces one not written yet."""

    def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a namespace; they may be a minute old. Raises StoreUnavailableError."""

    def hotplug_controller(self) -> str:
        """Return the name of a pod of this node that is multus-dynamic-networks-controller; empty if none is known."""

    def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """Replace the annotation `k8s.v1.cni.cncf.io/network-status` of the pod by `value`.

        Raises StatusWriteError if the write takes more than a few seconds. With `keep_trying` the store then retries
        in the background until the value is written, a newer value replaces it, or the pod is gone. Never writes to
        another incarnation of the pod (the UID differs): raises StatusWriteError without a retry.
        """


class DeviceSource(Protocol):
    """Reports the devices of pods: those of device plugins, and those of ResourceClaims."""

    def allocated(self, pod: Pod, resources: Collection[str]) -> Allocation:
        """Return the devices of the pod, at least those of `resources`, which may be names of claims.

        Raises DevicesUnavailableError.
        """


class DeviceFiles(Protocol):
    """Manages device-info files (NPWG device-info SPEC) of device plugins and of attachments."""

    def path(self, attachment: Attachment, container_id: ContainerId) -> str:
        """Return the path of the attachment's file, as passed to plugins (runtimeConfig `CNIDeviceInfoFile`)."""

    def prepare(self, attachment: Attachment, path: str) -> None:
        """Copy the device plugin's file of the attachment's device, if there is one, to `path`. Raises OSError."""

    def read(self, path: str) -> DeviceInfo | None:
        """Return the content of the file, None if it does not exist. Raises CniError if it is invalid, OSError."""

    def remove(self, path: str) -> None:
        """Remove the file; an absent file is treated as success. Raises OSError."""


class DelegateStore(Protocol):
    """Stores a write-ahead record of each container, on disk before the first plugin runs."""

    def load(self, container_id: ContainerId) -> ContainerRecord | None:
        """Return the record, None if the container has none. Raises CorruptRecordError, OSError.

        The time does not depend on the number of records, even if the container has none.
        """

    def load_at_once(self, container_id: ContainerId) -> ContainerRecord | None:
        """Return the record if that takes no disk access; None if it does, or on any problem. See `load`."""

    def recover(self, container_id: ContainerId) -> ContainerRecord | None:
        """Return the state that another daemon left of a container without a record of ours; None if there is none.

        The record has `foreign` set. If our record is damaged, the leftovers must be known to be complete, or
        CorruptRecordError is raised. Slow: may search the leftovers of all containers. Raises OSError.
        """

    def save(self, record: ContainerRecord, *, durable: bool = True) -> None:
        """Write the record so that it survives a crash. Raises OSError, and changes nothing then.

        Without `durable` a power failure may lose it and restore the previous durable record, which must exist.
        """

    def mark(self, container_id: ContainerId, leaving: Collection[tuple[str, str]]) -> None:
        """Mark attachments, by network and interface, as leaving; a power failure may lose the mark.

        Raises FileNotFoundError if the container has no record of ours, OSError.
        """

    def remove(self, container_id: ContainerId) -> None:
        """Delete the record; a container without a record is treated as success. Raises OSError."""

    def set_aside(self, record: ContainerRecord, *, since: float, why: str) -> None:
        """Move the container from the records to the set-aside ones, which are not retried. Raises OSError."""

    def aside(self) -> list[SetAside]:
        """Return the records that are set aside, sorted by container. Raises OSError."""

    def forget(self, container_id: ContainerId) -> bool:
        """Delete all records of the container, also set-aside and unreadable ones; return False if there were none.

        Raises OSError, and InvalidEnvironmentError if the id is invalid.
        """

    def containers(self, *, foreign: bool = True) -> list[ContainerId]:
        """Return the sorted ids of all records; without `foreign`, of our own records only. Raises OSError."""

    def leftovers(self, passed_over: Set[ContainerId], limit: int) -> dict[ContainerId, ContainerRecord | None]:
        """Return the state that another daemon left of up to `limit` containers, in one search; None if unreadable.

        The records have `foreign` set. Skips containers with a record of ours, and those in `passed_over`. The result
        is empty only if no more are left; fewer than `limit` does not mean that. Raises OSError.
        """


class ConfFiles(Protocol):
    """Reads CNI configurations from the node, for networks without one in a NetworkAttachmentDefinition."""

    def by_name(self, directory: str, name: str) -> NetworkConfig | None:
        """Return the configuration in `directory` whose JSON `name` is `name`, None if not found. Raises CniError."""

    def at_path(self, path: str) -> NetworkConfig:
        """Return the configuration in the file `path`, or in the lexically first file if `path` is a directory.

        Raises CniError.
        """

    def plugins_beside(self, path: str, name: str) -> tuple[bytes, ...]:
        """Return the bytes of the files `<directory of the file path>/<name>/*.conf`, in lexical order.

        Each holds a plugin object. Empty if there is no such folder. `path` may be a directory, as for `at_path`.
        Raises CniError, which names the file.
        """
