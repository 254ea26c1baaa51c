"""Network configurations, single or list: the original bytes with a parsed view, and the stdin of each plugin.

Rules: CNI SPEC section 1, and libcni (`libcni/conf.go`, `libcni/api.go`). The bytes are stored and passed on, so
unknown keys are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from typing import Any, Final, ParamSpec, TypeVar

from multus_daemon.spec.cni import gojson, versions
from multus_daemon.spec.cni.errors import (
    DecodingFailureError,
    IncompatibleVersionError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
    Origin,
)
from multus_daemon.spec.cni.names import NETWORK_NAME_ADVICE, NetworkName, network_name_problem

P = ParamSpec("P")
T = TypeVar("T")

CONFIG_MAX_BYTES: Final = 1024 * 1024
"""Maximum size of a configuration in a file, a NetworkAttachmentDefinition or a hot-plug request."""
CONTAINERS_MAX: Final = 20_000
"""Maximum number of objects and arrays in a configuration: Python's garbage collection of them stops all threads."""
PLUGINS_MAX: Final = 64
"""Maximum number of plugins in a list."""
ADDRESSES_MAX: Final = 4096
"""Maximum number of addresses of one interface."""
_ADDRESS_LISTS: Final = {"ranges": "range sets", "addresses": "addresses"}
"""Keys of `ipam` whose lists ADDRESSES_MAX limits (host-local, static), with the word for their items."""
_REMEMBERED_MAX_BYTES: Final = 4 * 1024
VERBS: Final = ("ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION")
_LIST_FLAGS: Final = ("disableCheck", "disableGC", "loadOnlyInlinedPlugins")


def reads(what: str, origin: Origin) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that reads JSON: its JsonError becomes a DecodingFailureError (6) with `what` before it."""

    def decorate(read: Callable[P, T]) -> Callable[P, T]:
        @wraps(read)
        def reading(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return read(*args, **kwargs)
            except gojson.JsonError as error:
                raise DecodingFailureError(f"{what}: {error}", origin=origin) from error

        return reading

    return decorate


class PluginFields(dict[str, Any]):
    """The configuration of one plugin, shared by all pods of the network. Do not modify."""

    __slots__ = ("read",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: dict[Hashable, Any] = {}
        """Values derived from it by `once`."""


def once(fields: Mapping[str, Any], key: Hashable, read: Callable[[], T]) -> T:
    """Return `read()`, which must depend on `fields` only. A PluginFields caches the value, no exception."""
    if not isinstance(fields, PluginFields):
        return read()
    if key not in fields.read:
        fields.read[key] = read()
    value: T = fields.read[key]
    return value


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """One plugin object of a configuration."""

    type: str
    fields: Mapping[str, Any]
    """The whole object. Do not modify: all pods of the network share it."""
    capabilities: frozenset[str]
    """The declared capabilities."""
    ipam_type: str = ""
    """`ipam.type`; empty if absent."""
    derived: dict[tuple[str, str], PluginFields] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Configurations with no request of a pod in them, which calls share, by name and CNI version of the network.

    `plugin_fields` makes them.
    """

    @property
    def name(self) -> str:
        """The key `name` of the plugin's own object, which libcni shows in errors."""
        name = gojson.get(self.fields, "name")
        return name if isinstance(name, str) else ""


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """A network: one plugin (`.conf`) or a list of them (`.conflist`)."""

    raw: bytes
    """The original bytes."""
    name: NetworkName
    cni_version: str
    """CNI version of the calls; empty means 0.1.0."""
    plugins: tuple[PluginConfig, ...]
    is_list: bool
    disable_check: bool = False
    disable_gc: bool = False
    load_only_inlined_plugins: bool = False

    @property
    def type(self) -> str:
        """The first plugin's type, for messages and metrics."""
        return self.plugins[0].type if self.plugins else ""

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities that any of the plugins declares."""
        return frozenset().union(*(plugin.capabilities for plugin in self.plugins))


def parse(raw: bytes, *, default_name: str = "", allow_no_plugins: bool = False) -> NetworkConfig:
    """Read a configuration, single or list.

    `default_name`: added to the bytes of a configuration without a name (NPWG multi-network SPEC 3.4.2).
    `allow_no_plugins`: a list may get its plugins from a folder (see `with_plugins`). Raises DecodingFailureError (6)
    and InvalidNetworkConfigError (7).
    """
    read = _parsed_before if len(raw) <= _REMEMBERED_MAX_BYTES else _parse
    return read(raw, default_name, allow_no_plugins)


def parse_written(raw: bytes, *, default_name: str = "") -> NetworkConfig:
    """Read a user's configuration within the limits at the top of this module. Raises as `parse` does."""
    if len(raw) > CONFIG_MAX_BYTES:
        raise InvalidNetworkConfigError(
            f"CNI configuration has {len(raw)} bytes, and at most {CONFIG_MAX_BYTES} are allowed"
        )
    if gojson.containers(raw) > CONTAINERS_MAX:
        raise InvalidNetworkConfigError(f"CNI configuration has more than {CONTAINERS_MAX} objects and arrays")
    config = parse(raw, default_name=default_name)
    if len(config.plugins) > PLUGINS_MAX:
        raise InvalidNetworkConfigError(
            f"the list has {len(config.plugins)} plugins, and at most {PLUGINS_MAX} are allowed",
            f"network {config.name!r}",
        )
    for plugin in config.plugins if len(raw) > ADDRESSES_MAX else ():
        for key, what in _ADDRESS_LISTS.items():
            entries = gojson.get(gojson.get(plugin.fields, "ipam") or {}, key)
            if isinstance(entries, list) and len(entries) > ADDRESSES_MAX:
                raise InvalidNetworkConfigError(
                    f"ipam.{key} has {len(entries)} {what}, and at most {ADDRESSES_MAX} are allowed",
                    f"network {config.name!r}",
                )
    return config


