"""The Protocols of a cluster's store, their errors, and the errors about devices and records that `pod/` handles.

Implementations: `cluster.kube` and `cluster.standalone`. `tests/contract/` runs one suite over both and the fake.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, Protocol

from multus_daemon.spec.addresses import Address, AddressRange, Owner, Reservation
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition


class PodNotFoundError(LookupError):
    """The store has no such pod; the message names the pod and the place that was searched."""


class NetworkNotFoundError(LookupError):
    """The store has no such NetworkAttachmentDefinition; the message names it and the place that was searched."""


class StoreUnavailableError(Exception):
    """The cluster can't be read now (API server unreachable, directory unreadable); the message says why."""

    def __init__(self, message: str, advice: str = "") -> None:
        """`advice`: what to do; empty if it is only to make the API server or the directory available."""
        super().__init__(message)
        self.advice = advice


class StoreRefusesError(StoreUnavailableError):
    """The cluster will refuse it again: a right, or a kind of object, is missing."""


class DevicesUnavailableError(Exception):
    """The devices of a pod cannot be determined now; the message says why."""


class AddressHeldError(Exception):
    """The address is held by another owner; the message says by whom."""

    def __init__(self, message: str, holder: Reservation | None) -> None:
        """`holder`: None if it is not known."""
        super().__init__(message)
        self.holder = holder


class StatusWriteError(Exception):
    """The network-status could not be written."""


class CorruptRecordError(Exception):
    """A stored record cannot be read or recovered from other files; the message names the file."""


EVENT_MESSAGE_MAX: Final = 1000
"""Maximum length of an Event's message in characters. Messages that are queued together share one Event."""


class Events(Protocol):
    """Queues Kubernetes Events, with at most `EVENT_MESSAGE_MAX` of each message. Never blocks, never raises."""

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the pod, `kind` Normal or Warning."""

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the node."""


class ClusterStore(Events, Protocol):
    """Reads pods and networks from the cluster, and writes events and the network-status."""

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """Return the pod. `uid` is a hint, and may be empty: a store may wait until it knows the pod with that UID.

        The caller must check the UID of the returned pod. Raises PodNotFoundError, StoreUnavailableError.
        """

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """Return the NetworkAttachmentDefinition. Raises NetworkNotFoundError, StoreUnavailableError."""

    def namespaces_with_network(self, name: str) -> list[str]:
        """Return the sorted namespaces that have a NetworkAttachmentDefinition of that name, for messages.

        Reads only the store's cache, which may be incomplete.
        """

    def node_pods(self) -> list[Pod]:
        """Return every pod of this node, including terminating pods. Raises StoreUnavailableError.

        Also raises it if the cache may be stale: the caller treats a pod that is not in the list as gone.
        """

    def condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """Queue a write of the pod's condition `multus.io/NetworksReady`. It replaces a write that is still queued."""

    def device_status(self, pod: Pod, report: DeviceReport) -> None:
        """Queue a write of the pod's entries in a ResourceClaim's status. It replaces a write that is still queued."""

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


class AddressBook(Protocol):
    """The addresses that the whole cluster shares, as this node knows them. For any thread.

    Answers come from memory, which a watch follows: only `ask`, `begin`, `create`, `take_over` and `gone` wait for the
    API server, within the deadline of the request. `scope`: see `Reservation`.
    """

    @property
    def refusal(self) -> str:
        """Why the cluster lets this node reserve nothing, such as for lack of a right; empty as far as is known."""

    def ask(self) -> None:
        """Return once `refusal` is known, or the API server does not say now: the first call takes seconds at most."""

    def begin(self) -> None:
        """Watch the objects from now on; return when the first list is here. Raises StoreUnavailableError."""

    def taken(self, source: AddressRange) -> Container[int]:
        """Return the addresses that are held, as numbers, by reservations or entries of the range's pool.

        The answer is a live view, for one choice of an address.
        """

    def serves(self, network: str, source: AddressRange) -> None:
        """Note that this node takes addresses of the range for the network, for the metrics."""

    def holder(self, address: Address, source: AddressRange) -> Reservation | None:
        """Return who holds the address; None if it is free. The container's id is empty if it is on another node."""

    def is_cooling(self, address: Address, scope: str) -> bool:
        """Return True if this node frees the address, or freed it less than a minute ago."""

    def last(self, podref: str, ifname: str, scope: str) -> Address | None:
        """Return the address that the pod's interface had last, if it was freed since this daemon watches."""

    def create(self, reservation: Reservation) -> Reservation:
        """Reserve the address for its owner on this node: the lock. Returns the reservation with node and UID.

        While whereabouts' binary writes the pool, it gets an entry later. If the owner holds the address already, or
        its claim does, that is a success. Raises AddressHeldError, StoreUnavailableError, OSError; then nothing needs
        to be released.
        """

    def claimed(self, claim: str, scope: str) -> Sequence[Reservation]:
        """Return the addresses that a claim holds."""

    def release(self, owner: Owner, podref: str) -> None:
        """Free what the owner holds as soon as its interface is gone; also what whereabouts' binary has given it.

        What a claim holds stays until the claim is gone.

        Returns at once: until the record no longer has the attachment, and until the API server answers, it waits on
        disk. Raises OSError if it cannot be written.
        """

    def held_by(self, owner: Owner) -> Sequence[Reservation]:
        """Return the addresses that the owner holds, from this node's files."""

    def problem(self, owner: Owner) -> str:
        """Return why an address of the owner may be another's; empty if it holds all of them."""

    def gone(self, nodes: Iterable[str]) -> Mapping[str, str]:
        """Return which of these nodes can hold nothing any more, and why: deleted, or tainted out-of-service.

        Empty for nodes that cannot be asked about now.
        """

    def take_over(self, old: Reservation, new: Reservation) -> Reservation:
        """Reserve an address of a node that is `gone`: remove the reservation `old`, as it is now, and create `new`.

        Raises as `create`, also AddressHeldError if another node has done so meanwhile.
        """
