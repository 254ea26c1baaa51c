"""The daemon's settings: every key of `daemon-config.json`, its type, its default, and what it does.

The file is upstream's (`multus-daemon` v4.3): one flat JSON object. Reading is strict and reports every error at
once, each with its key; a key that only upstream's other programs or documents know is passed over with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from multus_daemon import deadlines
from multus_daemon.runtime import fs, jsontext

DEFAULT_CONFIG_PATH = "/etc/cni/net.d/multus.d/daemon-config.json"
CONFIG_MAX_BYTES = 1024 * 1024
AUTO = "auto"
"""The `multusConfigFile` that is generated."""

Text = Annotated[str, msgspec.Meta(min_length=1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
LogLevel = Literal["panic", "error", "verbose", "debug"]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
BuiltinPlugin = Literal["bridge", "flannel", "host-local", "loopback", "macvlan", "passthru", "ptp", "static", "tuning"]
"""The types of plugins that are built in."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OWN_VARIABLES = {
    "GOMAXPROCS": "is always 2",
    "LC_ALL": "is always C: the daemon reads what is printed",
}
"""Variables of plugin processes that are not the operator's, and why."""

Flags = Mapping[str, tuple[str, Any]]
"""What the command line sets: key -> the flag as it was spelt, for errors, and the value as JSON has it."""


class SettingsError(ValueError):
    """The configuration can't be used; `problems` has one line for each error, the key first."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.source = source
        self.problems = problems


def _key(name: str, default: Any = None, *, factory: Any = None) -> Any:
    """Return a field that the file spells `name`."""
    if factory is not None:
        return field(default_factory=factory, metadata={"key": name})
    return field(default=default, metadata={"key": name})


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """Where the shim reaches the daemon."""

    directory: Text = _key("socketDir", "/run/multus/")
    """Directory of `multus.sock` and `containers.lock`, as the daemon sees it. Made with mode 0700; the rest of it
    stays as it is."""
    shim_directory: str = _key("daemonSocketDir", "")
    """The same directory as the host sees it, for the shim. Empty: the shim's default, `/run/multus/`."""
    connection_limit: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = _key("connectionLimit", 0)
    """CNI requests, `/cni` and `/delegate`, that are worked on at once, each by a thread. Others wait, DEL first;
    health probes never do. 0: from the limits of the daemon's pod.

    With 0: 256; below 114 MiB four for each MiB beyond 50, below 1.28 cores 200 for each core, at least 5
    ([operations.md](operations.md#probes-and-resources)).

    Namespaces and networks take turns, and from 5 on an eighth, one at least, is for DEL alone and as many are out of
    reach of each ([security.md](security.md#fairness)). Upstream's key against too many plugins at once:
    `maxDelegateProcesses` does that without it.
    """


