"""Each key of `daemon-config.json`: its type, its default and its effect.

The docstrings of the fields become the tables of docs/configuration.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from multus_daemon import deadlines

AUTO = "auto"
"""The value of `multusConfigFile` that generates the configuration."""

Text = Annotated[str, msgspec.Meta(min_length=1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
LogLevel = Literal["panic", "error", "verbose", "debug"]
LogFormat = Literal["text", "json"]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
BuiltinPlugin = Literal[
    "bandwidth",
    "bridge",
    "dhcp",
    "dummy",
    "firewall",
    "flannel",
    "host-device",
    "host-local",
    "ipvlan",
    "loopback",
    "macvlan",
    "passthru",
    "portmap",
    "ptp",
    "sbr",
    "static",
    "tap",
    "tuning",
    "vlan",
    "vrf",
    "whereabouts",
]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OWN_VARIABLES = {"GOMAXPROCS": "is always 2", "LC_ALL": "is always C: the daemon reads what is printed"}
"""Variables of plugin processes that an operator cannot set, with the reason."""


def _key(name: str, default: Any = None, *, factory: Any = None) -> Any:
    """Return a field whose key in the file is `name`."""
    if factory is not None:
        return field(default_factory=factory, metadata={"key": name})
    return field(default=default, metadata={"key": name})


@dataclass(frozen=True, slots=True)
class SocketSettings:
    """The socket between the shim and the daemon."""

    directory: Text = _key("socketDir", "/run/multus/")
    """Directory of `multus.sock` and `containers.lock`, as the daemon sees it. Made with mode 0700; other files in it
    are left alone."""
    shim_directory: str = _key("daemonSocketDir", "")
    """The same directory as the host sees it, for the shim. Empty: the shim's default, `/run/multus/`."""
    connection_limit: Count = _key("connectionLimit", 0)
    """Maximum number of concurrent CNI requests (`/cni` and `/delegate`). Others wait, DEL first; health probes never
    wait. 0: 256; below 114 MiB of the pod's memory limit four for each MiB beyond 50, below 1.28 cores 200 for each
    core, at least 5. Namespaces and networks [share](security.md#fairness) them. Upstream uses this key against too
    many plugins at once; here `maxDelegateProcesses` does that.
    """


@dataclass(frozen=True, slots=True)
class PathSettings:
    """Directories of the node."""

    cni_dir: Text = _key("cniDir", "/var/lib/cni/multus")
    """State of each container: `attachments/`, `aside/`, `dhcp/`, `results/`, `spool/`."""
    upstream_records: bool = _key("upstreamRecords", True)
    """True: also write each container's record in upstream's format, in `<cniDir>/<container id>`, so that upstream's
    daemon can delete the pods after a roll-back ([migration.md](migration.md#back)).
    """
    bin_dir: Text = _key("binDir", "/opt/cni/bin")
    """Directory of the plugin binaries, as seen inside `chrootDir`."""
    conf_dir: Text = _key("confDir", "/etc/cni/multus/net.d")
    """CNI configurations for networks that are not defined in the cluster."""
    chroot_dir: str = _key("chrootDir", "")
    """The host's root in the daemon's file system; plugin binaries run inside it. Empty: the daemon's own root."""
    kubelet_dir: Text = _key("kubeletDir", "/var/lib/kubelet")
    """The kubelet's root directory, as the daemon sees it. Networks that need a device use
    `pod-resources/kubelet.sock`, or `device-plugins/kubelet_internal_checkpoint` if there is no such socket.
    """


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """The networks of a pod. These keys override the same keys of the runtime's configuration."""

    cni_version: str = _key("cniVersion", "")
    """The CNI version of the generated configuration, and of the calls that `multusctl` makes as a runtime. Empty: that
    of the primary network's configuration.
    """
    cluster_network: str = _key("clusterNetwork", "")
    """The network of every pod's first interface: the name of a NetworkAttachmentDefinition of `multusNamespace`, which
    comes first, or of a configuration in `confDir`; with a `/` in it, the path of a file or directory.
    """
    delegates: tuple[dict[str, Any], ...] = _key("delegates", ())
    """CNI configurations for every pod, used without `clusterNetwork`; the first is the cluster network. A pod's own
    default network replaces the first; the others stay.
    """
    default_networks: tuple[str, ...] = _key("defaultNetworks", ())
    """Additional networks of every pod outside `systemNamespaces`. Not used with `delegates`."""
    system_namespaces: tuple[str, ...] = _key("systemNamespaces", ("kube-system",))
    """Namespaces whose pods get no `defaultNetworks`."""
    multus_namespace: Text = _key("multusNamespace", "kube-system")
    """Namespace of `clusterNetwork` and `defaultNetworks`."""
    namespace_isolation: bool = _key("namespaceIsolation", False)
    """True: a pod may use networks of its own namespace and of `globalNamespaces` only."""
    global_namespaces: str = _key("globalNamespaces", "default")
    """Comma separated namespaces that every pod may use under `namespaceIsolation`. Replaces the default."""
    auxiliary_chain: str = _key("auxiliaryCNIChainName", "")
    """Name of a folder beside the file of `clusterNetwork`, which must be a path then. The plugins in its `*.conf`
    files, 64 at most, run last, on the interface of the cluster network. The name must differ from the cluster
    network's; not used with `delegates`.
    """
    force_cni_version: bool = _key("forceCNIVersion", False)
    """True: call the plugins of the cluster network with `cniVersion`, which must be set then, whatever their
    configuration says. Not for a network that a pod chooses itself.
    """
    strict_requests: bool = _key("strictRequests", False)
    """True: the ADD fails if no plugin of a network supports what a pod asks of it (`ips`, `mac`, `bandwidth`, ...), or
    the result does not show it. False: it is an Event and a line in the log. For `/delegate` only this file counts.
    """
    strict_check: bool = _key("strictCheck", False)
    """True: the CHECK of a pod runs that of its plugins, and fails if one of them fails, as the CNI specification has
    it. False: CHECK starts no program, and fails if an interface, an address or a route of the ADD is missing. A
    plugin binary is asked later, once in ten minutes, and its failure is a Warning Event. For `/delegate` only this
    file counts.
    """
    runtime_config: dict[str, Any] = _key("runtimeConfig", factory=dict)
    """Capability arguments for the cluster network; they replace those of the runtime."""


