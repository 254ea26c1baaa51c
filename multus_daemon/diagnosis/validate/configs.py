"""CNI configurations: what an ADD would refuse, and what nobody would read."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Final

from multus_daemon.diagnosis.validate import known
from multus_daemon.diagnosis.validate.report import Report, Severity
from multus_daemon.diagnosis.validate.source import Located
from multus_daemon.plugins import find
from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin.host_local import config as host_local
from multus_daemon.plugins.builtin.runner import PLUGINS, BuiltinRunner
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.find import ProgramFiles
from multus_daemon.plugins.run import Chain
from multus_daemon.plugins.select import BINARY, Dispatcher
from multus_daemon.pod import networks, plan
from multus_daemon.runtime import jsontext
from multus_daemon.runtime.jsontext import Path
from multus_daemon.spec.attachment import Attachment, Invocation, Sandbox, ToolExit
from multus_daemon.spec.cni import args, conf, gojson, versions
from multus_daemon.spec.cni.conf import NetworkConfig, PluginConfig
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.cni.names import ContainerId, IfName, Namespace, PodName, PodUid
from multus_daemon.spec.cni.result import Result
from multus_daemon.spec.nad.selection import NetworkSelection

HOST_LOCAL: Final = "host-local"
SANDBOX: Final = Sandbox(ContainerId("not-a-container"), "")
_IFNAME: Final = IfName("net1")
_UNKNOWN_MAX: Final = 20
"""Keys that one plugin does not know; the rest would be told of after these."""
# It reads what flanneld has written on the node: there are no files of a node here, and its binary reads the same keys.
_READS_NODE: Final = frozenset({"flannel"})


@dataclass(frozen=True)
class Network:
    """A configuration that has been read, and what may be asked of it."""

    name: str
    """`namespace/name` of its NetworkAttachmentDefinition; else the configuration's own."""
    config: NetworkConfig
    subject: str
    located: Located
    """The JSON of the configuration."""
    is_usable: bool
    """Nothing in it would be refused."""


class Plugins:
    """The runner of a node that need not be there."""

    def __init__(self, bin_dirs: Sequence[str] = ()) -> None:
        """`bin_dirs`: where binaries are; with none, every binary that a configuration names counts as there."""
        self.bin_dirs = tuple(bin_dirs)
        self.builtin = BuiltinRunner(FilePath("/"), tools=_NoTools())
        self._binaries = _Binaries(self.bin_dirs)
        dispatcher = Dispatcher(self._binaries, self.builtin, "prefer", excepted=_READS_NODE)
        self.chain = Chain(dispatcher, ResultCache(FilePath("/")), ":".join(self.bin_dirs))

    def plan(self, attachment: Attachment) -> None:
        """Raises CniError for what an ADD would refuse before it touches anything."""
        self.chain.plan(SANDBOX, attachment, self.chain.programs((attachment.config,)))

    def only_built_in(self, plugin_type: str) -> bool:
        """Whether nobody but the built-in serves the type, so that what it does not know fails an ADD."""
        return plugin_type in PLUGINS and not self._binaries.locate(plugin_type)


class _Binaries:
    """The BinaryRunner that runs nothing."""

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

    def run(self, plugin_type: str, invocation: Invocation, path: str = "") -> Result:
        raise InternalError(f"{plugin_type} is not run")


class _NoTools:
    """The HostTools of a host that has them all, and where none is run."""

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        raise InternalError(f"{tool} is not run")


# --- one configuration -----------------------------------------------------------------------------------------------


def check(
    report: Report,
    plugins: Plugins,
    raw: bytes,
    located: Located,
    subject: str,
    *,
    name: str = "",
    default_name: str = "",
) -> Network | None:
    """Report on the configuration `raw`, a JSON object, whose value is `located`; None where it can't be read."""
    try:
        config = conf.parse(raw, default_name=default_name)
    except CniError as error:
        report.refused("network-config", subject, located, error)
        return None
    before = report.count("error")
    _check_version(report, config, located, subject)
    config = networks.with_list_version(config)
    paths: list[Path] = [("plugins", index) for index in range(len(config.plugins))] if config.is_list else [()]
    cleaned = []
    for plugin, path in zip(config.plugins, _spelt(located.value, paths), strict=True):
        _check_type(report, plugins, plugin, located, subject, path)
        plugin = _without_unknown_keys(report, plugins, config, plugin, located, subject, path)
        cleaned.append(plugin)
        try:
            plugins.plan(_attachment(replace(config, plugins=(plugin,)), name or config.name))
        except CniError as error:
            _refused_plugin(report, plugins, plugin, located, subject, path, error)
    config = replace(config, plugins=tuple(cleaned))
    return Network(name or config.name, config, subject, located, report.count("error") == before)