@dataclass(frozen=True, slots=True)
class PathSettings:
    """Directories of the node."""

    cni_dir: Text = _key("cniDir", "/var/lib/cni/multus")
    """What is remembered about each container: `attachments/`, `aside/`, `results/`, `spool/`."""
    upstream_records: bool = _key("upstreamRecords", True)
    """True: each container is written down as upstream's daemon does it too, for a roll-back to it.

    In `<cniDir>/<container id>`, so that upstream's daemon can delete the pods after a roll-back
    ([migration.md](migration.md#back)). Without fsync; about 0.1 ms for each ADD. `false` when there will be no
    roll-back.
    """
    bin_dir: Text = _key("binDir", "/opt/cni/bin")
    """Where plugin binaries are searched, as seen inside `chrootDir`."""
    conf_dir: Text = _key("confDir", "/etc/cni/multus/net.d")
    """CNI configurations for networks that are named and not defined in the cluster."""
    chroot_dir: str = _key("chrootDir", "")
    """The host's root in the daemon's file system; plugin binaries run inside it. Empty: the daemon's own root."""
    kubelet_dir: Text = _key("kubeletDir", "/var/lib/kubelet")
    """The kubelet's root directory, as the daemon sees it.

    For networks that need a device: `pod-resources/kubelet.sock`, and `device-plugins/kubelet_internal_checkpoint`
    where there is no such socket.
    """


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Which networks a pod gets. The same keys in the runtime's configuration are overridden by these."""

    cni_version: str = _key("cniVersion", "")
    """The CNI version of the generated configuration. Empty: that of the primary network's configuration.

    Also the one that `multusctl` calls with when it stands in for a runtime. A runtime is always answered in the
    version that it asks for.
    """
    cluster_network: str = _key("clusterNetwork", "")
    """The network of every pod's first interface: a NetworkAttachmentDefinition or a configuration in `confDir`, by
    its name, or a path.

    The NetworkAttachmentDefinition is one of `multusNamespace`, and comes first; with a `/` in it, it is the path of
    a file or directory.
    """
    delegates: tuple[dict[str, Any], ...] = _key("delegates", ())
    """CNI configurations for every pod where there is no `clusterNetwork`; the first is the cluster network.

    A pod's own default network takes the place of the first; the others stay.
    """
    default_networks: tuple[str, ...] = _key("defaultNetworks", ())
    """Additional networks of every pod outside `systemNamespaces`. Not where `delegates` are used."""
    system_namespaces: tuple[str, ...] = _key("systemNamespaces", ("kube-system",))
    """Namespaces whose pods get no `defaultNetworks`."""
    multus_namespace: Text = _key("multusNamespace", "kube-system")
    """Where `clusterNetwork` and `defaultNetworks` are looked up."""
    namespace_isolation: bool = _key("namespaceIsolation", False)
    """True: a pod may use networks of its own namespace and of `globalNamespaces` only."""
    global_namespaces: str = _key("globalNamespaces", "default")
    """Comma separated namespaces that every pod may use under `namespaceIsolation`. Replaces the default."""
    auxiliary_chain: str = _key("auxiliaryCNIChainName", "")
    """Name of a folder beside the file of `clusterNetwork`; the plugins in it run last, on the interface of the
    cluster network.

    `clusterNetwork` must be a path then. Of the folder the `*.conf` files count, 64 at most. Another name than the
    cluster network's; not used with `delegates`.
    """
    force_cni_version: bool = _key("forceCNIVersion", False)
    """True: the plugins of the cluster network are called with `cniVersion`, whatever their configuration says.

    `cniVersion` must be set then. Its file is not rewritten, as upstream does. Not for a network that a pod chooses
    itself.
    """
    strict_requests: bool = _key("strictRequests", False)
    """True: what a pod asks of a network (`ips`, `mac`, `bandwidth`, ...) and no plugin of the network can take, or
    the result does not show, fails the ADD, instead of an Event.

    Without it, it is an Event and a line in the log. For `/delegate` only this file counts.
    """
    strict_check: bool = _key("strictCheck", False)
    """True: a plugin whose CHECK fails fails the CHECK of the pod, as the CNI specification has it.

    Without it the daemon decides by itself: CHECK fails if an interface, an address or a route that ADD left is
    missing. A plugin that fails is then a Warning Event, a line in the log and a count. A plugin without CHECK never
    counts. For `/delegate` only this file counts.
    """
    runtime_config: dict[str, Any] = _key("runtimeConfig", factory=dict)
    """Capability arguments for the cluster network, in place of all that the runtime gives."""


@dataclass(frozen=True, slots=True)
class PrimarySettings:
    """The node's CNI configuration: how it is made from that of the primary network, and where it is put.

    Not laid over requests: what they have of it has come from here.
    """

    config_file: Text = _key("multusConfigFile", AUTO)
    """`auto`: generate `00-multus.conf`. Else the path of a CNI configuration of your own.

    That is put into `cniConfigDir` under its name instead, and follows its changes.
    """
    config_dir: str = _key("cniConfigDir", "/etc/cni/net.d")
    """The runtime's directory of CNI configurations, as the daemon sees it. Empty: nothing is written.

    Empty is for nodes whose configuration is made elsewhere.
    """
    autoconfig_dir: str = _key("multusAutoconfigDir", "")
    """Where the primary network's configuration is looked for, as the daemon sees it. Empty: `cniConfigDir` where
    `multusConfigFile` is set to `auto`, else nothing is generated.

    The former as with the flags of the first thick release. Where nothing is generated, a daemon in a cluster is not
    ready (gate `primary`), unless `cniConfigDir` is empty too.
    """
    master: str = _key("multusMasterCNI", "")
    """Name of the primary network's file in `multusAutoconfigDir`. Empty: the first by name that can be one."""
    override_name: bool = _key("overrideNetworkName", False)
    """True: the generated configuration has the primary network's name instead of `multus-cni-network`."""
    capabilities: dict[str, bool] = _key("capabilities", factory=dict)
    """Capabilities of the generated configuration, beside those that some plugin of the primary network declares."""
    plugin_type: Text = _key("type", "multus-shim")
    """Name of the shim's binary in the runtime's plugin directory."""
    indicator: str = _key("readinessindicatorfile", "")
    """A file that is there while the primary network is ready, as the daemon sees it. While it is not, no pod is
    attached. Empty: none.
    """


class PerNodeCertificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A client certificate of this node's own, requested from the API server and renewed."""

    enabled: bool = False
    """Whether it is used."""
    bootstrap_kubeconfig: str = ""
    """A kubeconfig whose user may ask for the first certificate."""
    cert_dir: str = ""
    """Where the certificate and its key are kept."""
    cert_duration: str = "10m"
    """How long each certificate is valid, as Go writes durations: `10m`, `24h`."""


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """The API server."""

    kubeconfig: str = _key("kubeconfig", "")
    """A kubeconfig, as `--kubeconfig`. Empty: the service account of the daemon's own pod.

    The account's token is read again as it rotates.
    """
    status_write: Literal["best-effort", "required"] = _key("statusWrite", "best-effort")
    """What becomes of an ADD whose network-status can't be written within 2 s: it succeeds, or it fails.

    `best-effort`: an Event says so, and the write is tried until it is done or the pod is gone, by the next daemon
    too. `required`: the ADD fails and is undone.
    """
    per_node_certificate: PerNodeCertificate | None = _key("perNodeCertificate", None)
    """A client certificate of this node's own instead of a token; its keys follow."""


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """How delegates are run."""

    builtin_plugins: Literal["off", "fallback", "prefer"] = _key("builtinPlugins", "prefer")
    """Built-in plugins: never, where no binary is found, or before the binary, for all that they know.

    [Which one runs](builtin-plugins.md#which-one-runs).
    """
    builtin_plugins_except: tuple[BuiltinPlugin, ...] = _key("builtinPluginsExcept", ())
    """Plugin types that the binary serves as with `off`, whatever `builtinPlugins` says, such as a vendor's own
    `bridge`; IPAM plugins too.

    Types that are not built in are refused.
    """
    delegate_timeout_seconds: Seconds = _key("delegateTimeoutSeconds", deadlines.DELEGATE_SECONDS)
    """How long one call of one plugin may take before its process group is ended; 60 s at most for a DEL.

    A whole ADD is ended after 170 s, a whole DEL after 110 s, whatever this says.
    """
    environment: tuple[str, ...] = _key("pluginEnv", ())
    """Names of variables of the daemon's own environment that plugin processes get too. Others never reach them.

    Such as `HTTPS_PROXY`, or what a vendor's plugin reads. Not `CNI_*`, `GOMAXPROCS` and `LC_ALL`, which are set for
    each call.
    """
    max_processes: Annotated[int, msgspec.Meta(ge=0, le=1000)] = _key("maxDelegateProcesses", 0)
    """Plugin processes that run at once; other calls wait, DEL first. 0: from the memory limit and the cores.

    With 0: 64 MiB of memory for each, after 128 MiB for the daemon, from the memory limit of its pod (without one,
    from a quarter of the machine's memory), at most 4 for each core and 64, at least 2; 1 where the limit is below
    256 MiB. No network and no namespace gets all of them ([security.md](security.md#fairness)).
    """

    def __post_init__(self) -> None:
        """Raises ValueError for a name that can't be passed on."""
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"pluginEnv: {name[:80]!r} is not the name of a variable")
            if name.startswith("CNI_"):
                raise ValueError(f"pluginEnv: {name[:80]} is part of the protocol: a call sets it")
            if reason := _OWN_VARIABLES.get(name):
                raise ValueError(f"pluginEnv: {name} {reason}")


