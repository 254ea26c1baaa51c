"""The values that cross the engine's ports: pods, networks of a container, its record, one call of a plugin."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeVar

from multus_daemon.spec.cni import args as cni_args
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result, to_object
from multus_daemon.spec.nad.device_info import DeviceInfo

T = TypeVar("T")

BUILT_IN: Final = "built-in"
"""Where a plugin in this process is, as others are at a path."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The parts of a Kubernetes pod that networking needs."""

    namespace: Namespace
    name: PodName
    uid: PodUid
    annotations: Mapping[str, str] = field(default_factory=dict)
    host_network: bool = False
    claims: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The ResourceClaim objects of the pod (DRA), by the names that its own spec gives them, and by those of the
    ResourceClaimTemplates that they are made from.
    """
    phase: str = ""
    """`Pending`, `Running`, ...; empty where it is not known."""

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
    """Empty where the runtime has none any more (DEL)."""


@dataclass(slots=True)
class Progress:
    """What one ADD has found out about an attachment, for its run and its undo; not kept in the record."""

    parsed: tuple[dict[Any, Any], ...]
    """For each plugin of the network, see `Invocation.parsed`."""
    failed_at: int | None = None
    """Position of the plugin whose ADD failed; those behind it have never run."""
    failure: str = ""
    """The message of that plugin."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """One network of one container: all that it takes to call its plugins again, years later, without asking anyone."""

    name: str
    """For people and the status: `<namespace>/<name>` of the NetworkAttachmentDefinition, else the network's name."""
    config: NetworkConfig
    ifname: IfName
    cluster_network: bool = False
    capability_args: Mapping[str, Any] = field(default_factory=dict)
    """What plugins that declare the capability get as runtimeConfig."""
    cni_args: cni_args.Pairs = ()
    result: Result | None = None
    """What ADD returned; None until it has."""
    observed: Result | None = None
    """The part of `result` that the kernel had after the ADD; None if built-ins alone ran it."""
    hot_plugged: bool = False
    """True where it was attached to a running container, apart from the runtime's ADD."""
    auxiliary: bool = False
    """True for the auxiliary chain: it works on the cluster network's interface and has none of its own."""
    default_route: tuple[str, ...] | None = None
    """Gateways that were asked for; None where that was not said, empty for an empty list."""
    resource_name: str = ""
    """The device plugin resource, or the claim, that `device_id` is of."""
    device_id: str = ""
    device_info: DeviceInfo | None = None
    """What is known of the device after the ADD, for the status; not kept in the record."""
    served_by: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Which one runs the ADD, by plugin type: BUILT_IN, or the binary's path; IPAM plugins of built-ins included.

    Decided before anything is touched, and on record by then; CHECK and DEL are by the same ones.
    """
    asked: frozenset[str] = field(default=frozenset(), compare=False)
    """Those of `capability_args` that are the pod's own requests, not the runtime's; not kept in the record."""
    progress: Progress | None = field(default=None, compare=False, repr=False)
    """None before its ADD is planned, and in each later request."""

    networks: int = field(default=0, compare=False)
    """How many the container has with this one, when its ADD begins; not kept in the record, but beside its result."""

    @property
    def has_interface(self) -> bool:
        """True where its ADD has reported an interface of its own in the container."""
        made = self.result.interfaces if self.result else ()
        return not self.auxiliary and any(item.name == self.ifname and item.sandbox for item in made)

    @property
    def is_built_in(self) -> bool:
        """True if built-ins alone served its ADD, so that its result is what the kernel has."""
        return bool(self.served_by) and all(server == BUILT_IN for server in self.served_by.values())

    def with_result(self, result: Result | None) -> Attachment:
        """The same attachment after its ADD."""
        return replace(self, result=result, observed=None)


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    """The write-ahead record of a container: all that is, or may be, attached to it, in the order of its ADDs."""

    sandbox: Sandbox
    ifname: IfName
    """CNI_IFNAME of the runtime's call: the cluster network's interface."""
    pod_namespace: Namespace
    pod_name: PodName
    pod_uid: PodUid
    attachments: tuple[Attachment, ...]
    complete: bool = False
    """True once the runtime's whole ADD succeeded; False from before the first plugin runs until then.

    Says nothing about what is hot-plugged: such an attachment is there once it has a result.
    """
    created: float = 0.0
    """Unix time in seconds."""
    deletes_failed: int = 0
    """How many DELs of the whole container have failed. What such a DEL did detach is no longer in `attachments`."""
    given_up: bool = False
    """True once the runtime was told that its DEL is done though it failed: what is left is ours to detach."""
    failing_since: float = 0.0
    """When detaching first failed, Unix time in seconds; 0 where it never has."""
    netns_id: str = ""
    """What tells the container's namespace from every other (`LinkOps.netns_id`); empty where that is not known."""
    foreign: bool = field(default=False, compare=False)
    """True where another daemon wrote it down: `DelegateStore.recover` may know more of the container."""

    @property
    def pod(self) -> str:
        """`namespace/name` of the pod."""
        return f"{self.pod_namespace}/{self.pod_name}"

    def in_netns(self, netns: str) -> ContainerRecord:
        """The same with another path of the container's namespace; empty: nothing may be touched in it."""
        return replace(self, sandbox=replace(self.sandbox, netns=netns))


@dataclass(frozen=True, slots=True)
class SetAside:
    """What was left of a container and could not be detached: nobody tries any more, a person is to look."""

    container_id: ContainerId
    since: float
    """Unix time in seconds; 0 where that can't be read."""
    why: str
    """The last error."""
    record: ContainerRecord | None
    """What is left; None where that can't be read."""


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
    """The configuration, without `prevResult` where that is beside it."""
    prev_result: Result | None = None
    raw: bytes | None = None
    """Standard input as it was given, where it was; it then has all that `fields` has."""
    served_by: Mapping[str, str] = field(default_factory=dict, compare=False)
    """As in Attachment. Not for the plugin."""
    recorded: Result | None = field(default=None, compare=False)
    """Of a DEL: what the ADD answered, where that is known, whatever the version tells a plugin that is a process."""
    pod_namespace: str = field(default="", compare=False)
    """Whom the call counts for; empty where it is for no pod. Not for the plugin."""
    network: str = field(default="", compare=False)
    """The attachment's name. Not for the plugin."""
    parsed: dict[Any, Any] | None = field(default=None, compare=False, repr=False)
    """What built-ins have read in `fields`, by the function that read it; None: nothing is kept."""
    netns_override: bool = False
    """CNI_NETNS_OVERRIDE: `netns` may be the namespace that the plugin is started in."""

    def once(self, key: Hashable, read: Callable[[], T]) -> T:
        """What `read` makes of the call, under `key`; not made again where the planning of the ADD has done so."""
        if self.parsed is None:
            return read()
        if key not in self.parsed:
            self.parsed[key] = read()
        found: T = self.parsed[key]
        return found

    @cached_property
    def stdin(self) -> bytes:
        """What a plugin that is a process reads. Raises IncompatibleVersionError."""
        if self.raw is not None:
            return self.raw
        previous = None if self.prev_result is None else to_object(self.prev_result, self.cni_version)
        return conf.plugin_stdin(self.fields, previous)

    @property
    def cni_version(self) -> str:
        """That of the configuration; empty where it has none that is a string."""
        version = gojson.get(self.fields, "cniVersion")
        return version if isinstance(version, str) else ""


@dataclass(frozen=True, slots=True)
class ToolExit:
    """How a program of the host ended."""

    status: int
    """Exit status; negative: the signal that ended it."""
    stdout: bytes
    stderr: str
    """Its end."""
