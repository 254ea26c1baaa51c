"""What the engine needs from the world, as small Protocols, and the errors that they raise.

Implementations: ClusterStore - kube, standalone; ConfFiles - delegates.conf_files; PluginRunner - delegates.process,
delegates.dispatch and the built-in plugins; BuiltinPlugins - builtin.runner; HostTools - delegates.tools;
DelegateRunner - delegates.chain; DelegateStore - delegates.store; LinkOps - netlink.ops; DeviceSource - kubelet;
DeviceFiles - delegates.device_files. The contract of each is in its docstring; `tests/contract/` runs one suite over
every implementation and the fakes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

from multus_daemon.spec.attachment import Attachment, ContainerRecord, Invocation, Pod, Sandbox, SetAside, ToolExit
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result, Route
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition
from multus_daemon.spec.nad.device_info import DeviceInfo

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


class NeverAttachedError(CniError):
    """A DEL that failed, of a network that was never attached unless there is its interface.

    Its plugins refuse the configuration, or fail as the ADD did, and hold nothing of what they could have taken.
    """


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


class PluginRunner(Protocol):
    """Runs one CNI plugin for one verb, in a process or in this one."""

    def locate(self, plugin_type: str) -> str:
        """Where the plugin would run, for messages and logs: a path, or BUILT_IN; empty if it is not to be had."""
        ...

    def run(self, plugin_type: str, invocation: Invocation) -> Result:
        """Call the plugin; what ADD made, as its configuration's version can say it, an empty Result for other verbs.

        Raises CniError, the plugin's own or one about running it. Has a deadline of its own; when interrupted it first
        ends what it started.
        """
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """The file of a plugin."""

    path: str = ""
    """Empty if there is none."""
    refusal: CniError | None = field(default=None, compare=False)
    """Why it must not be run: it is Multus itself."""


class BinaryRunner(Protocol):
    """Runs plugin binaries."""

    def locate(self, plugin_type: str) -> str:
        """As PluginRunner: a path, or empty."""
        ...

    def refuse_multus(self, plugin_type: str, path: str) -> None:
        """Raise CniError if the file, which `locate` found, is a program of Multus. `run` does so where it searches."""
        ...

    def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> Result:
        """As PluginRunner; `path` is where `locate` has just found it, else it is looked for."""
        ...


class BuiltinPlugins(PluginRunner, Protocol):
    """The PluginRunner of the plugins in this process, which know what they can't do."""

    def unsupported(self, plugin_type: str, invocation: Invocation) -> str:
        """What the configuration asks for that the built-in does not know, for a message; empty: it can do all.

        The same for every verb of one configuration. Touches nothing. Asked to run nevertheless, it refuses all
        verbs but DEL (and GC), for which it does what it can.
        """
        ...

    def validate(self, plugin_type: str, invocation: Invocation) -> None:
        """Read the whole configuration of an ADD, for `Invocation.parsed` to have it. Touches nothing.

        Raises CniError for all that the ADD would refuse by its configuration alone.
        """
        ...

    def waits(self, plugin_type: str) -> bool:
        """True where an ADD by the built-in may wait for seconds."""
        ...

    def called_by(self, plugin_type: str, invocation: Invocation) -> Mapping[str, Invocation]:
        """The plugins that the built-in calls, by type, and how. Touches nothing.

        Raises CniError where the configuration, which `validate` has refused then, does not tell.
        """
        ...

    def kept(self, plugin_type: str, invocation: Invocation) -> str:
        """What the plugin, by whom ever it is served, may keep outside the container of an attachment that has failed.

        In words; empty where it keeps nothing. For a type of which that can't be seen it says so. Touches nothing.
        """
        ...

    def remove_rules(self, invocation: Invocation) -> None:
        """Remove the rules that a reference plugin has left after its DEL, with `ipMasq` or `macspoofchk`.

        Absent is done. Raises CniError where they may still be there.
        """
        ...


class ChoosingRunner(PluginRunner, Protocol):
    """The PluginRunner that knows several implementations of a plugin."""

    def waits(self, plugin_type: str) -> bool:
        """True where an ADD by the built-in may wait for seconds."""
        ...

    def programs(self, calls: Iterable[tuple[str, Invocation]]) -> Mapping[str, Program]:
        """Look for the binaries that may serve these calls, and what they call, by type. Reads the disk."""
        ...

    def chosen(self, plugin_type: str, programs: Mapping[str, Program]) -> str:
        """As `locate`, among these binaries. Pure."""
        ...

    def choose(self, plugin_type: str, invocation: Invocation, programs: Mapping[str, Program]) -> Mapping[str, str]:
        """Who serves an ADD of the plugin, and of those that a built-in calls, by type: for `Invocation.served_by`.

        Pure; `programs` are the binaries. Empty if there is neither. Raises CniError for a configuration that is sure
        to be refused.
        """
        ...

    def refuses(self, plugin_type: str, invocation: Invocation) -> bool:
        """Whether an ADD with this configuration, now that its DEL has failed, must have been refused by it."""
        ...

    def kept(self, plugin_type: str, invocation: Invocation) -> str:
        """As `BuiltinPlugins.kept`."""
        ...


