"""The values that cross the engine's ports: pods, networks of a container, its record, one call of a plugin."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from multus_daemon.spec.cni import conf, gojson, names
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result, Route, to_object

BUILT_IN: Final = "built-in"
"""The place of a plugin in this process; a binary's place is its path."""
INFO_FILE: Final = "CNIDeviceInfoFile"
"""The capability that takes the path of a device-info file (device-info SPEC 5.1)."""
LEAVING: Final = "leaving"
"""The `Attachment.attached_for` of an attachment that was cut off: no element is equal to it."""


class PodCondition(NamedTuple):
    """The condition `multus.io/NetworksReady` of a pod."""

    is_ready: bool
    reason: str
    message: str
    since: str
    """Time of the last transition, as the API writes it."""


class ExtendedClaim(NamedTuple):
    """The claim that the scheduler made for extended resources (core/v1 PodExtendedResourceClaimStatus)."""

    name: str
    resources: tuple[tuple[str, str], ...]
    """Request of the claim and name of the resource."""


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device that a ResourceClaim has, as its status names it (resource.k8s.io/v1 DeviceRequestAllocationResult)."""

    claim: str
    """Name of the claim, in the pod's namespace."""
    claim_uid: str
    driver: str
    pool: str
    device: str
    share_id: str = ""

    @property
    def pool_key(self) -> tuple[str, str]:
        """Driver and pool: drivers choose the names of their pools independently."""
        return self.driver, self.pool


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices that a pod has."""

    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sorted device ids by the name of their resource, or of their claim."""
    claimed: Mapping[tuple[str, str], ClaimedDevice] = field(default_factory=dict)
    """The devices that ResourceClaims have allocated, by resource and device id."""
    left_out: tuple[str, ...] = ()
    """For each device or claim that gives no device id, the reason."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The parts of a Kubernetes pod that networking needs."""

    namespace: Namespace
    name: PodName
    uid: PodUid
    annotations: Mapping[str, str] = field(default_factory=dict)
    host_network: bool = False
    claims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """ResourceClaim objects of the pod (DRA), by the names in its spec and by the names of their templates."""
    phase: str = ""
    """`Pending`, `Running`, ...; empty if not known."""
    is_hotplug_controller: bool = False
    """True for multus-dynamic-networks-controller, unless it is being deleted."""
    networks_ready: PodCondition | None = None
    extended_claim: ExtendedClaim | None = None
    asks_for_extended_resources: bool = False
    """True if a container asks for an extended resource, which a device plugin may serve."""

    @property
    def is_static(self) -> bool:
        """True for a pod from the kubelet's own files: its UID in the API is that of the mirror pod."""
        return self.annotations.get("kubernetes.io/config.source", "api") != "api"

    def __str__(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The container that networks are attached to: the runtime's id and the path of its network namespace."""

    container_id: ContainerId
    netns: str
    """Empty if the container has no namespace any more (DEL)."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """One network of one container, as it is stored: enough to call its plugins again, years later."""

    name: str
    """For people and the status: `<namespace>/<name>` of the NetworkAttachmentDefinition, else the network's name."""
    config: NetworkConfig
    ifname: IfName
    cluster_network: bool = False
    capability_args: Mapping[str, Any] = field(default_factory=dict)
    """Plugins that declare the capability get these as runtimeConfig."""
    cni_args: names.Pairs = ()
    result: Result | None = None
    """The result of ADD; None before it."""
    observed: Result | None = None
    """The part of `result` that the kernel had after the pod's whole ADD; None if it is what built-ins have reported.

    The interfaces have the MAC address, the MTU and the index that they had in the kernel, the addresses their length.
    """
    hot_plugged: bool = False
    """True if it was attached to a running container, apart from the runtime's ADD."""
    leaving: bool = False
    """True once a DEL of it has begun, whatever became of that: its addresses may be another pod's."""
    detached: bool = False
    """True if its plugins have run DEL, and only its cached result, which could not be removed, is left."""
    auxiliary: bool = False
    """True for the auxiliary chain: it works on the cluster network's interface and has none of its own."""
    default_route: tuple[str, ...] | None = None
    """The requested gateways; None without a request, empty for an empty list."""
    selection: str = ""
    """The element of the pod's annotation that asks for it (`NetworkSelection.canonical`); empty for the networks of
    every pod, for those of `/delegate`, and on records from before there was this key."""
    replaced_routes: tuple[Route, ...] = ()
    """The default routes over its interface that another attachment's `default_route` has replaced."""
    resource_name: str = ""
    """The device plugin resource, or the claim, of `device_id`."""
    device_id: str = ""
    claimed: ClaimedDevice | None = None
    """The device, if a ResourceClaim has allocated it."""
    served_by: Mapping[str, str] = field(default_factory=dict, compare=False)
    """BUILT_IN or the binary's path, by plugin type; IPAM plugins of built-ins included.

    Decided and recorded before the ADD touches anything. CHECK and DEL use the same implementations.
    """

    @property
    def key(self) -> tuple[str, IfName]:
        """Network and interface: a container has one attachment of each."""
        return self.config.name, self.ifname

    @property
    def is_attached(self) -> bool:
        """True if its ADD has ended and no DEL of it has begun: only then anything is made from what is recorded."""
        return self.result is not None and not (self.leaving or self.detached)

    @property
    def has_interface(self) -> bool:
        """True if its ADD reported an interface of its own in the container."""
        made = self.result.interfaces if self.result else ()
        return not self.auxiliary and any(item.name == self.ifname and item.sandbox for item in made)

    @property
    def attached_for(self) -> str:
        """The `selection`, LEAVING if it was cut off: a DEL has begun, or its ADD for an element did not end."""
        is_cut_off = self.leaving or (bool(self.selection) and self.result is None)
        return LEAVING if is_cut_off else self.selection

    @property
    def is_built_in(self) -> bool:
        """True if built-ins alone served its ADD, so that its result is what the kernel has."""
        return bool(self.served_by) and all(server == BUILT_IN for server in self.served_by.values())

    @property
    def changes_others(self) -> bool:
        """True if its plugins may change the interface of another network, although they are built in."""
        return self.auxiliary or any(gojson.get(item.fields, "linkInContainer") for item in self.config.plugins)

    @property
    def info_file(self) -> str:
        """Path of its device-info file, as plugins see it; empty without one."""
        path = self.capability_args.get(INFO_FILE)
        return path if isinstance(path, str) else ""

    def with_result(self, result: Result | None) -> Attachment:
        """Return the same attachment after its ADD."""
        return replace(self, result=result, observed=None)


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    """The write-ahead record of a container: the networks that are, or may be, attached, in the order of their ADDs."""

    sandbox: Sandbox
    ifname: IfName
    """CNI_IFNAME of the runtime's call: the cluster network's interface."""
    pod_namespace: Namespace
    pod_name: PodName
    pod_uid: PodUid
    attachments: tuple[Attachment, ...]
    complete: bool = False
    """True once the runtime's whole ADD succeeded. A hot-plugged attachment is complete once it has a result."""
    created: float = 0.0
    """Unix time in seconds."""
    deletes_failed: int = 0
    """Number of failed DELs of the whole container. The networks that they detached are not in `attachments`."""
    given_up: bool = False
    """True once a failed DEL was answered as done: the daemon must detach the rest."""
    failing_since: float = 0.0
    """Unix time in seconds of the first failed detach; 0 before it."""
    netns_id: str = ""
    """Identity of the container's namespace (`PodNetns.identity`); empty if not known."""
    foreign: bool = field(default=False, compare=False)
    """True if another daemon wrote it: `DelegateStore.recover` may know more of the container."""

    @property
    def pod(self) -> str:
        """`namespace/name` of the pod."""
        return f"{self.pod_namespace}/{self.pod_name}"

    @property
    def lacks_routes(self) -> bool:
        """True if a network that had replaced the default routes is gone, and they are not back: that was cut off."""
        is_replaced = any(item.replaced_routes and not item.leaving for item in self.attachments)
        return is_replaced and not any(item.default_route for item in self.attachments)

    def with_leaving(self, keys: Collection[tuple[str, str]]) -> ContainerRecord:
        """Return the record with these attachments marked as leaving. Not complete without the cluster network."""
        if not keys:
            return self
        items = [(item, item.key in keys) for item in self.attachments]
        return replace(
            self,
            attachments=tuple(replace(item, leaving=True) if leaves else item for item, leaves in items),
            complete=self.complete and not any(item.cluster_network and leaves for item, leaves in items),
        )

    def in_netns(self, netns: str) -> ContainerRecord:
        """Return the same record with another path of the namespace; if empty, plugins must touch no namespace."""
        return replace(self, sandbox=replace(self.sandbox, netns=netns))


@dataclass(frozen=True, slots=True)
class SetAside:
    """The rest of a container in quarantine: detaching failed for a day and is not tried again."""

    container_id: ContainerId
    since: float
    """Unix time in seconds; 0 if unreadable."""
    why: str
    """The last error."""
    record: ContainerRecord | None
    """The networks that are left; None if unreadable."""


@dataclass(frozen=True)
class Invocation:
    """One call of one plugin, as the CNI SPEC section 2 has it: the variables and the configuration."""

    verb: str
    container_id: str
    netns: str
    ifname: str
    args: str
    """CNI_ARGS, rendered."""
    path: str
    """CNI_PATH, directories joined by `:`, as the plugin is to see them."""
    fields: Mapping[str, Any]
    """The configuration; without `prevResult` if that is in `prev_result`."""
    prev_result: Result | None = None
    raw: bytes | None = None
    """Standard input as it was given, if it was; it then holds all of `fields`."""
    served_by: Mapping[str, str] = field(default_factory=dict, compare=False)
    """`Attachment.served_by`; not for the plugin."""
    recorded: Result | None = field(default=None, compare=False)
    """For a DEL: the result of the ADD, if known, also where the CNI version passes none to a binary."""
    observed: Result | None = field(default=None, compare=False)
    """`Attachment.observed`. Not for the plugin."""
    pod_namespace: str = field(default="", compare=False)
    """Namespace that is charged for the call; empty for a call for no pod. Not for the plugin."""
    network: str = field(default="", compare=False)
    """The attachment's name. Not for the plugin."""
    netns_override: bool = False
    """CNI_NETNS_OVERRIDE: `netns` may be the namespace that the plugin is started in."""

    @cached_property
    def stdin(self) -> bytes:
        """Standard input of a binary. Raises IncompatibleVersionError."""
        if self.raw is not None:
            return self.raw
        previous = None if self.prev_result is None else to_object(self.prev_result, self.cni_version)
        return conf.plugin_stdin(self.fields, previous)

    @property
    def cni_version(self) -> str:
        """The configuration's version; empty if it has none that is a string."""
        version = gojson.get(self.fields, "cniVersion")
        return version if isinstance(version, str) else ""


@dataclass(frozen=True, slots=True)
class ToolExit:
    """Exit of a program of the host."""

    status: int
    """Exit status; if negative, the signal that ended it."""
    stdout: bytes
    stderr: str
    """Its end."""