@reads("CNI configuration", Origin.NETWORK)
def _parse(raw: bytes, default_name: str, allow_no_plugins: bool) -> NetworkConfig:
    fields = gojson.loads_object(raw)
    if default_name and not gojson.get_str(fields, "name"):
        # Sorted, as upstream's; read again, as the last of two spellings of a key wins.
        raw = gojson.dumps(gojson.with_keys(fields, {"name": default_name}))
        fields = gojson.loads_object(raw)
    name = gojson.get_str(fields, "name") or ""
    if problem := network_name_problem(name):
        raise InvalidNetworkConfigError(problem, name, remedy=NETWORK_NAME_ADVICE)
    version = gojson.get_str(fields, "cniVersion") or ""
    offered = gojson.get_strings(fields, "cniVersions")
    # As upstream: a configuration without `type` is a list.
    is_list = not gojson.get_str(fields, "type")
    entries = gojson.get_list(fields, "plugins") if is_list else None
    flags = [gojson.get_flag(fields, key) if is_list else False for key in _LIST_FLAGS]
    cni_version = _choose_version(version, offered)
    if is_list and entries is None and not allow_no_plugins:
        raise InvalidNetworkConfigError(
            "CNI configuration has neither 'type' nor 'plugins'", f"network {name!r}: name a plugin"
        )
    if entries is not None and not entries:
        raise InvalidNetworkConfigError("no plugins in list", f"network {name!r}: 'plugins' is empty")
    plugins = tuple(_list_entry(index, entry) for index, entry in enumerate(entries or ()))
    return NetworkConfig(
        raw, NetworkName(name), cni_version, plugins if is_list else (_plugin(fields),), is_list, *flags
    )


# Pods share a few networks. Exceptions are not cached.
_parsed_before = lru_cache(maxsize=256)(_parse)


