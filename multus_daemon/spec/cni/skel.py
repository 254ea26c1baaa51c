"""What every plugin checks before it works: its variables, its configuration, their versions, in a fixed order.

Order, words and codes are those of containernetworking/cni `pkg/skel`, because conformance tests look at which error
comes first. CNI SPEC section 2 "Parameters"; there CNI_PATH may be absent, the Go library wants it, so do we.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.spec.cni import gojson, versions
from multus_daemon.spec.cni.errors import (
    CniError,
    DecodingFailureError,
    IncompatibleVersionError,
    InvalidEnvironmentError,
    InvalidNetworkConfigError,
)
from multus_daemon.spec.cni.names import IFNAME_MAX_BYTES, container_id_problem, ifname_problem, network_name_problem

VERBS: Final = ("ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION")


@dataclass(frozen=True, slots=True)
class Environment:
    """The variables of one call, checked. Empty where a verb does not need them and nobody set them."""

    verb: str
    """One of VERBS, or unknown: `configuration` refuses those, after the name, as the Go library does."""
    container_id: str
    netns: str
    ifname: str
    args: str
    path: str
    netns_override: bool
    """The caller says that CNI_NETNS may be the plugin's own network namespace."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The part of a configuration that every plugin reads, and the whole object beside it."""

    fields: Mapping[str, Any]
    name: str
    cni_version: str
    """One of versions.SUPPORTED."""


def _container_id(value: str) -> CniError | None:
    problem = container_id_problem(value)
    return InvalidEnvironmentError(problem, value) if problem else None


def _ifname(value: str) -> CniError | None:
    problem = ifname_problem(value)
    if not problem:
        return None
    too_long = len(value.encode("utf-8", "surrogatepass")) > IFNAME_MAX_BYTES
    return InvalidEnvironmentError(
        problem, f"interface name should be less than {IFNAME_MAX_BYTES + 1} characters" if too_long else ""
    )


@dataclass(frozen=True, slots=True)
class _Variable:
    """One row of the table: which verbs need the variable, and what makes a value bad."""

    name: str
    needed_by: frozenset[str]
    error_of: Callable[[str], CniError | None] = lambda _: None


_CONTAINER_VERBS: Final = frozenset({"ADD", "DEL", "CHECK"})
_VARIABLES: Final = (
    # "" is the verb of a call without CNI_COMMAND.
    _Variable("CNI_COMMAND", frozenset({""})),
    _Variable("CNI_CONTAINERID", _CONTAINER_VERBS, _container_id),
    _Variable("CNI_NETNS", frozenset({"ADD", "CHECK"})),
    _Variable("CNI_IFNAME", _CONTAINER_VERBS, _ifname),
    _Variable("CNI_PATH", _CONTAINER_VERBS | {"STATUS", "GC"}),
)


def environment(environ: Mapping[str, str]) -> Environment:
    """The call that `environ` describes.

    A bad value ends the walk at once, missing ones are collected into one error. Only what the verb needs is looked
    at. Raises InvalidEnvironmentError.
    """
    verb = environ.get("CNI_COMMAND", "")
    missing = []
    for variable in _VARIABLES:
        if verb not in variable.needed_by:
            continue
        value = environ.get(variable.name, "")
        if not value:
            missing.append(variable.name)
        elif error := variable.error_of(value):
            raise error
    if missing:
        raise InvalidEnvironmentError(f"required env variables [{','.join(missing)}] missing")
    return Environment(
        verb=verb,
        container_id=environ.get("CNI_CONTAINERID", ""),
        netns=environ.get("CNI_NETNS", ""),
        ifname=environ.get("CNI_IFNAME", ""),
        args=environ.get("CNI_ARGS", ""),
        path=environ.get("CNI_PATH", ""),
        netns_override=netns_override(environ),
    )


def netns_override(environ: Mapping[str, str]) -> bool:
    """True where CNI_NETNS_OVERRIDE says that CNI_NETNS may be the network namespace that the plugin is in."""
    return environ.get("CNI_NETNS_OVERRIDE", "").upper() in ("1", "TRUE")


def configuration(verb: str, stdin: bytes) -> Configuration:
    """The configuration on standard input, checked as far as `verb` needs it.

    Raises, in this order: DecodingFailureError and InvalidNetworkConfigError for the name, InvalidEnvironmentError
    for an unknown verb, DecodingFailureError for a cniVersion that is none, IncompatibleVersionError for a verb that
    its version does not have, and for a version that nobody supports.
    """
    try:
        value = gojson.loads(stdin)
        # Go reads null into a struct as an empty one.
        fields: Any = {} if value is None else value
        if not isinstance(fields, dict):
            raise gojson.JsonError(f"a JSON object is needed, not {gojson.kind_of(fields)}")
    except gojson.JsonError as error:
        raise DecodingFailureError(f"error unmarshall network config: {error}") from error
    return checked(verb, fields)


def checked(verb: str, fields: Mapping[str, Any]) -> Configuration:
    """As `configuration`, of what has been read."""
    try:
        name = gojson.get_str(fields, "name") or ""
    except gojson.JsonError as error:
        raise DecodingFailureError(f"error unmarshall network config: {error}") from error
    if problem := network_name_problem(name):
        raise InvalidNetworkConfigError(problem, name)
    if verb not in VERBS:
        raise InvalidEnvironmentError(f"unknown CNI_COMMAND: {verb}")
    return Configuration(fields, name, _version(verb, fields))


def _version(verb: str, fields: Mapping[str, Any]) -> str:
    try:
        version = gojson.get_str(fields, "cniVersion") or versions.IMPLIED
        # Other verbs see a malformed version as one that nobody supports.
        if verb in versions.FIRST_WITH and not versions.allows(version, verb):
            raise IncompatibleVersionError(f"config version does not allow {verb}")
    except ValueError as error:
        raise DecodingFailureError(f"error decoding version from network config: {error}") from error
    require_supported(version)
    return version


def require_supported(version: str) -> None:
    """Raises IncompatibleVersionError unless `version` is one of `versions.SUPPORTED`."""
    if not versions.is_supported(version):
        supported = " ".join(f'"{known}"' for known in versions.SUPPORTED)
        raise IncompatibleVersionError(
            "incompatible CNI versions", f'config is "{version}", plugin supports [{supported}]'
        )


def version_stdout() -> bytes:
    """What the verb VERSION prints: one compact line, whatever version the caller speaks (CNI SPEC section 2)."""
    fields = {"cniVersion": versions.CURRENT, "supportedVersions": list(versions.SUPPORTED)}
    return gojson.dumps(fields, sort_keys=False) + b"\n"
