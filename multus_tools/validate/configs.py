"""Check CNI configurations: what an ADD would refuse, keys that no plugin reads, overlapping ranges."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Final, cast

from multus_daemon.plugins import find
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.registry import PLUGINS
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.plugins.leases import Leases
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
from multus_daemon.spec.ports import AddressBook
from multus_tools.validate import known, positions
from multus_tools.validate.located import value_at
from multus_tools.validate.positions import Path
from multus_tools.validate.report import Severity, Subject, without

_SANDBOX: Final = Sandbox(ContainerId("not-a-container"), "")
_IFNAME: Final = IfName("net1")
_UNKNOWN_MAX: Final = 20
"""Maximum number of unknown keys of one plugin that are reported."""
_ERRORS_MAX: Final = 20
"""Maximum number of errors of one plugin, or of the rest of a configuration, that are reported."""
# It reads a file of flanneld, which exists on nodes only. The binary reads the same keys.
_READS_NODE: Final = frozenset({"flannel"})


@dataclass(frozen=True)
class Network:
    """A configuration that could be parsed."""

    name: str
    """`namespace/name` of its NetworkAttachmentDefinition, else the name in the configuration."""
    config: NetworkConfig
    subject: Subject
    """The subject of findings about it; its value is the configuration's JSON object."""
    is_usable: bool
    """True if the configuration has no error."""


class _NoAddresses:
    """In the place of the cluster's addresses: a configuration is read, and none is reserved."""

    refusal = ""

    def ask(self) -> None:
        """Nobody is asked."""


class Planner:
    """Plans attachments without a node: it takes the place of the node's plugin binaries, and runs none."""

    def __init__(self, bin_dirs: Sequence[str] = ()) -> None:
        """`bin_dirs`: directories of plugin binaries; empty: every binary is assumed to exist."""
        self.bin_dirs = tuple(bin_dirs)
        # No address is reserved, and the file of the node that completes a configuration is another machine's.
        self.plugins = Plugins(
            self,
            "prefer",
            excepted=_READS_NODE,
            host_root=FilePath("/nowhere"),
            tools=_NoTools(),
            leases=Leases(FilePath("/")),
            addresses=cast(AddressBook, _NoAddresses()),
        )
        self.lists = ListRunner(self.plugins, ResultCache(FilePath("/")), ":".join(self.bin_dirs))

    def plan(self, attachment: Attachment) -> None:
        """Raise the CniError with which an ADD would refuse the attachment at once."""
        self.lists.plan(_SANDBOX, attachment, self.lists.programs((attachment.config,)))

    def only_built_in(self, plugin_type: str) -> bool:
        """Return True if only a built-in can run the type, so that an unknown key fails an ADD."""
        return plugin_type in PLUGINS and not self.locate(plugin_type).path

    def locate(self, plugin_type: str) -> find.Program:
        """Implements `Programs.locate`."""
        if not self.bin_dirs or plugin_type in _READS_NODE:
            return find.Program(BINARY)
        return find.program(self.bin_dirs, plugin_type)

    def builds(self, types: Collection[str]) -> Mapping[str, find.Build]:
        """Return nothing: which of two implementations runs is no matter of a configuration."""
        return {}

    def run(self, plugin_type: str, call: Invocation, path: str = "") -> bytes:
        """Implements `Programs.run`: always raises InternalError, as `validate` runs no plugin."""
        raise InternalError(f"validate does not run plugin {plugin_type}")


class _NoTools:
    """HostTools that run nothing."""

    def run(self, tool: str, arguments: Sequence[str], stdin: bytes = b"") -> ToolExit:
        raise InternalError(f"validate does not run {tool}")


