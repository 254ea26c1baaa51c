"""The daemon's settings, read from `daemon-config.json` and the command line.

The file has upstream's format (`multus-daemon` v4.3): one flat JSON object. Reading is strict and reports all errors at
once, each with its key. Keys without effect cause a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from multus_daemon.runtime import fs, jsontext
from multus_daemon.settings.keys import (
    AUTO,
    GROUPS,
    LOG_OPTIONS,
    REMOVED_VALUES,
    WITHOUT_EFFECT,
    KubernetesSettings,
    MetricsSettings,
    MetricsTls,
    PerNodeCertificate,
    Settings,
    known_keys,
)

__all__ = [
    "AUTO",
    "KubernetesSettings",
    "MetricsSettings",
    "MetricsTls",
    "PerNodeCertificate",
    "Settings",
    "known_keys",
]

DEFAULT_CONFIG_PATH = "/etc/cni/net.d/multus.d/daemon-config.json"
CONFIG_MAX_BYTES = 1024 * 1024
_UID_MAP = Path("/proc/self/uid_map")
Flags = Mapping[str, tuple[str, Any]]
"""Settings of the command line: key -> the flag as the user wrote it, for errors, and the value as in JSON."""


class SettingsError(ValueError):
    """The configuration is invalid; `problems` has one line for each error, the key first."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.source = source
        self.problems = problems


def runtime_directory(environ: Mapping[str, str] = os.environ, uid_map: Path = _UID_MAP) -> Path | None:
    """Return the user's directory for sockets and the like (XDG Base Directory Specification).

    None for root, and for users without one.

    Root of a user namespace is an ordinary user without access to /run (user_namespaces(7)).
    """
    directory = environ.get("XDG_RUNTIME_DIR", "")
    if _outer_uid(uid_map) == 0 or not directory.startswith("/"):
        return None
    return Path(directory)


def _outer_uid(uid_map: Path) -> int:
    uid = os.geteuid()
    try:
        lines = uid_map.read_text().splitlines()
    except OSError:
        return uid
    for line in lines:
        inside, outside, count = map(int, line.split())
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid


def in_directory(given: Settings, directory: Path | None) -> Settings:
    """Move the defaults below /run and /var into `directory`, for a user other than root; None changes nothing."""
    if directory is None:
        return given
    socket, paths = given.socket, given.paths
    if "socketDir" not in given.given:
        socket = replace(socket, directory=str(directory / "multus"))
    if "cniDir" not in given.given:
        paths = replace(paths, cni_dir=str(directory / "multus" / "cni"))
    return replace(given, socket=socket, paths=paths)


def for_standalone(given: Settings) -> Settings:
    """Keep the metrics port on the machine, unless an address is set: no manifest names the node's.

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
        raise SettingsError(source, [f"not JSON: {jsontext.fault(data, error)}"]) from error
    if not isinstance(decoded, dict):
        raise SettingsError(source, ["a JSON object is needed"])
    # Readers differ in which one they use. Keys match in any case.
    if repeated := jsontext.repeated_keys(data, same=str.lower):
        raise SettingsError(source, [f"{key}: is there more than once" for key in repeated])
    return from_object(decoded, source, flags)


def from_object(given: Mapping[str, Any], source: str, flags: Flags | None = None) -> Settings:
    """Read settings from a decoded object; `flags` override them. Keys match in any case. Raises SettingsError."""
    spelling = {key.lower(): key for key in known_keys()}
    values: dict[str, Any] = {}
    problems: list[str] = []
    warnings: list[str] = []
    for key, value in given.items():
        known = spelling.get(key.lower())
        if known is None:
            problems.append(_unknown(key, spelling))
        elif known in WITHOUT_EFFECT:
            warnings.append(f"{known}: no effect: {WITHOUT_EFFECT[known]}")
        elif value is not None:
            values[known] = value
    names = {key: flag for key, (flag, _) in (flags or {}).items()}
    values |= {key: value for key, (_, value) in (flags or {}).items()}
    for (key, value), instead in REMOVED_VALUES.items():
        if values.get(key) == value:
            values[key] = instead
            warnings.append(f"{key}: {value} is removed, {instead} is used: set {key} to {instead}")
    if isinstance(values.get("logLevel"), str):
        values["logLevel"] = values["logLevel"].lower()
    if isinstance(options := values.get("logOptions"), dict):
        values["logOptions"] = _read_log_options(options, problems)
    groups = {group: _read_group(kind, values, names, problems) for group, kind in GROUPS.items()}
    if problems:
        raise SettingsError(source, problems)
    primary = groups["primary"]
    if values.get("multusConfigFile") == AUTO and not primary.autoconfig_dir:
        # The flags of the first thick release name the file and no directory.
        groups["primary"] = replace(primary, autoconfig_dir=primary.config_dir)
    return replace(Settings(**groups), given=values, warnings=tuple(warnings))


def _unknown(key: str, spelling: Mapping[str, str], prefix: str = "") -> str:
    import difflib  # 0.1 MB, only for misspelt keys

    near = difflib.get_close_matches(key.lower(), spelling, n=1)
    return f"{prefix}{key}: unknown key" + (f", is {spelling[near[0]]} meant?" if near else "")


def _read_log_options(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    spelling = {key.lower(): key for key in LOG_OPTIONS}
    options: dict[str, Any] = {}
    for key, value in given.items():
        known = spelling.get(key.lower())
        if known is None:
            problems.append(_unknown(key, spelling, "logOptions."))
        elif value is not None:
            try:
                options[known] = msgspec.convert(value, LOG_OPTIONS[known])
            except msgspec.ValidationError as error:
                problems.append(f"logOptions.{known}: {error}")
    return options


def _read_group(kind: type[Any], values: Mapping[str, Any], names: Mapping[str, str], problems: list[str]) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    arguments: dict[str, Any] = {}
    for item in fields(kind):
        key, hint = item.metadata["key"], hints[item.name]
        if key in values:
            try:
                arguments[item.name] = msgspec.convert(values[key], hint)
            except msgspec.ValidationError as error:
                problems.append(f"{names.get(key, key)}: {error}{_choices(error, hint)}")
    try:
        return kind(**arguments)
    except ValueError as error:
        # From `__post_init__`.
        problems.append(str(error))
        return kind()


def _choices(error: msgspec.ValidationError, hint: Any) -> str:
    """Return the valid values for an enumerated type, which the library's error lacks; else an empty string."""
    literal = next((option for option in (hint, *get_args(hint)) if get_origin(option) is Literal), None)
    # The library has one exception for all faults, without a code.
    return f"; known: {', '.join(get_args(literal))}" if literal and str(error).startswith("Invalid enum value") else ""
