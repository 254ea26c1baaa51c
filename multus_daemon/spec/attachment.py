"""The values that the packages pass to each other: pods, a container's networks and record, one call of a plugin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from multus_daemon.spec.cni import conf, gojson, names
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result, Route, to_object

BUILT_IN: Final = "built-in"
"""In `Attachment.served_by`: the plugin ran inside the daemon. A binary has its path there."""
INFO_FILE: Final = "CNIDeviceInfoFile"
"""The capability that takes the path of a device-info file (device-info SPEC 5.1)."""
_MOVING_ROUTES: Final = frozenset({"sbr", "vrf"})
_MOVING_A_DEVICE: Final = "host-device"
LEAVING: Final = "leaving"
"""`Attachment.attached_for` of an attachment whose ADD or DEL was cut off. No element of an annotation is equal to it.
"""


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
    """Pairs: the name of the request in the claim, and the name of the extended resource."""


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device that is allocated to a ResourceClaim (resource.k8s.io/v1 DeviceRequestAllocationResult)."""

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
    """The devices that are allocated to a pod."""

    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sorted device ids, by the name of the device plugin's resource or of the ResourceClaim."""
    claimed: Mapping[tuple[str, str], ClaimedDevice] = field(default_factory=dict)
    """The devices that ResourceClaims have allocated, by resource and device id."""
    left_out: tuple[str, ...] = ()
    """The reasons why devices and claims give no device id, one for each."""


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
    """`status.phase`, such as `Running`; empty if not known."""
    is_hotplug_controller: bool = False
    """True for multus-dynamic-networks-controller, unless it is being deleted."""
    networks_ready: PodCondition | None = None
    extended_claim: ExtendedClaim | None = None
    asks_for_extended_resources: bool = False
    """True if a container asks for an extended resource, which a device plugin may serve."""

    @property
    def is_static(self) -> bool:
        """True for a static pod (from a file of the kubelet): `uid` is then that of its mirror pod in the API."""
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
    """Name for people and for the network-status: `<namespace>/<name>` of the NetworkAttachmentDefinition; without one,
    the name in the CNI configuration.
    """
    config: NetworkConfig
    ifname: IfName
    cluster_network: bool = False
    capability_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by capability. A plugin gets those whose capability it declares, as `runtimeConfig`."""
    cni_args: names.Pairs = ()
    result: Result | None = None
    """The result of ADD; None until the ADD has succeeded."""
    observed: Result | None = None
    """The part of `result` that the kernel had after the pod's whole ADD; None if built-ins have reported `result`.

    Interfaces have the MAC address, MTU and index that the kernel showed; addresses have the kernel's prefix length.
    """
    hot_plugged: bool = False
    """True if it was attached to a running container, not by the runtime's ADD."""
    leaving: bool = False
    """True once a DEL of it has begun, even if the DEL failed: its addresses may belong to another pod now."""
    detached: bool = False
    """True if DEL succeeded in all its plugins, and only its file in the cache of results could not be removed."""
    auxiliary: bool = False
    """True for the auxiliary chain, which works on the cluster network's interface and has none of its own."""
    default_route: tuple[str, ...] | None = None
    """The requested gateways; None without a request, empty for an empty list."""
    selection: str = ""
    """The element of the pod's annotation that asks for it (`NetworkSelection.canonical`); empty for the networks of
    every pod, for those of `/delegate`, and on records from before there was this key."""
    replaced_routes: tuple[Route, ...] = ()
    """Default routes over this interface that were removed for another attachment's `default_route`."""
    resource_name: str = ""
    """The device plugin's resource, or the ResourceClaim, that `device_id` is from."""
    device_id: str = ""
    claimed: ClaimedDevice | None = None
    """The device, if it is from a ResourceClaim; else None."""
    address_claim: str = ""
    """What holds its shared addresses in place of the pod (`addresses.Reservation.claim`); empty: the pod does."""
    served_by: Mapping[str, str] = field(default_factory=dict, compare=False)
    """BUILT_IN or the binary's path, by plugin type; IPAM plugins of built-ins included.

    Decided and recorded before the ADD touches anything. CHECK and DEL use the same implementations.
    """

    @property
    def key(self) -> tuple[str, IfName]:
        """Network and interface, which together identify an attachment of its container."""
        return self.config.name, self.ifname

    @property
    def is_attached(self) -> bool:
        """True if its ADD has succeeded and no DEL of it has begun. Only then it is compared and repaired."""
        return self.result is not None and not (self.leaving or self.detached)

    @property
    def has_interface(self) -> bool:
        """True if its ADD reported an interface of its own in the container."""
        made = self.result.interfaces if self.result else ()
        return not self.auxiliary and any(item.name == self.ifname and item.sandbox for item in made)

    @property
    def attached_for(self) -> str:
        """The `selection`; LEAVING if a DEL has begun, or if its ADD for an element of the annotation did not end."""
        is_cut_off = self.leaving or (bool(self.selection) and self.result is None)
        return LEAVING if is_cut_off else self.selection

    @property
    def is_built_in(self) -> bool:
        """True if built-ins alone served its ADD, so that its result is what the kernel has."""
        return bool(self.served_by) and all(server == BUILT_IN for server in self.served_by.values())

    @property
    def changes_others(self) -> bool:
        """True if the kernel may have less than the results of its plugins, or of others', although they are built in.

        They change the interface of another network, move routes, or leave a device to user space.
        """
        plugins = self.config.plugins
        is_of_others = self.auxiliary or any(gojson.get(item.fields, "linkInContainer") for item in plugins)
        made = self.result.interfaces if self.result else ()
        is_in_user_space = any(item.sandbox and not item.mac for item in made)
        return is_of_others or is_in_user_space or any(item.type in _MOVING_ROUTES for item in plugins)

    @property
    def removes_interface(self) -> bool:
        """True if a DEL by built-ins removes its interface, which is not a device of the host."""
        return self.has_interface and not any(item.type == _MOVING_A_DEVICE for item in self.config.plugins)

    @property
    def info_file(self) -> str:
        """Path of its device-info file, as plugins see it; empty without one."""
        path = self.capability_args.get(INFO_FILE)
        return path if isinstance(path, str) else ""

    def with_result(self, result: Result | None) -> Attachment:
        """Return the same attachment with the result of its ADD."""
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
    """True if upstream's daemon wrote it: `FileStore.recover` may find more attachments of the container."""

    @property
    def pod(self) -> str:
        """`namespace/name` of the pod."""
        return f"{self.pod_namespace}/{self.pod_name}"

    @property
    def lacks_routes(self) -> bool:
        """True if default routes are missing: their restoring, after a network had replaced them, was cut off."""
        is_replaced = any(item.replaced_routes and not item.leaving for item in self.attachments)
        return is_replaced and not any(item.default_route for item in self.attachments)

    def with_leaving(self, keys: Collection[tuple[str, str]]) -> ContainerRecord:
        """Return the record with `leaving` set in these attachments; not `complete` without the cluster network."""
        if not keys:
            return self
        items = [(item, item.key in keys) for item in self.attachments]
        return replace(
            self,
            attachments=tuple(replace(item, leaving=True) if leaves else item for item, leaves in items),
            complete=self.complete and not any(item.cluster_network and leaves for item, leaves in items),
        )

    def in_netns(self, netns: str) -> ContainerRecord:
        """Return the record with `netns` as the path of its namespace; empty: plugins must not touch a namespace."""
        return replace(self, sandbox=replace(self.sandbox, netns=netns))


