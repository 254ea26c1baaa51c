"""Check CNI configurations: everything that an ADD would refuse, keys that no plugin reads, overlapping ranges."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Final

from multus_daemon.plugins import find
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin import host_local_config as host_local
from multus_daemon.plugins.builtin.registry import PLUGINS
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.find import ProgramFiles
from multus_daemon.plugins.run import ListRunner
from multus_daemon.plugins.select import BINARY, Plugins
from multus_daemon.pod import networks, plan
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import Attachment, Invocation, Sandbox, ToolExit
from multus_daemon.spec.cni import conf, gojson, names, versions
from multus_daemon.spec.cni.conf import NetworkConfig, PluginConfig
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import NetworkSelection
from multus_tools.validate import known, positions
from multus_tools.validate.located import value_at
from multus_tools.validate.positions import Path
from multus_tools.validate.report import Severity, Subject

_SANDBOX: Final = Sandbox(ContainerId("not-a-container"), "")
_IFNAME: Final = IfName("net1")
_UNKNOWN_MAX: Final = 20
"""Unknown keys of one plugin that are reported."""
_OVERLAPS_MAX: Final = 100
# It reads a file of flanneld, which exists on nodes only. The binary reads the same keys.
_READS_NODE: Final = frozenset({"flannel"})


@dataclass(frozen=True)
class Network:
    """A configuration that could be parsed."""

    name: str
    """`namespace/name` of its NetworkAttachmentDefinition, else the name in the configuration."""
    config: NetworkConfig
    subject: Subject
    """Its value is the JSON object of the configuration."""
    is_usable: bool
    """The configuration has no error."""


class Planner:
    """Plans attachments without a node: nothing is run."""

    def __init__(self, bin_dirs: Sequence[str] = ()) -> None:
        """`bin_dirs`: directories of plugin binaries; if empty, every binary is taken to exist."""
        self.bin_dirs = tuple(bin_dirs)
        self._programs = _Programs(self.bin_dirs)
        self.plugins = Plugins(self._programs, "prefer", excepted=_READS_NODE, tools=_NoTools())
        self.lists = ListRunner(self.plugins, ResultCache(FilePath("/")), ":".join(self.bin_dirs))

    def plan(self, attachment: Attachment) -> None:
        """Raise the CniError with which an ADD would refuse the attachment at once."""
        self.lists.plan(_SANDBOX, attachment, self.lists.programs((attachment.config,)))

    def only_built_in(self, plugin_type: str) -> bool:
        """Report whether only a built-in serves the type, so that an unknown key fails an ADD."""
        return plugin_type in PLUGINS and not self._programs.locate(plugin_type)


class _Programs:
    """Programs that run nothing."""

    def __init__(self, bin_dirs: Sequence[str]) -> None:
        self._bin_dirs = bin_dirs
        self._files = ProgramFiles()

    def locate(self, plugin_type: str) -> str:
        if not self._bin_dirs or plugin_type in _READS_NODE:
            return BINARY
        try:
            return find.find(self._bin_dirs, plugin_type)
        except CniError:
            return ""

    def refuse_multus(self, plugin_type: str, path: str) -> None:
        if path != BINARY:
            with contextlib.suppress(OSError):
                self._files.refuse(plugin_type, path)

    def run(self, plugin_type: str, call: Invocation, path: str = "") -> bytes:
        raise InternalError(f"{plugin_type} is not run")


class _NoTools:
    """HostTools that run nothing."""

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        raise InternalError(f"{tool} is not run")


def check(planner: Planner, raw: bytes, subject: Subject, *, name: str = "", default_name: str = "") -> Network | None:
    """Check the configuration `raw`; `subject` holds its parsed value. Returns None if it is no configuration."""
    try:
        config = conf.parse_written(raw, default_name=default_name)
    except CniError as error:
        subject.refused("network-config", error)
        return None
    before = subject.report.count("error")
    _check_version(config, subject)
    config = networks.with_list_version(config)
    # The key `plugins` may be written in any case.
    key = next((key for key in reversed(list(subject.located.value)) if key.lower() == "plugins"), "plugins")
    cleaned = []
    for index, plugin in enumerate(config.plugins):
        deadline.check()
        path: Path = (key, index) if config.is_list else ()
        if not planner.bin_dirs:
            _check_type(plugin, subject, path)
        # The value of a text that is too large is empty.
        if subject.located.value:
            plugin = _without_unknown_keys(planner, config, plugin, subject, path)
        cleaned.append(plugin)
        try:
            planner.plan(_attachment(replace(config, plugins=(plugin,)), name or config.name))
        except CniError as error:
            _refused_plugin(planner, plugin, subject, path, error)
    config = replace(config, plugins=tuple(cleaned))
    return Network(name or config.name, config, subject, subject.report.count("error") == before)


def asked_of(network: Network, element: NetworkSelection, ifname: IfName) -> Attachment:
    """Return the attachment of a pod that requests the network with `element`. Raises CniError."""
    return replace(
        _attachment(network.config, network.name),
        config=conf.with_plugin_fields(network.config, {}, element.cni_args or {}),
        ifname=ifname,
        capability_args=element.capability_args(),
        cni_args=_cni_args(plan.deprecated_args(element, network.config)),
    )


def _attachment(config: NetworkConfig, name: str) -> Attachment:
    return Attachment(name, config, _IFNAME, cni_args=_cni_args([]))


def _cni_args(extra: Sequence[tuple[str, str]]) -> names.Pairs:
    pod = names.KubernetesArgs(Namespace("default"), PodName("pod"), PodUid("uid"), _SANDBOX.container_id, ())
    return names.plugin_args(pod, extra)


def _check_version(config: NetworkConfig, subject: Subject) -> None:
    if not config.cni_version:
        taken = networks.with_list_version(config).cni_version or versions.IMPLIED
        advice = f'write "cniVersion": "{versions.CURRENT}", or what your plugins know'
        subject.warn("cni-version", f"cniVersion is missing: plugins are called with {taken}", advice)
        return
    for index, plugin in enumerate(config.plugins if config.is_list else ()):
        own = gojson.get(plugin.fields, "cniVersion")
        if own is not None and own != config.cni_version:
            subject.warn(
                "cni-version",
                f"cniVersion {own} of plugin {plugin.type} is not that of the list, {config.cni_version}, which counts",
                "remove it from the plugin",
                path=("plugins", index, "cniVersion"),
            )


def _check_type(plugin: PluginConfig, subject: Subject, path: Path) -> None:
    for what, name, where in (("plugin", plugin.type, ("type",)), ("IPAM plugin", plugin.ipam_type, ("ipam", "type"))):
        if name and name not in known.TYPES:
            meant = known.meant(name, known.TYPES) or "is the name right?"
            advice = f"{meant} A binary of that name must be in the plugin directory of each node"
            subject.warn("plugin-type", f"unknown {what} {name!r}", advice, path=(*path, *where))


def _without_unknown_keys(
    planner: Planner, config: NetworkConfig, plugin: PluginConfig, subject: Subject, path: Path
) -> PluginConfig:
    """Report the keys that the plugin does not know, and return the plugin without them.

    They are warnings if a binary may serve the plugin: it ignores the keys, or is newer and knows them.
    """
    fields = copy.deepcopy(dict(plugin.fields))
    for _ in range(_UNKNOWN_MAX):
        cleaned = replace(plugin, fields=fields)
        unknown = _unknown(planner, config, cleaned)
        if unknown is None:
            return cleaned
        name, text = unknown
        within, key = [], text.partition(":")[0]
        problem, advice = f"{text} is not known to {name}", "a newer binary may know it"
        if isinstance(text, configuration.UnknownKey):
            within, key = re.findall(r"[\w-]+", text.within), text.key
            problem = f"unknown key {key!r} of plugin {name}"
            if text.known:
                advice = known.meant(key, text.known) or "it means nothing to the plugin"
        at = _find(fields, within, key)
        severity: Severity = "error" if planner.only_built_in(name) else "warning"
        at_key = (*path, *_written(value_at(subject.located.value, path), at))
        subject.add(severity, "plugin-key", problem, advice, path=at_key)
        value_at(fields, at[:-1]).pop(at[-1], None)
    return replace(plugin, fields=fields)


def _unknown(planner: Planner, config: NetworkConfig, plugin: PluginConfig) -> tuple[str, str] | None:
    """Return the type of the plugin or IPAM plugin that has an unknown key, and the key; None if all are known."""
    attachment = _attachment(replace(config, plugins=(plugin,)), config.name)
    ((_, invocation),) = planner.lists.invocations(_SANDBOX, attachment)
    for name in filter(None, (plugin.type, plugin.ipam_type)):
        if (builtin := planner.plugins.builtin(name)) and (text := builtin.unsupported(invocation)):
            return name, text
    if (keys := known.KEYS.get(plugin.type)) is not None:
        text = configuration.unknown_key(plugin.fields, configuration.COMMON_KEYS | keys)
        if text:
            return plugin.type, text
    ipam = gojson.get(plugin.fields, "ipam")
    if (keys := known.IPAM_KEYS.get(plugin.ipam_type)) is None or not isinstance(ipam, dict):
        return None
    text = configuration.unknown_key(ipam, keys, within="ipam.")
    return (plugin.ipam_type, text) if text else None


def _find(fields: Mapping[str, Any], within: Sequence[str], key: str) -> Path:
    """Return the path of `key` below the keys `within`; lists on the way are searched."""
    value: Any = fields
    path: Path = ()
    for name in within:
        spelt = next((item for item in value if item.lower() == name.lower()), name)
        value, path = value[spelt], (*path, spelt)
    return next(_paths_to(value, key, path), (*path, key))


def _paths_to(value: Any, key: str, path: Path) -> Iterator[Path]:
    if isinstance(value, dict):
        spelt = next((item for item in value if item.lower() == key.lower()), None)
        if spelt is not None:
            yield (*path, spelt)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _paths_to(item, key, (*path, index))


def _written(value: Any, path: Path) -> Path:
    """Return the part of `path` that exists in the text: a plugin also gets keys that are not in it."""
    for length, name in enumerate(path):
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return path[:length]
    return path


def _refused_plugin(planner: Planner, plugin: PluginConfig, subject: Subject, path: Path, error: CniError) -> None:
    if not versions.is_supported(gojson.get(subject.located.value, "cniVersion") or ""):
        subject.refused("cni-version", error)
    elif planner.bin_dirs and (missing := re.search(r'failed to find plugin "([^"]*)"', error.msg)):
        where: Path = ("type",) if missing[1] == plugin.type else ("ipam", "type")
        problem = f"plugin {missing[1]!r} is neither in {':'.join(planner.bin_dirs)} nor built in"
        meant = "" if missing[1] in known.TYPES else known.meant(missing[1], known.TYPES)
        advice = meant or "install it on the node"
        subject.error("plugin-missing", problem, advice, path=(*path, *where))
    else:
        subject.refused("plugin-config", error, path=path)


def fault(subject: Subject, check_name: str, path: Path, error: gojson.JsonError) -> None:
    """Report that the string at `path` is not JSON, at the place of the fault."""
    message, place = positions.place_of_fault(str(error))
    embedded = subject.located.text(*path)
    at = embedded.place_at(*(place or (1, 1)))
    problem = f"not JSON: {message.removeprefix('JSON is malformed: ')}"
    subject = replace(subject, located=replace(subject.located, source=embedded.source))
    subject.add("error", check_name, problem, _advice(embedded.text), path=path, place=at)


def _advice(text: str) -> str:
    if re.search(r",\s*[}\]]", text):
        return "remove the comma before the closing bracket"
    if re.search(r"^[ \t]*(//|#|/\*)", text, re.MULTILINE):
        return "JSON has no comments"
    if "'" in text and '"' not in text:
        return "JSON has double quotes"
    return ""


@dataclass(frozen=True, slots=True)
class _Pool:
    range: host_local.Range
    kept_in: str
    """host-local's directory. Networks that share it never assign the same address."""
    network: Network
    path: Path