@dataclass(frozen=True, slots=True)
class DeleteSettings:
    """What becomes of networks that could not be detached."""

    tries: Count = _key("deleteTries", 5)
    """The failing DEL of this number is answered as done, so that the pod does not stay in Terminating for ever. 0:
    every failing DEL is an error.

    What is left stays on record and is deleted later, and an Event `NetworkNotReleased` says so.
    """
    reconcile_seconds: Annotated[float, msgspec.Meta(ge=0, le=86400)] = _key(
        "reconcileSeconds", deadlines.RECONCILE_SECONDS
    )
    """How often the records of containers are compared with what lives: orphans are deleted, running pods that lack
    networks are reported. 0: never.
    """


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Rotation of `logFile`. The last two are without effect: see WITHOUT_EFFECT."""

    max_size: Count = _key("maxSize", 100)
    """Size in MB at which the file is put aside."""
    max_backups: Count = _key("maxBackups", 5)
    """How many old files stay."""
    max_age: Count = _key("maxAge", 0)
    compress: bool = _key("compress", False)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is logged, and where to."""

    level: LogLevel = _key("logLevel", "verbose")
    """What is logged; any case."""
    to_stderr: bool = _key("logToStderr", True)
    """Log to standard error. Where nobody reads it, lines are dropped and counted, and nothing waits."""
    file: str = _key("logFile", "")
    """Log to this file too."""
    options: dict[str, Any] = _key("logOptions", factory=dict)
    """Rotation of `logFile`; its keys follow."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Prometheus."""

    port: Port | None = _key("metricsPort", None)
    """TCP port of `/metrics`. None: nothing listens. At most 16 connections at once, 10 s each."""
    address: str = _key("metricsAddress", "")
    """Address that `metricsPort` binds to. Empty: all of them, as upstream."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All of it."""

    socket: SocketSettings = field(default_factory=SocketSettings)
    paths: PathSettings = field(default_factory=PathSettings)
    networks: NetworkSettings = field(default_factory=NetworkSettings)
    primary: PrimarySettings = field(default_factory=PrimarySettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    plugins: PluginSettings = field(default_factory=PluginSettings)
    deletes: DeleteSettings = field(default_factory=DeleteSettings)
    logs: LogSettings = field(default_factory=LogSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    given: Mapping[str, Any] = field(default_factory=dict)
    """The keys that were set, and what to."""
    warnings: tuple[str, ...] = ()
    """What was passed over, for the log."""

    @property
    def overlay(self) -> dict[str, Any]:
        """The keys that override the same keys of every request, as upstream's do."""
        own = {item.metadata["key"] for item in fields(PrimarySettings)}
        return {key: value for key, value in self.given.items() if key not in own}

    def effective(self) -> dict[str, Any]:
        """Every key with its value in force, by the file's spelling and as JSON has it."""
        return {
            item.metadata["key"]: msgspec.to_builtins(getattr(getattr(self, group), item.name))
            for group, kind in GROUPS.items()
            for item in fields(kind)
        }


GROUPS: dict[str, type[Any]] = {
    "socket": SocketSettings,
    "paths": PathSettings,
    "networks": NetworkSettings,
    "primary": PrimarySettings,
    "kubernetes": KubernetesSettings,
    "plugins": PluginSettings,
    "deletes": DeleteSettings,
    "logs": LogSettings,
    "metrics": MetricsSettings,
}

# Keys of upstream's daemon whose feature this release does not have. They are accepted, so that a configuration map
# can be taken over, and named in the log at start.
WITHOUT_EFFECT = {
    "enablePprof": "Go's profiler; there is none here",
    "logOptions.compress": "rotated logs are not compressed",
    "logOptions.maxAge": "rotated logs are removed by their number, not by their age",
    "name": "the generated configuration has upstream's name, or the primary network's",
    "retryDeleteOnError": "what a DEL could not detach is always kept and retried; see deleteTries",
    "allowTryDeleteOnErr": "upstream's documents name it, no program reads it",
    "defaultnetworkfile": "upstream's tests name it, no program reads it",
    "defaultnetworkwaitseconds": "upstream's tests name it, no program reads it",
}


REMOVED = {
    "attachConcurrency": "removed: always 4",
    "daemonWaitSeconds": "removed: always 60",
    "maxPortMappings": "removed: always 128",
    "maxRequestedAddresses": "removed: always 256",
    "nodeName": "removed: set the variable `MULTUS_NODE_NAME`",
    "pluginGomaxprocs": "removed: always 2",
}
"""Keys of earlier releases. They are accepted, and one line in the log at start names those that are set."""


LOG_OPTIONS: dict[str, Any] = {
    item.metadata["key"]: get_type_hints(LogOptions, include_extras=True)[item.name] for item in fields(LogOptions)
}
"""Their types."""


def in_directory(found: Settings, directory: Path | None) -> Settings:
    """For a user who is not root: what is not set otherwise and lies below /run and /var lies in `directory`."""
    if directory is None:
        return found
    socket, paths = found.socket, found.paths
    if "socketDir" not in found.given:
        socket = replace(socket, directory=str(directory / "multus"))
    if "cniDir" not in found.given:
        paths = replace(paths, cni_dir=str(directory / "multus" / "cni"))
    return replace(found, socket=socket, paths=paths)


def known_keys() -> frozenset[str]:
    """Every key that a configuration may have."""
    own = {item.metadata["key"] for kind in GROUPS.values() for item in fields(kind)}
    return frozenset(own | REMOVED.keys() | {key for key in WITHOUT_EFFECT if "." not in key})


def parse(data: bytes, source: str, flags: Flags | None = None) -> Settings:
    """Settings from the bytes of a configuration file; `source` names it in errors. Raises SettingsError."""
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise SettingsError(source, [f"not JSON: {jsontext.fault(data, error)}"]) from error
    if not isinstance(found, dict):
        raise SettingsError(source, ["a JSON object is needed"])
    # Which of them counts is anybody's guess, and so is which was meant. Keys match in any case.
    if repeated := jsontext.repeated_keys(data, same=str.lower):
        raise SettingsError(source, [f"{key}: is there more than once" for key in repeated])
    return from_object(found, source, flags)


def from_object(found: Mapping[str, Any], source: str, flags: Flags | None = None) -> Settings:
    """Settings from a decoded object. Keys match in any case, as Go reads them; `flags` win. Raises SettingsError."""
    spelling = {key.lower(): key for key in known_keys()}
    values: dict[str, Any] = {}
    problems: list[str] = []
    warnings: list[str] = []
    removed: list[str] = []
    for key, value in found.items():
        known = spelling.get(key.lower())
        if known is None:
            problems.append(_unknown(key, spelling))
        elif known in REMOVED:
            removed.append(known)
        elif known in WITHOUT_EFFECT:
            warnings.append(f"{known}: no effect: {WITHOUT_EFFECT[known]}")
        elif value is not None:
            values[known] = value
    if removed:
        warnings.append(f"{', '.join(sorted(removed))}: no effect: removed, delete them (docs/configuration.md)")
    names = {key: flag for key, (flag, _) in (flags or {}).items()}
    values |= {key: value for key, (_, value) in (flags or {}).items()}
    if isinstance(values.get("logLevel"), str):
        values["logLevel"] = values["logLevel"].lower()
    if isinstance(values.get("logOptions"), dict):
        values["logOptions"] = _read_log_options(values["logOptions"], problems, warnings)
    groups = {group: _read_group(kind, values, names, problems) for group, kind in GROUPS.items()}
    if problems:
        raise SettingsError(source, problems)
    primary = groups["primary"]
    if values.get("multusConfigFile") == AUTO and not primary.autoconfig_dir:
        # As the first thick release, whose flags name the file and no directory.
        groups["primary"] = replace(primary, autoconfig_dir=primary.config_dir)
    return replace(Settings(**groups), given=values, warnings=tuple(warnings))


def _unknown(key: str, spelling: Mapping[str, str], prefix: str = "") -> str:
    import difflib  # 0.1 MB, for who has mistyped something

    near = difflib.get_close_matches(key.lower(), spelling, n=1)
    return f"{prefix}{key}: unknown key" + (f", is {spelling[near[0]]} meant?" if near else "")


def _read_log_options(found: Mapping[str, Any], problems: list[str], warnings: list[str]) -> dict[str, Any]:
    spelling = {key.lower(): key for key in LOG_OPTIONS}
    options: dict[str, Any] = {}
    for key, value in found.items():
        known = spelling.get(key.lower())
        if known is None:
            problems.append(_unknown(key, spelling, "logOptions."))
        elif value is not None:
            try:
                options[known] = msgspec.convert(value, LOG_OPTIONS[known])
            except msgspec.ValidationError as error:
                problems.append(f"logOptions.{known}: {error}")
            if reason := WITHOUT_EFFECT.get(f"logOptions.{known}"):
                warnings.append(f"logOptions.{known}: no effect: {reason}")
    return options


def _read_group(kind: type[Any], values: Mapping[str, Any], names: Mapping[str, str], problems: list[str]) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    arguments: dict[str, Any] = {}
    for item in fields(kind):
        key = item.metadata["key"]
        if key not in values:
            continue
        try:
            arguments[item.name] = msgspec.convert(values[key], hints[item.name])
        except msgspec.ValidationError as error:
            problems.append(f"{names.get(key, key)}: {error}{_choices(error, hints[item.name])}")
    try:
        return kind(**arguments)
    except ValueError as error:
        # What a type can't say.
        problems.append(str(error))
        return kind()


def _choices(error: msgspec.ValidationError, hint: Any) -> str:
    """What could have been said; empty where it is not a matter of choosing. The library does not tell."""
    literal = next((option for option in (hint, *get_args(hint)) if get_origin(option) is Literal), None)
    # The library has one exception for all faults, and no code in it.
    return f"; known: {', '.join(get_args(literal))}" if literal and str(error).startswith("Invalid enum value") else ""


def load(path: Path, flags: Flags | None = None) -> Settings:
    """Settings from the file at `path` and from `flags`, which win. Raises SettingsError."""
    try:
        data = fs.read_limited(path, limit=CONFIG_MAX_BYTES)
    except OSError as error:
        raise SettingsError(str(path), [f"can't be read: {error.strerror or error}"]) from error
    return parse(data, str(path), flags)