def check(planner: Planner, raw: bytes, subject: Subject, *, name: str = "", default_name: str = "") -> Network | None:
    """Check the configuration `raw`, whose parsed value is in `subject`; report to `subject` what is wrong.

    Returns None if no network can be read from it.
    """
    before = subject.report.count("error")
    if (parsed := _parsed(raw, subject, default_name)) is None:
        return None
    config, subject = parsed
    if subject.report.count("error") == before:
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
        _refusals(planner, replace(config, plugins=(plugin,)), subject, path, name or config.name)
    config = replace(config, plugins=tuple(cleaned))
    return Network(name or config.name, config, subject, subject.report.count("error") == before)


def _parsed(raw: bytes, subject: Subject, default_name: str) -> tuple[NetworkConfig, Subject] | None:
    """Report each key that is refused; return the configuration without these, None if it can't be read."""
    for count in range(_ERRORS_MAX):
        try:
            return conf.parse_written(raw, default_name=default_name), subject
        except CniError as error:
            at = subject.refused("network-config", error, after=count > 0)
        try:
            subject = subject.without(at)
        except LookupError:
            break
        raw = gojson.dumps(subject.located.value)
    return None


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
        if isinstance(text, contract.UnknownKey):
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
        text = builtin.unsupported(invocation) if (builtin := planner.plugins.builtin(name)) else ""
        if text and not isinstance(text, contract.LeftToBinary):
            return name, text
    return None


def _find(fields: Mapping[str, Any], within: Sequence[str], key: str) -> Path:
    """Return the path of `key` below the keys `within`, also in the items of lists."""
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
    """Return the part of `path` that exists in `value`: a plugin also gets keys that are not in the text."""
    for length, name in enumerate(path):
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return path[:length]
    return path


def _refusals(planner: Planner, config: NetworkConfig, subject: Subject, path: Path, name: str) -> None:
    """Report each error with which an ADD would refuse the only plugin of `config`, which is at `path`."""
    for count in range(_ERRORS_MAX):
        (plugin,) = config.plugins
        try:
            planner.plan(_attachment(config, name))
            return
        except CniError as error:
            at = _refused_plugin(planner, plugin, subject, path, error, after=count > 0)
        try:
            subject, fields = subject.without(at), without(plugin.fields, at[len(path) :])
        except LookupError:
            return
        config = replace(config, plugins=(replace(plugin, fields=fields),))


def _refused_plugin(
    planner: Planner, plugin: PluginConfig, subject: Subject, path: Path, error: CniError, *, after: bool
) -> Path:
    """Report the error; return the path of the key that it is about, empty if there is none."""
    if not versions.is_supported(gojson.get(subject.located.value, "cniVersion") or ""):
        subject.refused("cni-version", error)
    elif isinstance(error, find.PluginNotFoundError):
        missing = error.plugin_type
        where: Path = ("type",) if missing == plugin.type else ("ipam", "type")
        problem = f"plugin {missing!r} is neither in {':'.join(planner.bin_dirs)} nor built in"
        meant = "" if missing in known.TYPES else known.meant(missing, known.TYPES)
        advice = meant or "install it on the node"
        subject.error("plugin-missing", problem, advice, path=(*path, *where))
    elif (at := subject.refused("plugin-config", error, path=path, after=after)) != path:
        return at
    return ()


def fault(subject: Subject, check_name: str, path: Path, error: gojson.JsonError) -> None:
    """Report that the string at `path` is not JSON, at the place of the fault."""
    message, place = positions.place_of_fault(str(error))
    embedded = subject.located.text(*path)
    at = embedded.place_at(*(place or (1, 1)))
    subject = replace(subject, located=replace(subject.located, source=embedded.source))
    subject.add("error", check_name, message, _advice(embedded.text), path=path, place=at)


def _advice(text: str) -> str:
    if re.search(r",\s*[}\]]", text):
        return "remove the comma before the closing bracket"
    if re.search(r"^[ \t]*(//|#|/\*)", text, re.MULTILINE):
        return "JSON has no comments"
    if "'" in text and '"' not in text:
        return "JSON has double quotes"
    return ""
