"""The daemon's settings, read from `daemon-config.json` and the command line.

The file has upstream's format (`multus-daemon` v4.3): one flat JSON object. Reading is strict and reports all errors at
once, each with its key. Keys without effect cause a warning.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from multus_daemon.runtime import fs, jsontext
from multus_daemon.settings import keys
from multus_daemon.settings.keys import AUTO, GROUPS, LogOptions, Settings

__all__ = ["Settings"]

DEFAULT_CONFIG_PATH = "/etc/cni/net.d/multus.d/daemon-config.json"
CONFIG_MAX_BYTES = 1024 * 1024
_EXPECTED: Final = re.compile(r"Expected `([^`]*)`((?: of length)?(?: [<>]=? [0-9.]+)?)")
_GOT: Final = re.compile(r", got `([^`]*)`")
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}
# Keys of upstream's daemon, and of earlier releases, without effect. They are accepted, so that a configuration map can
# be reused, and the log at start names each one with the reason.
WITHOUT_EFFECT: Final = {
    "enablePprof": "Go's profiler; there is none here",
    "name": "the generated configuration has upstream's name, or the primary network's",
    "retryDeleteOnError": "always retried; see deleteTries",
    **dict.fromkeys(("allowTryDeleteOnErr", "defaultnetworkfile", "defaultnetworkwaitseconds"), "no program reads it"),
    "attachConcurrency": "removed: always 4",
    "claimConfiguration": "removed: CNI configurations in ResourceClaims are not read",
    "daemonWaitSeconds": "removed: always 60",
    "maxPortMappings": "removed: always 128",
    "maxRequestedAddresses": "removed: always 256",
    "nodeName": "removed: set the variable `MULTUS_NODE_NAME`",
    "pluginGomaxprocs": "removed: always 2",
}
REMOVED_VALUES: Final = {
    ("attachmentMetrics", "pods"): "networks",
    ("logFormat", "logfmt"): "text",
}
"""Values of earlier releases, with the value that replaces each one. A line in the log at start names those that are
set."""
Flags = Mapping[str, tuple[str, Any]]
"""Settings of the command line: key -> the flag as the user wrote it, for errors, and the value as in JSON."""


class SettingsError(ValueError):
    """The configuration is invalid; `problems` has one line for each error, the key first."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.source = source
        self.problems = problems


def runtime_directory(environ: Mapping[str, str] = os.environ, of_root: str = "/run") -> Path | None:
    """Return `XDG_RUNTIME_DIR` of a user who can't write to root's `/run`, for sockets and the like; else None.

    Root of a user namespace is such a user. None also if the variable is not set.
    """
    directory = environ.get("XDG_RUNTIME_DIR", "")
    return Path(directory) if directory.startswith("/") and not os.access(of_root, os.W_OK) else None


def in_directory(given: Settings, directory: Path | None) -> Settings:
    """Move default paths below /run and /var into `directory`, for a user other than root; None: change nothing."""
    if directory is None:
        return given
    socket, paths = given.socket, given.paths
    if "socketDir" not in given.given:
        socket = replace(socket, directory=str(directory / "multus"))
    if "cniDir" not in given.given:
        paths = replace(paths, cni_dir=str(directory / "multus" / "cni"))
    return replace(given, socket=socket, paths=paths)


def for_standalone(given: Settings) -> Settings:
    """Bind the metrics port to 127.0.0.1, unless an address is set: no manifest tells the node's addresses.

    Raises SettingsError for a setting that needs a cluster.
    """
    if given.metrics.authorization:
        raise SettingsError("--standalone", ["metricsAuthorization: needs an API server, which reviews the tokens"])
    return replace(given, metrics=replace(given.metrics, address=given.metrics.address or "127.0.0.1"))


def load(path: Path, flags: Flags | None = None) -> Settings:
    """Read settings from the file at `path`; `flags` override them. Raises SettingsError."""
    try:
        data = fs.read_limited(path, limit=CONFIG_MAX_BYTES)
    except OSError as error:
        raise SettingsError(str(path), [f"can't be read: {error.strerror or error}"]) from error
    return parse(data, str(path), flags)