class HostTools(Protocol):
    """Runs programs of the host, such as `nft`, in the host's file system and network namespace."""

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        """Run `tool`, found by its name where the host has its programs, to its end.

        Raises ToolNotFoundError, and CniError where it can't be started, does not end in time or prints too much.
        When interrupted it first ends what it started.
        """
        ...


class DelegateRunner(Protocol):
    """Runs every plugin of one attachment by the rules of libcni."""

    def programs(self, configs: Iterable[NetworkConfig]) -> Mapping[str, Program]:
        """Look for the plugins that the configurations name, by type. Reads the disk."""
        ...

    def plan(self, sandbox: Sandbox, attachment: Attachment, programs: Mapping[str, Program]) -> Attachment:
        """The attachment with `served_by`. Pure; `programs` are those of its configuration.

        Raises CniError for everything about it that can be known to fail before anything is touched.
        """
        ...

    def invocations(self, sandbox: Sandbox, attachment: Attachment) -> Sequence[tuple[str, Invocation]]:
        """What an ADD would call, in order, by plugin type; without the results of those before. Touches nothing."""
        ...

    def runs_here(self, attachment: Attachment, verb: str) -> bool:
        """True where the verb, of a planned attachment, is for the calling thread: its plugins are built in, and quick.

        Else it waits, for processes or for addresses, and others can go on beside it.
        """
        ...

    def add(self, sandbox: Sandbox, attachment: Attachment) -> Result:
        """ADD, plugins in order; the result is for `remember`, once there is nothing more to be changed in it.

        Raises CniError; what has been made until then is left for `delete`.
        """
        ...

    def delete(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """DEL, plugins in reverse; what is absent counts as done, can be repeated.

        Raises CniError, NeverAttachedError where it failed and only an interface could be left.
        """
        ...

    def check(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """CHECK with the stored result as prevResult, nothing below CNI 0.4.0. Raises CniError."""
        ...

    def remember(self, sandbox: Sandbox, attachment: Attachment) -> None:
        """Write the attachment's result to where libcni has it. Raises CniError."""
        ...

    def status(self, config: NetworkConfig) -> None:
        """STATUS of each plugin in order; the first failure, with its code. Raises CniError."""
        ...

    def gc(self, config: NetworkConfig, valid: Sequence[tuple[ContainerId, IfName]]) -> None:
        """GC of each plugin, `valid` being what is attached to the network. One failure does not stop the others.

        Raises CniError.
        """
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


class LinkOps(Protocol):
    """What the engine asks the kernel itself."""

    def kept_open(self, leaving: Collection[IfName] = ()) -> AbstractContextManager[None]:
        """Within the block a namespace that the calling thread enters, in plugins too, is opened once.

        `leaving`: links that built-in plugins will remove in the block; with the first of them all may go.
        """
        ...

    def allow_own_netns(self, allowed: bool) -> None:
        """Whether the calling request, from here on, may have the daemon's own namespace as the container's."""
        ...

    def is_netns(self, path: str) -> bool:
        """True where `path` is a network namespace that exists."""
        ...

    def netns_problem(self, path: str) -> str:
        """Why `path` can't be used as a network namespace, to be put behind it in a message; empty where it is one."""
        ...

    def netns_id(self, path: str) -> str:
        """What tells the namespace at `path` from every other, for `is_elsewhere`. Raises OSError."""
        ...

    def is_elsewhere(self, path: str, netns_id: str) -> bool:
        """True where it is certain that the namespace of that id is not at `path`, but another, or no namespace at all.

        With an empty id only the latter, or that it is the host's own. Where nothing is at the path, or it may not be
        looked at, nothing is certain.
        """
        ...

    def vanished(self, paths: Collection[str]) -> set[str]:
        """Those of `paths` that are certainly gone: no file there, in a directory that is.

        Without the directory (a node that has just started, a mount that is missing) nothing can be told, nor of a
        process' namespace below /proc.
        """
        ...

    def netns_in_use(self, paths: Collection[str]) -> set[str]:
        """Those of `paths` that are network namespaces with a process in them; one look at all processes.

        In doubt a namespace counts as in use, and the daemon's own always does. Raises OSError where the processes
        can't be listed.
        """
        ...

    def existing_links(self, netns: str, ifnames: Sequence[IfName]) -> list[IfName]:
        """Those of `ifnames` that the namespace has, in the same order; one entry into it for all of them.

        Raises OSError if the namespace can't be entered.
        """
        ...

    def observe(self, netns: str, attached: Sequence[tuple[IfName, Result]]) -> list[Result]:
        """Return what the namespace has of each result, whose ADD was for that interface. Raises OSError."""
        ...

    def first_missing(self, netns: str, ifname: IfName, result: Result, *, observed: bool) -> str:
        """Return what the namespace lacks of the interfaces, addresses and routes of `result`, for a message.

        Empty if it lacks nothing. `ifname`: that of the ADD, for results that name no interface. `observed`: the
        result is one of `observe`, and its routes are compared exactly. Raises OSError.
        """
        ...

    def move_default_routes(self, netns: str, ifname: IfName, routes: Sequence[Route]) -> None:
        """Make `routes`, of one address family or of both, the only default routes of the namespace's main table.

        For each family of which there is one: every other default route goes, over whichever interface it is, and
        these come over `ifname`. Each has a gateway; a priority of 0 is the kernel's choice. A family without is left
        alone. On failure the routes are as they were. Raises OSError.
        """
        ...