def _list_entry(index: int, entry: Any) -> PluginConfig:
    try:
        if not isinstance(entry, dict):
            raise gojson.JsonError(f"each plugin must be an object, not {gojson.kind_of(entry)}")
        return _plugin(entry, f"plugins[{index}]: ")
    except gojson.JsonError as error:
        raise gojson.JsonError(f"plugins[{index}]: {error}") from error


@reads("CNI configuration", Origin.NETWORK)
def require_plugin(raw: bytes) -> None:
    """Check that the bytes are one plugin object, for a file that completes a list (see `with_plugins`).

    Raises as `parse` does; the message does not say which file.
    """
    _plugin(gojson.loads_object(raw), advice="the file must hold one plugin, no list")


def _plugin(fields: Mapping[str, Any], where: str = "", advice: str = "") -> PluginConfig:
    plugin_type = gojson.get_str(fields, "type") or ""
    if not plugin_type:
        raise InvalidNetworkConfigError(f"{where}'type' is missing", advice)
    if "/" in plugin_type or "\0" in plugin_type or plugin_type in (".", ".."):
        raise InvalidNetworkConfigError(
            f"invalid plugin name: {plugin_type}", "a plugin's type is a file name, no path"
        )
    capabilities = gojson.get_object(fields, "capabilities") or {}
    for key, value in capabilities.items():
        if value is not None and not isinstance(value, bool):
            raise gojson.JsonError(f"capabilities.{key}: a boolean is needed, not {gojson.kind_of(value)}")
    ipam = gojson.get_object(fields, "ipam") or {}
    return PluginConfig(
        type=plugin_type,
        # Written and read again, sorted by key, so that built-ins and binaries use the same of two spellings.
        fields=gojson.loads_object(gojson.dumps(fields)),
        capabilities=frozenset(key for key, value in capabilities.items() if value),
        ipam_type=gojson.get_str(ipam, "type") or "",
    )


def _choose_version(single: str, offered: list[str] | None) -> str:
    """Return `cniVersion`, or the highest known one of `cniVersions` (CNI SPEC 1.1.0 section 1)."""
    try:
        versions.parse(single)
        parsed = {version: versions.parse(version) for version in (*(offered or ()), single) if version}
        known = [version for version, numbers in parsed.items() if numbers <= (1, 1, 0)]
        return single if offered is None else max(known, key=parsed.__getitem__, default=single)
    except ValueError as error:
        raise InvalidNetworkConfigError(str(error)) from error


@reads("CNI configuration", Origin.NETWORK)
def with_plugins(config: NetworkConfig, extra: tuple[bytes, ...]) -> NetworkConfig:
    """Append the plugin objects `extra` to `config.plugins` and to the list in `config.raw`. Raises as `parse` does."""
    if not extra:
        return config
    fields = gojson.loads_object(config.raw)
    entries = [*(gojson.get_list(fields, "plugins") or ()), *(gojson.loads_object(raw) for raw in extra)]
    # Not sorted: of two spellings of a key, `type` and `Type`, every reader uses the last one.
    return parse(gojson.dumps(gojson.with_keys(fields, {"plugins": entries}), sort_keys=False))