def parse(data: bytes, source: str, flags: Flags | None = None) -> Settings:
    """Read settings from the bytes of a file; `source` names it in errors. Raises SettingsError."""
    try:
        decoded = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise SettingsError(source, [jsontext.fault(data, error)]) from error
    if not isinstance(decoded, dict):
        raise SettingsError(source, ["a JSON object is needed"])
    # Readers differ in which one they use. Keys match in any case.
    if repeated := jsontext.repeated_keys(data, same=str.lower):
        raise SettingsError(source, [f"{key}: is set more than once" for key in repeated])
    return from_object(decoded, source, flags)


def from_object(given: Mapping[str, Any], source: str, flags: Flags | None = None) -> Settings:
    """Read settings from a decoded object; `flags` override them. Keys match in any case. Raises SettingsError."""
    problems: list[str] = []
    values = _known(given, known_keys(), problems)
    warnings = [f"{key}: no effect: {reason}" for key in values if (reason := WITHOUT_EFFECT.get(key))]
    values = {key: value for key, value in values.items() if key not in WITHOUT_EFFECT and value is not None}
    names = {key: flag for key, (flag, _) in (flags or {}).items()}
    values |= {key: value for key, (_, value) in (flags or {}).items()}
    for (key, value), instead in REMOVED_VALUES.items():
        if values.get(key) == value:
            values[key] = instead
            warnings.append(f"{key}: {value} is removed, {instead} is used: set {key} to {instead}")
    if isinstance(values.get("logLevel"), str):
        values["logLevel"] = values["logLevel"].lower()
    if isinstance(options := values.get("logOptions"), dict):
        known = _known(options, LogOptions.__struct_encode_fields__, problems, "logOptions.")
        values["logOptions"] = {key: value for key, value in known.items() if value is not None}
    groups = {group: _read_group(kind, values, names, problems) for group, kind in GROUPS.items()}
    if problems:
        raise SettingsError(source, problems)
    primary = groups["primary"]
    if values.get("multusConfigFile") == AUTO and not primary.autoconfig_dir:
        # The flags of the first thick release name the file and no directory.
        groups["primary"] = replace(primary, autoconfig_dir=primary.config_dir)
    return replace(Settings(**groups), given=values, warnings=tuple(warnings))


def known_keys() -> frozenset[str]:
    """Return all keys that a configuration may have."""
    own = {item.metadata["key"] for kind in GROUPS.values() for item in fields(kind)}
    return frozenset(own | WITHOUT_EFFECT.keys())


def _known(given: Mapping[str, Any], keys: Iterable[str], problems: list[str], prefix: str = "") -> dict[str, Any]:
    """Return the values of the known keys, under the spelling in `keys`; add each other key to `problems`."""
    spelling = {key.lower(): key for key in keys}
    for key in given:
        if key.lower() not in spelling:
            import difflib  # 0.1 MB, only for misspelt keys

            near = difflib.get_close_matches(key.lower(), spelling, n=1)
            hint = f", is {spelling[near[0]]} meant?" if near else ""
            problems.append(f"{prefix}{key}: unknown key{hint}")
    return {spelling[key.lower()]: value for key, value in given.items() if key.lower() in spelling}


def _read_group(kind: type[Any], values: Mapping[str, Any], names: Mapping[str, str], problems: list[str]) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    arguments: dict[str, Any] = {}
    for item in fields(kind):
        key, hint = item.metadata["key"], hints[item.name]
        if key in values:
            try:
                arguments[item.name] = msgspec.convert(values[key], hint)
            except msgspec.ValidationError as error:
                # The library's place in the value is a JSONPath: `$.maxSize`, `$[1]`.
                message, _, place = str(error).partition(" - at `$")
                problems.append(f"{names.get(key, key)}{place[:-1]}: {_said(message, hint)}")
    try:
        return kind(**arguments)
    except ValueError as error:
        # From `__post_init__`.
        problems.append(str(error))
        return kind()


