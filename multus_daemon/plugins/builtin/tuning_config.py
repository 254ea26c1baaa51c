"""The configuration of `tuning`, the backup file of an ADD, and the node's allowlist of sysctls.

Keys, files and messages are those of the reference plugin (containernetworking/plugins `plugins/meta/tuning`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.runtime import fs
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError, IoFailureError, Origin

DEFAULT_DATA_DIR: Final = "/run/cni/tuning"
_PLACEHOLDER: Final = "IFNAME"
_NETWORK: Final = "net"
_KEY_MAX: Final = 256
ALLOWLIST: Final = "/etc/cni/tuning/allowlist.conf"
_ALLOWLIST_LIMIT: Final = 1024 * 1024
# Named classes of RE2, which Python lacks.
_CLASSES: Final[Mapping[str, str]] = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": r"\x00-\x7f",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}


@dataclass(frozen=True, slots=True)
class Sysctl:
    """A sysctl with its wanted value."""

    key: str
    """The key in the configuration, to which the allowlist is applied."""
    parts: tuple[str, ...]
    """The path below /proc/sys/net."""
    value: str


class Attributes(
    Struct, frozen=True, omit_defaults=True, rename={"promiscuous": "promisc", "tx_queue_length": "txQLen"}
):
    """Attributes of an interface; empty, 0 and None mean unset."""

    mac: str = ""
    promiscuous: bool | None = None
    mtu: int = 0
    """MTU in bytes."""
    allmulti: bool | None = None
    tx_queue_length: int | None = None
    """Length of the transmit queue in packets."""


@dataclass(frozen=True, slots=True)
class TuningConfig:
    """A checked configuration of tuning."""

    sysctls: tuple[Sysctl, ...]
    attributes: Attributes
    """The attributes to set; `promiscuous` is True or None."""
    data_dir: str
    """Directory of backup files, as a path of the host."""


def read(call: Call) -> TuningConfig:
    """Read the configuration. Precedence: `args.cni`, runtimeConfig, CNI_ARGS, its own keys; sysctls are merged.

    Raises DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7).
    """
    if call.invocation.raw is not None:
        _refuse_repeated(call.invocation.raw)
    fields = call.fields
    with contract.reading(call.name):
        _, given = contract.requests(fields)
        # An empty address in args overrides the others.
        mac = _first(gojson.get_str(given, "mac"), contract.requested_mac(call))
        promiscuous = _first(gojson.get_bool(given, "promisc"), gojson.get_bool(fields, "promisc"))
        values = _values(fields) | _values(given)
        return TuningConfig(
            sysctls=tuple([_sysctl(key, value, call.invocation.ifname) for key, value in values.items()]),
            attributes=Attributes(
                mac=contract.mac_address(mac),
                promiscuous=promiscuous or None,
                mtu=_first(_number(given, "mtu"), _number(fields, "mtu")) or 0,
                allmulti=_first(gojson.get_bool(given, "allmulti"), gojson.get_bool(fields, "allmulti")),
                tx_queue_length=_first(_number(given, "txQLen"), _number(fields, "txQLen")),
            ),
            data_dir=data_dir(call),
        )


def data_dir(call: Call) -> str:
    """Return the directory of the backups. Raises CniError."""
    with contract.reading(call.name):
        return contract.path(call.fields, "dataDir") or DEFAULT_DATA_DIR


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _number(fields: Mapping[str, Any], key: str) -> int | None:
    value = gojson.get_int(fields, key)
    if value is not None and not 0 <= value <= contract.SIGNED_MAX:
        raise InvalidNetworkConfigError(f"invalid {key} {value}, must be between 0 and {contract.SIGNED_MAX}")
    return value


def _values(fields: Mapping[str, Any]) -> dict[str, str]:
    values = gojson.get_object(fields, "sysctl") or {}
    for key, value in values.items():
        if not isinstance(value, str | None):
            raise gojson.JsonError(f"sysctl: {key}: a string is needed, not {gojson.kind_of(value)}")
    return {key: value or "" for key, value in values.items()}


def _sysctl(key: str, value: str, ifname: str) -> Sysctl:
    # The interface's name is inserted after the dots have been replaced, because it may contain dots.
    path = key.replace(".", "/").replace(_PLACEHOLDER, ifname, 1)
    first, *parts = [part for part in path.split("/") if part] or [""]
    if first != _NETWORK or not parts or len(key) > _KEY_MAX or "\0" in key or "\n" in key:
        raise InvalidNetworkConfigError(
            f"invalid net sysctl key: {contract.shown(path)}", "sysctls of the network subsystem only: net.…"
        )
    # The kernel would read it up to the NUL.
    if not value.isascii() or "\0" in value:
        raise InvalidNetworkConfigError(f"invalid value of sysctl {key}: {contract.shown(value)}")
    return Sysctl(key, tuple(parts), value)


def _refuse_repeated(stdin: bytes) -> None:
    """Raise InvalidNetworkConfigError for a sysctl with two values. `stdin` has been read before, so it is JSON."""
    # An object is read as the tuple of its pairs, an array as a list.
    for key, value in json.loads(stdin, object_pairs_hook=tuple):
        if key.lower() == "sysctl" and isinstance(value, tuple) and len(dict(value)) < len(value):
            raise InvalidNetworkConfigError("duplicated sysctl keys are not allowed")


# --- the backup: JSON with the previous values of changed attributes, indented by one space, as the reference plugin's


def encode(attributes: Attributes) -> bytes:
    """Return the content of a backup."""
    return msgspec.json.format(msgspec.json.encode(attributes), indent=1)


def decode(content: bytes) -> Attributes:
    """Read the content of a backup. Raises JsonError, InvalidNetworkConfigError."""
    fields = gojson.loads_object(content)
    return Attributes(
        mac=contract.mac_address(gojson.get_str(fields, "mac")),
        promiscuous=gojson.get_bool(fields, "promisc"),
        mtu=_number(fields, "mtu") or 0,
        allmulti=gojson.get_bool(fields, "allmulti"),
        tx_queue_length=_number(fields, "txQLen"),
    )


# --- the allowlist: a regular expression per line --------------------------------------------------------------------

# The expressions are Go's (RE2 syntax) and match anywhere in the key. One that can't be translated is an error.


def require_allowed(keys: Iterable[str], path: Path) -> None:
    """Raise InvalidNetworkConfigError for a key that the file at `path` does not allow, IoFailureError if unreadable.

    Without the file every key is allowed. Blocks.
    """
    try:
        text = fs.read_limited(path, limit=_ALLOWLIST_LIMIT).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return
    except OSError as error:
        raise IoFailureError(f"open {path}: {error.strerror}", "the allowlist of sysctls") from error
    patterns = [line.strip() for line in text.split("\n") if line.strip()]
    for key in keys:
        if not is_allowed(key, patterns):
            raise InvalidNetworkConfigError(
                f"Sysctl {key} is not allowed. Only the following sysctls are allowed: [{' '.join(patterns)}]",
                f"see the node's {ALLOWLIST}",
            )


def is_allowed(key: str, patterns: Sequence[str]) -> bool:
    """Return True if a regular expression matches in the key. Raises InvalidNetworkConfigError for a malformed one."""
    for pattern in patterns:
        named = pattern
        for name, characters in _CLASSES.items():
            named = named.replace(f"[:{name}:]", characters)
        try:
            if "[:" in named or r"\Z" in named:
                raise re.error("unknown to RE2, or a negated class")
            # Python's `$` also matches before a newline at the end, which no key has.
            if re.search(named.replace(r"\z", "$"), key, re.ASCII):
                return True
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidNetworkConfigError(
                f"error parsing regexp: {error}: `{pattern}`", f"a line of the node's {ALLOWLIST}", origin=Origin.NODE
            ) from error
    return False
