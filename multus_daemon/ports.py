"""What the engine needs from the world, as small Protocols, and the values that cross them.

Implementations: ClusterStore - kube, standalone; ConfFiles - delegates.conf_files; PluginRunner - delegates.process,
delegates.dispatch and the built-in plugins; BuiltinPlugins - builtin.runner; HostTools - delegates.tools;
DelegateRunner - delegates.chain; DelegateStore - delegates.store; LinkOps - netlink.ops; DeviceSource - kubelet;
DeviceFiles - delegates.device_files. The contract of each is in its docstring; `tests/contract/` runs one suite over
every implementation and the fakes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from multus_daemon.cni import args as cni_args
from multus_daemon.cni.conf import NetworkConfig
from multus_daemon.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.cni.result import Result, Route
from multus_daemon.nad.definition import NetworkAttachmentDefinition
from multus_daemon.nad.device_info import DeviceInfo

BUILT_IN: Final = "built-in"
"""Where a plugin in this process is, as others are at a path."""

# --- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pod:
    """The parts of a Kubernetes pod that networking needs."""

    namespace: Namespace
    name: PodName
    uid: PodUid
    annotations: Mapping[str, str] = field(default_factory=dict)
    host_network: bool = False
    claims: Mapping[str, str] = field(default_factory=dict)
    """The ResourceClaim objects of the pod (DRA), by the names that its own spec gives them."""
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
    served_by: dict[str, str] = field(default_factory=dict, compare=False)
    """Which one ran the ADD, by plugin type: BUILT_IN, or the binary's path; IPAM plugins of built-ins included.

    Filled in while the ADD runs, so that the undoing of a failed one knows it too; CHECK and DEL are by the same ones.
    """
    asked: frozenset[str] = field(default=frozenset(), compare=False)
    """Those of `capability_args` that are the pod's own requests, not the runtime's; not kept in the record."""

    def with_result(self, result: Result | None) -> Attachment:
        """The same attachment after its ADD."""
        return replace(self, result=result)


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    """Everything that is, or may be, attached to a container, in the order of its ADDs."""

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
class Invocation:
    """One call of one plugin, as the CNI SPEC section 2 has it: the variables and standard input."""

    verb: str
    container_id: str
    netns: str
    ifname: str
    args: str
    """CNI_ARGS, rendered."""
    path: str
    """CNI_PATH, directories joined by `:`, as the plugin is to see them."""
    stdin: bytes
    served_by: dict[str, str] = field(default_factory=dict, compare=False)
    """As in Attachment: ADD fills it in, CHECK and DEL go by it. Not for the plugin."""


@dataclass(frozen=True, slots=True)
class ToolExit:
    """How a program of the host ended."""

    status: int
    """Exit status; negative: the signal that ended it."""
    stdout: bytes
    stderr: str
    """Its end."""


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


class ToolNotFoundError(LookupError):
    """The host has no such program; the message names it and where was looked."""


# --- protocols -------------------------------------------------------------------------------------------------------


EVENT_MESSAGE_MAX: Final = 1000
"""Characters that a message should have at most: several that come together make one Event."""


class NodeEvents(Protocol):
    """Where Events about the node go."""

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the node, `kind` Normal or Warning. Never blocks, never raises."""
        ...


class Events(NodeEvents, Protocol):
    """Where Events go."""

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """Queue an Event about the pod, as `node_event` does."""
        ...


class ClusterStore(Events, Protocol):
    """Pods and networks as declared, and what is reported back about them."""

    async def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """The pod; `uid` is a hint for stores that can wait until that incarnation is known, may be empty.

        The answer may have another UID: judging that is the caller's. Raises PodNotFoundError,
        StoreUnavailableError.
        """
        ...

    async def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """The NetworkAttachmentDefinition. Raises NetworkNotFoundError, StoreUnavailableError."""
        ...

    async def node_pods(self) -> list[Pod]:
        """Every pod of this node, those that are ending included. Raises StoreUnavailableError.

        Raises too where what is known may be older than what there is: who is missing in the list is not there.
        """
        ...

    async def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """Replace the pod's `k8s.v1.cni.cncf.io/network-status` by `value`, other annotations untouched.

        Raises StatusWriteError where that is not done within the caller's patience (a few seconds). `keep_trying`:
        the store then goes on in the background until it is written, replaced by a newer value, or the pod is gone.
        Refuses, as StatusWriteError and for good, to write to another incarnation of the pod (UID differs).
        """
        ...


class DeviceSource(Protocol):
    """Which devices the kubelet has given to a pod."""

    async def allocated(self, pod: Pod) -> Mapping[str, Sequence[str]]:
        """Device ids by the name of their resource or claim, sorted; empty for a pod without any.

        Raises DevicesUnavailableError.
        """
        ...


class DeviceFiles(Protocol):
    """Device-info files (NPWG device-info SPEC): the device plugin's, and that of each attachment."""

    def path(self, attachment: Attachment, container_id: ContainerId) -> str:
        """Where the file of an attachment is, as plugins get it (runtimeConfig `CNIDeviceInfoFile`)."""
        ...

    async def prepare(self, attachment: Attachment, path: str) -> None:
        """Put the device plugin's file of the attachment's device at `path`, if it has one. Raises OSError."""
        ...

    async def read(self, path: str) -> DeviceInfo | None:
        """What is in the file; None where there is none. Raises CniError for one that can't be used, OSError."""
        ...

    async def remove(self, path: str) -> None:
        """Remove the file; absent is done. Raises OSError."""
        ...