@dataclass(frozen=True, slots=True)
class SetAside:
    """A container that is set aside: deleting its networks failed for a day, and the daemon does not retry."""

    container_id: ContainerId
    since: float
    """When it was set aside, in Unix seconds; 0 if the file is unreadable."""
    why: str
    """The last error of the DELs."""
    record: ContainerRecord | None
    """The container's record with the networks that are left; None if the file is unreadable."""


@dataclass(frozen=True)
class Invocation:
    """One call of one plugin: its environment variables and its configuration (CNI SPEC section 2)."""

    verb: str
    container_id: str
    netns: str
    ifname: str
    args: str
    """The text of CNI_ARGS."""
    path: str
    """CNI_PATH: directories joined by `:`, as the plugin sees them."""
    fields: Mapping[str, Any]
    """The configuration; without `prevResult` if that is in `prev_result`."""
    prev_result: Result | None = None
    raw: bytes | None = None
    """The caller's own standard input with all of `fields`, which is passed on; None: `stdin` makes it from `fields`.
    """
    served_by: Mapping[str, str] = field(default_factory=dict, compare=False)
    """`Attachment.served_by`; not for the plugin."""
    recorded: Result | None = field(default=None, compare=False)
    """For a DEL: the result of the ADD, also if the CNI version has no `prevResult` in a DEL; None if it is not known.
    """
    observed: Result | None = field(default=None, compare=False)
    """`Attachment.observed`. Not for the plugin."""
    pod_namespace: str = field(default="", compare=False)
    """Namespace that is charged for the call; empty for a call for no pod. Not for the plugin."""
    network: str = field(default="", compare=False)
    """The attachment's name. Not for the plugin."""
    address_claim: str = field(default="", compare=False)
    """`Attachment.address_claim`. Not for the plugin."""
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
    """How a program of the host ended."""

    status: int
    """Exit status; if negative, the signal that ended it."""
    stdout: bytes
    stderr: str
    """The end of standard error."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between what the kernel has of an attachment and what its record says."""

    what: str
    """What differs, as a text for people, without the name of the network."""
    repair: Callable[[], object] | None = field(default=None, compare=False)
    """Restores what the record says. Call it in the thread that compared; raises CniError. None if no built-in can."""
    on_host: bool = False
    """True if what differs is outside of the pod's network namespace."""
    is_certain: bool = True
    """False if the comparison failed, or if only a plugin's CHECK says so: some fail right after their own ADD."""
    by_pod: bool = False
    """True if only a program in the pod can have changed it."""

    @property
    def text(self) -> str:
        """`what`, and that a program in the pod changed it if that is known."""
        return f"{self.what}: a program in the pod did this" if self.by_pod else self.what