def check_ranges(found: Sequence[Network]) -> None:
    """Report pairs of networks in which host-local would assign the same addresses."""
    pools = [pool for network in found for pool in _pools(network)]
    reported: set[frozenset[str]] = set()
    open_pools: list[_Pool] = []
    for pool in sorted(pools, key=lambda item: (item.range.version, item.range.first)):
        open_pools = [other for other in open_pools if other.range.overlaps(pool.range)]
        for other in open_pools:
            pair = frozenset({pool.network.name, other.network.name})
            if other.kept_in != pool.kept_in and pair not in reported and len(reported) < _OVERLAPS_MAX:
                reported.add(pair)
                _report_overlap(*sorted((other, pool), key=lambda item: found.index(item.network)))
        open_pools.append(pool)


def _pools(network: Network) -> Iterator[_Pool]:
    config = network.config
    for index, plugin in enumerate(config.plugins):
        if plugin.ipam_type != "host-local":
            continue
        path: Path = ("plugins", index, "ipam") if config.is_list else ("ipam",)
        fields = conf.plugin_fields(config, plugin)
        # check() has reported any error.
        with contextlib.suppress(CniError):
            read = host_local.read(fields, name=config.name, cni_version=config.cni_version or versions.IMPLIED)
            for item in (one for ranges in read.range_sets for one in ranges.ranges):
                yield _Pool(item, f"{read.data_dir}/{config.name}", network, path)


def _report_overlap(first: _Pool, second: _Pool) -> None:
    second.network.subject.warn(
        "overlap",
        f"addresses {second.range} overlap with {first.range} of network {first.network.name}: "
        "host-local gives them away in each by itself",
        'give each network addresses of its own, or both the same "name", so that they share what is taken',
        path=second.path,
    )