def asked_of(network: Network, element: NetworkSelection, ifname: IfName) -> Attachment:
    """The attachment of a pod that asks for the network with `element`. Raises CniError."""
    return replace(
        _attachment(network.config, network.name),
        config=conf.with_plugin_fields(network.config, {}, element.cni_args or {}),
        ifname=ifname,
        capability_args=element.capability_args(),
        cni_args=_cni_args(plan.deprecated_args(element, network.config)),
        asked=frozenset(element.capability_args()),
    )


def ranges_of(network: Network) -> Iterator[tuple[host_local.Range, str, Path]]:
    """What host-local gives away for the network, where its addresses are kept, and the key that says so."""
    config = network.config
    for index, plugin in enumerate(config.plugins):
        if plugin.ipam_type != HOST_LOCAL:
            continue
        path: Path = ("plugins", index) if config.is_list else ()
        fields = conf.plugin_fields(config, plugin)
        try:
            read = host_local.read(fields, name=config.name, cni_version=config.cni_version or versions.IMPLIED)
        except CniError:
            # Told of by now.
            continue
        for item in (one for found in read.range_sets for one in found.ranges):
            yield item, f"{read.data_dir}/{config.name}", (*path, "ipam")


def _attachment(config: NetworkConfig, name: str) -> Attachment:
    return Attachment(name, config, _IFNAME, cni_args=_cni_args([]))


def _cni_args(extra: Sequence[tuple[str, str]]) -> args.Pairs:
    pod = args.KubernetesArgs(Namespace("default"), PodName("pod"), PodUid("uid"), SANDBOX.container_id, ())
    return args.for_delegate(pod, extra)


def _spelt(value: Mapping[str, Any], paths: Sequence[Path]) -> list[Path]:
    """The paths with the key as it is written: it matches in any case."""
    name = next((key for key in reversed(list(value)) if key.lower() == "plugins"), "plugins")
    return [(name, *path[1:]) if path else path for path in paths]


def _check_version(report: Report, config: NetworkConfig, located: Located, subject: str) -> None:
    if not config.cni_version:
        taken = networks.with_list_version(config).cni_version or versions.IMPLIED
        report.add(
            "warning", "cni-version", subject, located, f"cniVersion is missing: plugins are called with {taken}",
            f'write "cniVersion": "{versions.CURRENT}", or what your plugins know',
        )  # fmt: skip
        return
    if not config.is_list:
        return
    for index, plugin in enumerate(config.plugins):
        own = gojson.get(plugin.fields, "cniVersion")
        if own is not None and own != config.cni_version:
            report.add(
                "warning", "cni-version", subject, located,
                f"cniVersion {own} of plugin {plugin.type} is not that of the list, {config.cni_version}, which counts",
                "remove it from the plugin",
                path=("plugins", index, "cniVersion"),
            )  # fmt: skip


# --- one plugin ------------------------------------------------------------------------------------------------------


def _check_type(
    report: Report, plugins: Plugins, plugin: PluginConfig, located: Located, subject: str, path: Path
) -> None:
    if plugins.bin_dirs:
        # Then it is known which there are.
        return
    for name, where in ((plugin.type, ("type",)), (plugin.ipam_type, ("ipam", "type"))):
        if name and name not in known.TYPES:
            meant = known.meant(name, known.TYPES) or "is the name right?"
            what = "IPAM plugin" if len(where) > 1 else "plugin"
            report.add(
                "warning", "plugin-type", subject, located, f"unknown {what} {name!r}",
                f"{meant} A binary of that name must be in the plugin directory of each node", path=(*path, *where),
            )  # fmt: skip


