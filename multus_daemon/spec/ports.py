"""What the engine needs from the world, as small Protocols, and the errors that they raise.

Implementations: ClusterStore - kube and standalone (`pod.portals`); ConfFiles - cluster.conf_files; DelegateStore -
pod.store; DeviceSource - kubelet (`pod.portals`); DeviceFiles - cluster.device_files. The contract of each is in its
docstring; `tests/contract/` runs one suite over every implementation and the fakes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Final, Protocol

from multus_daemon.spec.attachment import Attachment, ContainerRecord, Pod, SetAside
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.names import ContainerId, Namespace, PodName, PodUid
from multus_daemon.spec.nad.device_info import DeviceInfo
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition

# --- errors ----------------------------------------------------------------------------------------------------------


class PodNotFoundError(LookupError):
    """The store knows no such pod; the message names it and where was looked."""


class NetworkNotFoundError(LookupError):
    """The store knows no such NetworkAttachmentDefinition; the message names it and where was looked."""


class StoreUnavailableError(Exception):
    """The store can't be asked now (API server away, directory unreadable); the message says why."""


class DevicesUnavailableError(Exception):
    """Nobody can say now which devices a pod has been given; the message says why."""


class StatusWriteError(Exception):
    """The network-status could not be written now."""


class CorruptRecordError(Exception):
    """A stored record can't be read, and nothing else on disk tells what it held; the message names the file."""


# --- protocols -------------------------------------------------------------------------------------------------------


EVENT_MESSAGE_MAX: Final = 1000
"""Characters that a message should have at most: several that come together make one Event."""


class Events(Protocol):
    """Queues Kubernetes Events. Never blocks, never raises."""

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the pod, `kind` Normal or Warning."""
        ...

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the node."""
        ...


class ClusterStore(Events, Protocol):
    """Pods and networks as declared, and what is reported back about them."""

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """The pod; `uid` is a hint for stores that can wait until that incarnation is known, may be empty.

        The answer may have another UID: judging that is the caller's. Raises PodNotFoundError,
        StoreUnavailableError.
        """
        ...

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """The NetworkAttachmentDefinition. Raises NetworkNotFoundError, StoreUnavailableError."""
        ...

    def namespaces_with_network(self, name: str) -> list[str]:
        """The namespaces that have a NetworkAttachmentDefinition of that name, sorted, as far as is known without
        asking: for messages.
        """
        ...

    def node_pods(self) -> list[Pod]:
        """Every pod of this node, those that are ending included. Raises StoreUnavailableError.

        Raises too where what is known may be older than what there is: who is missing in the list is not there.
        """
        ...

    def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """Replace the pod's `k8s.v1.cni.cncf.io/network-status` by `value`, other annotations untouched.

        Raises StatusWriteError where that is not done within the caller's patience (a few seconds). `keep_trying`:
        the store then goes on in the background until it is written, replaced by a newer value, or the pod is gone.
        Refuses, as StatusWriteError and for good, to write to another incarnation of the pod (UID differs).
        """
        ...


class DeviceSource(Protocol):
    """Which devices the kubelet has given to a pod."""

    def allocated(self, pod: Pod) -> Mapping[str, Sequence[str]]:
        """Device ids by the name of their resource or claim, sorted; empty for a pod without any.

        Raises DevicesUnavailableError.
        """
        ...


class DeviceFiles(Protocol):
    """Device-info files (NPWG device-info SPEC): the device plugin's, and that of each attachment."""

    def path(self, attachment: Attachment, container_id: ContainerId) -> str:
        """Where the file of an attachment is, as plugins get it (runtimeConfig `CNIDeviceInfoFile`)."""
        ...

    def prepare(self, attachment: Attachment, path: str) -> None:
        """Put the device plugin's file of the attachment's device at `path`, if it has one. Raises OSError."""
        ...

    def read(self, path: str) -> DeviceInfo | None:
        """What is in the file; None where there is none. Raises CniError for one that can't be used, OSError."""
        ...

    def remove(self, path: str) -> None:
        """Remove the file; absent is done. Raises OSError."""
        ...


class DelegateStore(Protocol):
    """The write-ahead record of each container: on disk before the first plugin runs."""

    def load(self, container_id: ContainerId) -> ContainerRecord | None:
        """The record, None if there is none; as quick for a container without one, however many others there are.

        Raises CorruptRecordError, OSError.
        """
        ...

    def load_at_once(self, container_id: ContainerId) -> ContainerRecord | None:
        """As `load`, where no disk is needed for it; None where one is, or anything else is in the way."""
        ...

    def recover(self, container_id: ContainerId) -> ContainerRecord | None:
        """What another daemon left of a container that has no record of ours; None if nothing.

        `foreign` is set. Of one whose record of ours is damaged, what is kept beside it, if that is known to be all:
        else raises CorruptRecordError. May search through all that is left of all containers: slow. Raises OSError.
        """
        ...

    def save(self, record: ContainerRecord, *, durable: bool = True) -> None:
        """Write the record so that it survives a crash right after. Raises OSError, nothing is changed then.

        Without `durable` a power failure may lose it; the record that was durable before is found then. There is one.
        """
        ...

    def remove(self, container_id: ContainerId) -> None:
        """Forget the container; unknown is done. Raises OSError."""
        ...

    def set_aside(self, record: ContainerRecord, *, since: float, why: str) -> None:
        """Take the container out of the records, as that of which nothing more is tried. Raises OSError."""
        ...

    def aside(self) -> list[SetAside]:
        """What has been set aside, by container. Raises OSError."""
        ...

    def forget(self, container_id: ContainerId) -> bool:
        """Forget all that is known of the container, on record or set aside, readable or not; False: nothing was.

        Raises OSError, InvalidEnvironmentError for an id that is none.
        """
        ...

    def containers(self, *, foreign: bool = True) -> list[ContainerId]:
        """The ids of all records, sorted; without `foreign` of our own only. Raises OSError."""
        ...

    def leftovers(self, passed_over: Set[ContainerId], limit: int) -> dict[ContainerId, ContainerRecord | None]:
        """What another daemon left of up to `limit` containers, in one search; None for what can't be read.

        `foreign` is set. Not of containers that have a record of ours, nor of those in `passed_over`. Empty only where
        there are no more; fewer than `limit` says nothing. Raises OSError.
        """
        ...


class ConfFiles(Protocol):
    """CNI configurations in directories of the node, for networks that no NetworkAttachmentDefinition carries."""

    def by_name(self, directory: str, name: str) -> NetworkConfig | None:
        """The configuration in `directory` whose JSON `name` is `name`; None if there is none. Raises CniError."""
        ...

    def at_path(self, path: str) -> NetworkConfig:
        """The configuration in the file `path`, or in the lexically first one if it is a directory.

        Raises CniError.
        """
        ...

    def plugins_beside(self, path: str, name: str) -> tuple[bytes, ...]:
        """The plugin objects in `<directory of the file path>/<name>/*.conf`, in lexical order, as they are written.

        None where there is no such folder; `path` may be a directory, as for `at_path`. Raises CniError, which names
        the file.
        """
        ...
