"""The checks of every plugin before its work: variables, configuration and versions (CNI SPEC section 2 "Parameters").

Order, words and codes are those of containernetworking/cni `pkg/skel`, as conformance tests check which error comes
first. The Go library requires CNI_PATH, which is optional in the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from multus_daemon.spec.cni import gojson, versions
from multus_daemon.spec.cni.errors import InvalidEnvironmentError
from multus_daemon.spec.cni.names import IFNAME_MAX_BYTES, container_id_problem, ifname_problem


@dataclass(frozen=True, slots=True)
class Environment:
    """The checked variables of one call. Variables that the verb does not need may be empty."""

    verb: str
    """One of `conf.VERBS`, or unknown: `conf.configuration` refuses these, after the name, as the Go library does."""
    container_id: str
    netns: str
    ifname: str
    args: str
    path: str
    netns_override: bool
    """True if CNI_NETNS may be the plugin's own network namespace."""


_CONTAINER_VERBS: Final = frozenset({"ADD", "DEL", "CHECK"})
# Variable, verbs that need it, and the check of its value. "" is the verb of a call without CNI_COMMAND.
_VARIABLES: Final[tuple[tuple[str, frozenset[str], Callable[[str], str] | None], ...]] = (
    ("CNI_COMMAND", frozenset({""}), None),
    ("CNI_CONTAINERID", _CONTAINER_VERBS, container_id_problem),
    ("CNI_NETNS", frozenset({"ADD", "CHECK"}), None),
    ("CNI_IFNAME", _CONTAINER_VERBS, ifname_problem),
    ("CNI_PATH", _CONTAINER_VERBS | {"STATUS", "GC"}, None),
)


def environment(environ: Mapping[str, str]) -> Environment:
    """Read the variables that the verb needs. Raises InvalidEnvironmentError.

    The first bad value is an error at once; missing variables are collected into one error.
    """
    verb = environ.get("CNI_COMMAND", "")
    missing = []
    for name, needed_by, problem_of in _VARIABLES:
        if verb not in needed_by:
            continue
        value = environ.get(name, "")
        if not value:
            missing.append(name)
        elif problem_of and (problem := problem_of(value)):
            raise InvalidEnvironmentError(problem, _details(name, value))
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


def _details(name: str, value: str) -> str:
    if name == "CNI_CONTAINERID":
        return value
    too_long = len(value.encode("utf-8", "surrogatepass")) > IFNAME_MAX_BYTES
    return f"interface name should be less than {IFNAME_MAX_BYTES + 1} characters" if too_long else ""


def netns_override(environ: Mapping[str, str]) -> bool:
    """Return True if CNI_NETNS_OVERRIDE allows CNI_NETNS to be the plugin's own network namespace."""
    return environ.get("CNI_NETNS_OVERRIDE", "").upper() in ("1", "TRUE")


def version_stdout() -> bytes:
    """Return the output of the verb VERSION: one line of JSON, whatever version is asked for (CNI SPEC section 2)."""
    fields = {"cniVersion": versions.CURRENT, "supportedVersions": list(versions.SUPPORTED)}
    return gojson.dumps(fields, sort_keys=False) + b"\n"