def _without_unknown_keys(
    report: Report,
    plugins: Plugins,
    config: NetworkConfig,
    plugin: PluginConfig,
    located: Located,
    subject: str,
    path: Path,
) -> PluginConfig:
    """The plugin without the keys that it does not know, each of which is reported.

    As a warning: a binary passes them over, or is newer and knows them.
    """
    fields = copy.deepcopy(dict(plugin.fields))
    for _ in range(_UNKNOWN_MAX):
        cleaned = replace(plugin, fields=fields)
        found = _unknown(plugins, config, cleaned)
        if found is None:
            return cleaned
        name, text = found
        within, key, near = _parts(text)
        at = _find(fields, within, key)
        meant = known.meant(key, near) if near else "a newer binary may know it"
        if not isinstance(text, configuration.UnknownKey):
            problem = f"{text} is not known to {name}"
        else:
            problem = f"unknown key {key!r} of plugin {name}"
        severity: Severity = "error" if plugins.only_built_in(name) else "warning"
        advice = meant or "it means nothing to the plugin"
        at_key = (*path, *_written(located.value, path, at))
        report.add(severity, "plugin-key", subject, located, problem, advice, path=at_key)
        _remove(fields, at)
    return replace(plugin, fields=fields)


def _unknown(plugins: Plugins, config: NetworkConfig, plugin: PluginConfig) -> tuple[str, str] | None:
    """The first thing that the plugin, or its IPAM plugin, does not know, and who does not."""
    attachment = _attachment(replace(config, plugins=(plugin,)), config.name)
    ((_, invocation),) = plugins.chain.invocations(SANDBOX, attachment)
    for name in filter(None, (plugin.type, plugin.ipam_type)):
        if name in PLUGINS and (found := plugins.builtin.unsupported(name, invocation)):
            return name, found
    common = configuration.COMMON_KEYS
    if (keys := known.KEYS.get(plugin.type)) is not None and (
        found := configuration.unknown_key(plugin.fields, common | keys)
    ):
        return plugin.type, found
    ipam = gojson.get(plugin.fields, "ipam")
    if (keys := known.IPAM_KEYS.get(plugin.ipam_type)) is None or not isinstance(ipam, dict):
        return None
    found = configuration.unknown_key(ipam, keys, within="ipam.")
    return (plugin.ipam_type, found) if found else None


def _parts(text: str) -> tuple[list[str], str, frozenset[str]]:
    """The objects that the key is in, the key, the keys that are known there."""
    if isinstance(text, configuration.UnknownKey):
        return re.findall(r"[\w-]+", text.within), text.key, text.known
    return [], text.partition(":")[0], frozenset()


def _find(fields: Mapping[str, Any], within: Sequence[str], key: str) -> Path:
    """The path of `key` below the keys `within`, through lists."""
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


def _remove(fields: Any, path: Path) -> None:
    for name in path[:-1]:
        fields = fields[name]
    fields.pop(path[-1], None)


def _written(value: Any, base: Path, path: Path) -> Path:
    """`path` below `base`, as far as it is in the text: what a plugin gets has keys of its own beside."""
    for name in base:
        value = value[name]
    taken: list[str | int] = []
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            break
        taken.append(name)
    return tuple(taken)


def _refused_plugin(
    report: Report, plugins: Plugins, plugin: PluginConfig, located: Located, subject: str, path: Path, error: CniError
) -> None:
    if not versions.is_supported(gojson.get(located.value, "cniVersion") or ""):
        report.refused("cni-version", subject, located, error)
        return
    if plugins.bin_dirs and (missing := re.search(r'failed to find plugin "([^"]*)"', error.msg)):
        where: Path = ("type",) if missing[1] == plugin.type else ("ipam", "type")
        meant = known.meant(missing[1], {*known.TYPES} - {missing[1]})
        report.add(
            "error", "plugin-missing", subject, located,
            f"plugin {missing[1]!r} is neither in {':'.join(plugins.bin_dirs)} nor built in",
            meant or "install it on the node", path=(*path, *where),
        )  # fmt: skip
        return
    report.refused("plugin-config", subject, located, error, path=path)


def fault(report: Report, check_name: str, subject: str, located: Located, path: Path, error: gojson.JsonError) -> None:
    """Report a string at `path` that is no JSON, at the place in it."""
    message, place = jsontext.place_of_fault(str(error))
    embedded = located.text(*path)
    at = embedded.place_at(*(place or (1, 1)))
    problem = f"not JSON: {message.removeprefix('JSON is malformed: ')}"
    report.add_at("error", check_name, subject, embedded.source, at, problem, _advice(embedded.text), path=path)


def _advice(text: str) -> str:
    if re.search(r",\s*[}\]]", text):
        return "remove the comma before the closing bracket"
    if re.search(r"^\s*(//|#|/\*)", text, re.MULTILINE):
        return "JSON has no comments"
    if "'" in text and '"' not in text:
        return "JSON has double quotes"
    return ""