def plugin_fields(
    config: NetworkConfig,
    plugin: PluginConfig,
    *,
    capability_args: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> PluginFields:
    """Derive the configuration of `plugin` (CNI SPEC section 3, "Deriving execution configuration").

    It is the plugin's object with name and cniVersion of the network, `runtimeConfig` with those of `capability_args`
    that the plugin declares, and `extra` keys. As in libcni, a literal runtimeConfig stays if no capability applies.
    `plugin_stdin` adds `prevResult`.
    """
    version = config.cni_version or versions.IMPLIED
    granted = {key: value for key, value in (capability_args or {}).items() if key in plugin.capabilities}
    of_pod = {**({"runtimeConfig": granted} if granted else {}), **(extra or {})}
    if not of_pod and (derived := plugin.derived.get((config.name, version))):
        return derived
    fields = PluginFields(gojson.with_keys(plugin.fields, {"name": config.name, "cniVersion": version, **of_pod}))
    if not of_pod:
        plugin.derived[config.name, version] = fields
    return fields


def plugin_stdin(fields: Mapping[str, Any], prev_result: Mapping[str, Any] | None) -> bytes:
    """Return a plugin's stdin: its configuration, with `prevResult` if there is one."""
    return gojson.dumps(fields if prev_result is None else gojson.with_keys(fields, {"prevResult": prev_result}))


def with_plugin_fields(config: NetworkConfig, extra: Mapping[str, Any], cni_args: Mapping[str, Any]) -> NetworkConfig:
    """Set `extra` keys, and merge `cni_args` into `args.cni`, in each plugin object and in the bytes.

    Raises DecodingFailureError if `args` or `args.cni` is not an object.
    """
    if not extra and not cni_args:
        return config
    fields = gojson.loads_object(config.raw)
    try:
        entries = (gojson.get_list(fields, "plugins") or ()) if config.is_list else (fields,)
        merged = []
        for entry in entries:
            updates = dict(extra)
            if cni_args:
                arguments = gojson.get_object(entry, "args") or {}
                cni = {**(gojson.get_object(arguments, "cni") or {}), **cni_args}
                updates["args"] = gojson.with_keys(arguments, {"cni": cni})
            merged.append(gojson.with_keys(entry, updates))
        fields = gojson.with_keys(fields, {"plugins": merged}) if config.is_list else merged[0]
    except gojson.JsonError as error:
        raise DecodingFailureError(
            f"CNI configuration: {error}", f"network {config.name!r}", origin=Origin.NETWORK
        ) from error
    return replace(parse(gojson.dumps(fields, sort_keys=False)), cni_version=config.cni_version)


# --- the checks of every plugin (containernetworking/cni `pkg/skel`) --------------------------------------------


_reads_own: Final = reads("error unmarshall network config", Origin.NETWORK)


@_reads_own
def configuration(verb: str, stdin: bytes) -> dict[str, Any]:
    """Read a plugin's standard input, and check its name and CNI version for `verb`.

    Raises, in this order: DecodingFailureError and InvalidNetworkConfigError for the name, InvalidEnvironmentError for
    an unknown verb, DecodingFailureError for a malformed cniVersion, IncompatibleVersionError for a verb that the
    version does not have, and for an unsupported version.
    """
    fields = gojson.loads_object(stdin, nullable=True)
    checked(verb, fields)
    return fields


@_reads_own
def checked(verb: str, fields: Mapping[str, Any]) -> tuple[str, str]:
    """Check a decoded configuration as `configuration` does; return its name and its CNI version, a supported one."""
    name = gojson.get_str(fields, "name") or ""
    if problem := network_name_problem(name):
        raise InvalidNetworkConfigError(problem, name)
    if verb not in VERBS:
        raise InvalidEnvironmentError(f"unknown CNI_COMMAND: {verb}")
    try:
        version = gojson.get_str(fields, "cniVersion") or versions.IMPLIED
        # For other verbs a malformed version is an unsupported one.
        if verb in versions.FIRST_WITH and not versions.allows(version, verb):
            raise IncompatibleVersionError(f"config version does not allow {verb}")
    except ValueError as error:
        raise DecodingFailureError(
            f"error decoding version from network config: {error}", origin=Origin.NETWORK
        ) from error
    require_supported(version)
    return name, version


def require_supported(version: str) -> None:
    """Raises IncompatibleVersionError unless `version` is one of `versions.SUPPORTED`."""
    if not versions.is_supported(version):
        supported = " ".join(f'"{known}"' for known in versions.SUPPORTED)
        raise IncompatibleVersionError(
            "incompatible CNI versions", f'config is "{version}", plugin supports [{supported}]'
        )