@dataclass(frozen=True, slots=True)
class PrimarySettings:
    """The node's CNI configuration. Requests are made from it, so these keys override nothing in requests."""

    config_file: Text = _key("multusConfigFile", AUTO)
    """`auto`: generate `00-multus.conf`. Else the path of a CNI configuration of your own, which is copied into
    `cniConfigDir` under its name and follows its changes.
    """
    config_dir: str = _key("cniConfigDir", "/etc/cni/net.d")
    """The runtime's directory of CNI configurations, as the daemon sees it. Empty: nothing is written, for nodes whose
    configuration is made elsewhere.
    """
    autoconfig_dir: str = _key("multusAutoconfigDir", "")
    """Directory of the primary network's configuration, as the daemon sees it. Empty: `cniConfigDir` if
    `multusConfigFile` is set to `auto`, else nothing is generated. A daemon in a cluster that generates nothing is not
    ready (gate `primary`), unless `cniConfigDir` is empty too.
    """
    master: str = _key("multusMasterCNI", "")
    """Name of the primary network's file in `multusAutoconfigDir`. Empty: the first suitable file by name."""
    override_name: bool = _key("overrideNetworkName", False)
    """True: the generated configuration has the primary network's name instead of `multus-cni-network`."""
    capabilities: dict[str, bool] = _key("capabilities", factory=dict)
    """Capabilities of the generated configuration, in addition to those that the primary network's plugins declare."""
    plugin_type: Text = _key("type", "multus-shim")
    """Name of the shim's binary in the runtime's plugin directory."""
    indicator: str = _key("readinessindicatorfile", "")
    """A file that exists while the primary network is ready, as the daemon sees it; no pod is attached without it."""


class PerNodeCertificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A client certificate of the node's own, which the daemon requests from the API server and renews."""

    enabled: bool = False
    """True: use it."""
    bootstrap_kubeconfig: str = ""
    """A kubeconfig whose user may ask for the first certificate."""
    cert_dir: str = ""
    """Directory of the certificate and its key."""
    cert_duration: str = "10m"
    """Validity of each certificate, as Go writes durations: `10m`, `24h`."""


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """The connection to the API server."""

    kubeconfig: str = _key("kubeconfig", "")
    """A kubeconfig for the API server. Empty: the service account of the daemon's own pod, whose token is read again as
    it rotates.
    """
    status_write: Literal["best-effort", "required"] = _key("statusWrite", "best-effort")
    """Result of an ADD whose network-status can't be written within 2 s. `best-effort`: it succeeds, an Event says so,
    and the write is retried, by the next daemon too. `required`: it fails and is undone.
    """
    addresses_namespace: str = _key("addressesNamespace", "kube-system")
    """Namespace of whereabouts' objects, as its own kubeconfig has it. One for the whole cluster: an address is held by
    an object in it. [Addresses](addresses.md).
    """
    startup_taint: str = _key("startupTaint", "")
    """Key of a taint that the daemon removes from its node when it is ready; empty: none. It needs a right:
    [ready before pods](operations.md#ready-before-pods).
    """
    per_node_certificate: PerNodeCertificate | None = _key("perNodeCertificate", None)
    """A client certificate of this node's own instead of a token; its keys follow."""


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The plugins and their processes."""

    builtin_plugins: Literal["off", "fallback", "prefer"] = _key("builtinPlugins", "prefer")
    """Use built-in plugins never, without a binary, or before the binary if they support the configuration and it is
    not of a newer release. [Which one runs](builtin-plugins.md#which-one-runs).
    """
    builtin_plugins_except: tuple[BuiltinPlugin, ...] = _key("builtinPluginsExcept", ())
    """Plugin types for which `builtinPlugins` is `off`, such as a vendor's own `bridge`; IPAM plugins too. Types that
    are not built in are refused.
    """
    delegate_timeout_seconds: Seconds = _key("delegateTimeoutSeconds", deadlines.DELEGATE_SECONDS)
    """How long one call of one plugin may take before its process group is ended; 60 s at most for a DEL. A whole ADD
    has 170 s, a whole DEL 110 s.
    """
    environment: tuple[str, ...] = _key("pluginEnv", ())
    """Names of variables that plugin processes get from the daemon's environment, such as `HTTPS_PROXY`; they get no
    others. Not `CNI_*`, `GOMAXPROCS` and `LC_ALL`, which are set for each call.
    """
    max_processes: Annotated[int, msgspec.Meta(ge=0, le=1000)] = _key("maxDelegateProcesses", 0)
    """Maximum number of concurrent plugin processes; other calls wait, DEL first. 0: one for each 64 MiB of the pod's
    memory limit beyond 128 MiB (without one, of a quarter of the machine's memory), at most 4 for each core and 64, at
    least 2; 1 if the limit is below 256 MiB. Networks and namespaces [share](security.md#fairness) them.
    """

    def __post_init__(self) -> None:
        """Raises ValueError for a variable that can't be passed on."""
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"pluginEnv: {name[:80]!r} is not the name of a variable")
            if name.startswith("CNI_"):
                raise ValueError(f"pluginEnv: {name[:80]} is part of CNI: each call sets it")
            if reason := _OWN_VARIABLES.get(name):
                raise ValueError(f"pluginEnv: {name} {reason}")


@dataclass(frozen=True, slots=True)
class DeleteSettings:
    """Networks that could not be detached."""

    tries: Count = _key("deleteTries", 5)
    """The failing DEL of this number is answered with success, so that the pod does not stay in Terminating for ever.
    Its networks stay on record and are deleted later (Event `NetworkNotReleased`). 0: every failing DEL is an error.
    """
    reconcile_seconds: Annotated[float, msgspec.Meta(ge=0, le=86400)] = _key(
        "reconcileSeconds", deadlines.RECONCILE_SECONDS
    )
    """Interval for comparing the records of containers with the running pods: orphans are deleted, running pods without
    their networks are reported. 0: never.
    """


@dataclass(frozen=True, slots=True)
class AttachmentSettings:
    """Networks of running pods, after their ADD ([attachments.md](attachments.md))."""

    hotplug: Literal["off", "namespaces", "on"] = _key("hotplug", "off")
    """`on`: when the networks annotation of a running pod changes, its networks follow. `namespaces`: only in those
    with the label `multus.io/hotplug: "true"`. `off`: networks come and go by `/delegate` only, as with upstream.
    """
    keep: Literal["repair", "report", "off"] = _key("keep", "report")
    """Reaction when an attachment differs from its record: `repair` brings it back, `report` sends an
    Event, `off` does not look. The annotation `multus.io/keep` of a pod, or else of its NetworkAttachmentDefinition,
    replaces it.
    """
    ready_condition: bool = _key("networksReadyCondition", False)
    """True: write the pod condition `multus.io/NetworksReady`, which can be a readiness gate."""


class LogOptions(msgspec.Struct, frozen=True, rename="camel"):
    """Rotation of `logFile`; the defaults are upstream's."""

    max_size: Count = 100
    """Size in MB at which the file is rotated; 0: never."""
    max_backups: Count = 5
    """Number of old files to keep: `<logFile>.1` is the newest. 0: the file is not rotated."""
    max_age: Count = 5
    """Days after its last line that an old file is removed; 0: never."""
    compress: bool = True
    """True: old files are compressed with gzip, to `<logFile>.1.gz`."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The log."""

    level: LogLevel = _key("logLevel", "verbose")
    """Level of the log; any case."""
    line_format: LogFormat = _key("logFormat", "text")
    """Format: upstream's `text`, or `json` with one object a line ([operations.md](operations.md#logs))."""
    to_stderr: bool = _key("logToStderr", True)
    """Log to standard error. Without a reader, lines are dropped and counted."""
    file: str = _key("logFile", "")
    """Log to this file too."""
    options: LogOptions = _key("logOptions", LogOptions())
    """Rotation of `logFile`; its keys follow."""


class MetricsTls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Certificate and key of `metricsPort`, PEM, as the daemon sees them. Changed files are read again."""

    cert_file: Text
    """The certificate, and the intermediate ones after it."""
    key_file: Text
    """Its key."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Metrics for Prometheus."""

    port: Port | None = _key("metricsPort", None)
    """TCP port of `/metrics`, `/healthz` and `/readyz`; our manifests set 9059. None: nothing listens. At most 16
    connections at once to an address, 10 s each.
    """
    address: str = _key("metricsAddress", "")
    """Address that `metricsPort` binds to; `::`: all of them. Empty: those of the node, which manifests set as the
    variable `MULTUS_NODE_IPS`; without that, all of them, as upstream, or `127.0.0.1` with `--standalone`.
    """
    tls: MetricsTls | None = _key("metricsTLS", None)
    """HTTPS instead of HTTP on `metricsPort`; its keys follow. Nothing listens while there are no usable files."""
    authorization: bool = _key("metricsAuthorization", False)
    """True: `/metrics` needs a bearer token whose user may `get` the non-resource URL `/metrics`; the API server is
    asked, and its answers are kept for a minute. Needs `metricsTLS` and a cluster.
    """

    def __post_init__(self) -> None:
        """Raises ValueError if tokens would cross the network in plain text."""
        if self.authorization and self.tls is None:
            raise ValueError("metricsAuthorization: needs metricsTLS, or tokens cross the network in plain text")

    attachment_traffic: Literal["off", "networks"] = _key("attachmentMetrics", "networks")
    """Bytes, packets, errors and drops of the pods' additional interfaces: none, or summed by network
    ([below](#traffic)).
    """


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, by group."""

    socket: SocketSettings = field(default_factory=SocketSettings)
    paths: PathSettings = field(default_factory=PathSettings)
    networks: NetworkSettings = field(default_factory=NetworkSettings)
    primary: PrimarySettings = field(default_factory=PrimarySettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    plugins: PluginSettings = field(default_factory=PluginSettings)
    deletes: DeleteSettings = field(default_factory=DeleteSettings)
    attachments: AttachmentSettings = field(default_factory=AttachmentSettings)
    logs: LogSettings = field(default_factory=LogSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    given: Mapping[str, Any] = field(default_factory=dict)
    """The keys that were set, with their values."""
    warnings: tuple[str, ...] = ()
    """Ignored keys, for the log."""

    @property
    def overlay(self) -> dict[str, Any]:
        """The keys that override the same keys of every request, as upstream's do."""
        own = {item.metadata["key"] for item in fields(PrimarySettings)}
        return {key: value for key, value in self.given.items() if key not in own}

    def effective(self) -> dict[str, Any]:
        """Return every key with its value in force, as in the file."""
        return {
            item.metadata["key"]: msgspec.to_builtins(getattr(getattr(self, group), item.name))
            for group, kind in GROUPS.items()
            for item in fields(kind)
        }


GROUPS: dict[str, Any] = {name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)}