def _said(message: str, hint: Any) -> str:
    """Translate msgspec's message from Python's types to JSON's, and add the valid values of an enumerated type."""
    text = _EXPECTED.sub(lambda found: f"{_kinds(found[1])}{found[2]} is needed", message)
    text = _GOT.sub(lambda found: f", not {_kinds(found[1])}", text)
    literal = next((option for option in (hint, *get_args(hint)) if get_origin(option) is Literal), None)
    # The library has one exception for all faults, without a code.
    return f"{text}; known: {', '.join(get_args(literal))}" if literal and text.startswith("Invalid enum") else text


def _kinds(names: str) -> str:
    return " or ".join(_KINDS.get(name, name) for name in names.split(" | "))


# --- the command line ------------------------------------------------------------------------------------------------

FLAGS: Final = MappingProxyType(
    {
        # Upstream's first thick release.
        "additional-bin-dir": "binDir",
        "binDir": "binDir",
        "cni-config-dir": "cniConfigDir",
        "cni-version": "cniVersion",
        "cniDir": "cniDir",
        "force-cni-version": "forceCNIVersion",
        "global-namespaces": "globalNamespaces",
        "multus-autoconfig-dir": "multusAutoconfigDir",
        "multus-conf-file": "multusConfigFile",
        "multus-kubeconfig-file-host": "kubeconfig",
        "multus-log-file": "logFile",
        "multus-log-level": "logLevel",
        "multus-log-to-stderr": "logToStderr",
        "multus-master-cni-file": "multusMasterCNI",
        "multus-rundir": "socketDir",
        "namespace-isolation": "namespaceIsolation",
        "override-network-name": "overrideNetworkName",
        "readiness-indicator-file": "readinessindicatorfile",
        # Ours, which the manifests and the documentation use.
        "chroot-dir": "chrootDir",
        "cni-dir": "cniDir",
        "conf-dir": "confDir",
        "kubeconfig": "kubeconfig",
        "log-level": "logLevel",
        "metrics-authorization": "metricsAuthorization",
        "metrics-port": "metricsPort",
        "metrics-tls": "metricsTLS",
        "per-node-certificate": "perNodeCertificate",
        "socket-dir": "socketDir",
        "startup-taint": "startupTaint",
    }
)
"""Flags of settings: the flag, without dashes -> the key."""
_BOOLEANS: Final = frozenset(
    {"forceCNIVersion", "logToStderr", "metricsAuthorization", "namespaceIsolation", "overrideNetworkName"}
)
_JSON: Final = frozenset({"metricsPort", "metricsTLS", "perNodeCertificate"})
_GO_BOOLEANS: Final = MappingProxyType(
    {
        **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
        **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
    }
)


def add_flags(group: argparse._ArgumentGroup, keys: frozenset[str]) -> None:
    """Add the flags of these settings. The parsed namespace lists the given ones in `flags`, as items of `Flags`."""
    for flag, key in FLAGS.items():
        if key in keys:
            kind = "BOOL" if key in _BOOLEANS else "JSON" if key in _JSON else "TEXT"
            optional: dict[str, Any] = {"nargs": "?", "const": "true"} if kind == "BOOL" else {}
            read = functools.partial(_given, flag, key)
            group.add_argument(
                f"--{flag}", action="append", dest="flags", type=read, metavar=kind, help=key, **optional
            )


class FlagsFormatter(argparse.HelpFormatter):
    """Explains each flag of a setting by the first sentence of the key's documentation, which is in the source."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.dest != "flags":
            return action.help
        found = re.search(rf'_key\(\s*"{action.help}".*?"""(.*?\.)(?:\s|""")', inspect.getsource(keys), re.DOTALL)
        text = re.sub(r"\[(.*?)\]\(.*?\)|`", r"\1", found[1]) if found else ""
        return f"{' '.join(text.split())} (the key {action.help})"


def _given(flag: str, key: str, text: str) -> tuple[str, tuple[str, Any]]:
    """Return the flag with `text` as JSON has it. A malformed value stays text: `_read_group` refuses it."""
    value: Any = text
    if key in _BOOLEANS:
        value = _GO_BOOLEANS.get(text, text)
    if key in _JSON:
        with contextlib.suppress(ValueError, RecursionError):
            value = msgspec.json.decode(text)
    return key, (f"--{flag}", value)