class PluginRunner(Protocol):
    """Runs one CNI plugin for one verb, in a process or in this one."""

    def locate(self, plugin_type: str) -> str:
        """Where the plugin would run, for messages and logs: a path, or BUILT_IN; empty if it is not to be had."""
        ...

    async def run(self, plugin_type: str, invocation: Invocation) -> bytes:
        """Call the plugin; what it printed on stdout. Raises CniError, the plugin's own or one about running it.

        Has a deadline of its own; when cancelled it first ends what it started.
        """
        ...


class BuiltinPlugins(PluginRunner, Protocol):
    """The PluginRunner of the plugins in this process, which know what they can't do."""

    async def unsupported(self, plugin_type: str, invocation: Invocation) -> str:
        """What the configuration asks for that the built-in does not know, for a message; empty: it can do all.

        The same for every verb of one configuration. Touches nothing. Asked to run nevertheless, it refuses all
        verbs but DEL (and GC), for which it does what it can.
        """
        ...


class HostTools(Protocol):
    """Runs programs of the host, such as `nft`, in the host's file system and network namespace."""

    async def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Run `tool`, found by its name where the host has its programs, to its end.

        Raises ToolNotFoundError, and CniError where it can't be started, does not end in time or prints too much.
        When cancelled it first ends what it started.
        """
        ...


class DelegateRunner(Protocol):
    """Runs every plugin of one attachment by the rules of libcni."""

    def validate(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """Everything about the attachment that can be known to fail before anything is touched. Raises CniError."""
        ...

    async def add(self, sandbox: Sandbox, attachment: Attachment) -> Result:
        """ADD, plugins in order. Raises CniError; what has been made until then is left for `delete`."""
        ...

    async def delete(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """DEL, plugins in reverse; what is absent counts as done, can be repeated. Raises CniError."""
        ...

    async def check(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """CHECK with the stored result as prevResult. Raises CniError."""
        ...

    async def remember(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """Write the attachment's result, changed since its ADD, to where CHECK and DEL find it. Raises CniError."""
        ...

    async def status(self, config: NetworkConfig) -> None:
        """STATUS of each plugin in order; the first failure, with its code. Raises CniError."""
        ...

    async def gc(self, config: NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]) -> None:
        """GC of each plugin, `valid` being what is attached to the network. One failure does not stop the others.

        Raises CniError.
        """
        ...


class DelegateStore(Protocol):
    """The record of each container, on disk, written before the first plugin runs."""

    def load(self, container_id: ContainerId) -> ContainerRecord | None:
        """The record, None if there is none; as quick for a container without one, however many others there are.

        Raises CorruptRecordError, OSError.
        """
        ...

    def recover(self, container_id: ContainerId) -> ContainerRecord | None:
        """What another daemon left of a container that has no record of ours; None if nothing.

        `foreign` is set. May search through all that is left of all containers: slow.
        Raises CorruptRecordError, OSError.
        """
        ...

    def save(self, record: ContainerRecord) -> None:
        """Write the record so that it survives a crash right after. Raises OSError, nothing is changed then."""
        ...

    def remove(self, container_id: ContainerId) -> None:
        """Forget the container; unknown is done. Raises OSError."""
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

    async def by_name(self, directory: str, name: str) -> NetworkConfig | None:
        """The configuration in `directory` whose JSON `name` is `name`; None if there is none. Raises CniError."""
        ...

    async def at_path(self, path: str) -> NetworkConfig:
        """The configuration in the file `path`, or in the lexically first one if it is a directory.

        Raises CniError.
        """
        ...

    async def plugins_beside(self, path: str, name: str) -> tuple[bytes, ...]:
        """The plugin objects in `<directory of the file path>/<name>/*.conf`, in lexical order, as they are written.

        None where there is no such folder; `path` may be a directory, as for `at_path`. Raises CniError, which names
        the file.
        """
        ...


class LinkOps(Protocol):
    """What the engine asks the kernel itself."""

    def is_netns(self, path: str) -> bool:
        """True where `path` is a network namespace that exists."""
        ...

    def netns_problem(self, path: str) -> str:
        """Why `path` can't be used as a network namespace, to be put behind it in a message; empty where it is one."""
        ...

    async def vanished(self, paths: Collection[str]) -> set[str]:
        """Those of `paths` that are certainly gone: no file there, in a directory that is.

        Without the directory (a node that has just started, a mount that is missing) nothing can be told, nor of a
        process' namespace below /proc.
        """
        ...

    async def inhabited(self, paths: Collection[str]) -> set[str]:
        """Those of `paths` that are network namespaces with a process in them; one look at all processes.

        In doubt a namespace counts as inhabited, and the daemon's own always does. Raises OSError where the processes
        can't be listed.
        """
        ...

    async def existing_links(self, netns: str, ifnames: Sequence[IfName]) -> list[IfName]:
        """Those of `ifnames` that the namespace has, in the same order; one entry into it for all of them.

        Raises OSError if the namespace can't be entered.
        """
        ...

    async def move_default_routes(self, netns: str, ifname: IfName, routes: Sequence[Route]) -> None:
        """Make `routes`, of one address family or of both, the only default routes of the namespace's main table.

        For each family of which there is one: every other default route goes, over whichever interface it is, and
        these come over `ifname`. Each has a gateway; a priority of 0 is the kernel's choice. A family without is left
        alone. On failure the routes are as they were. Raises OSError.
        """
        ...
