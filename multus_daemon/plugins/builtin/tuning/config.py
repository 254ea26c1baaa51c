"""The configuration of tuning, checked; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.plugins.builtin import configuration
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import DecodingFailureError, InvalidNetworkConfigError

DEFAULT_DATA_DIR: Final = "/run/cni/tuning"
_KEYS: Final = ("sysctl", "mac", "promisc", "mtu", "allmulti", "txQLen", "dataDir")
_PLACEHOLDER: Final = "IFNAME"
_NETWORK: Final = "net"
_KEY_MAX: Final = 256
_NUMBER_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Sysctl:
    """One value to be set."""

    key: str
    """As written, which is what the allowlist is asked about."""
    parts: tuple[str, ...]
    """Of the path below /proc/sys/net."""
    value: str


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes of an interface; empty, 0 and None: not said."""

    mac: str = ""
    promiscuous: bool | None = None
    mtu: int = 0
    """In bytes."""
    allmulti: bool | None = None
    tx_queue_length: int | None = None
    """In packets."""


@dataclass(frozen=True, slots=True)
class TuningConfig:
    """One configuration."""

    sysctls: tuple[Sysctl, ...]
    attributes: Attributes
    """`promiscuous` is True or None."""
    data_dir: str
    """As the host sees it."""


def unsupported(call: Call) -> str:
    """What the configuration asks for that is not known here; empty: nothing."""
    return configuration.unknown_key(call.fields, configuration.COMMON_KEYS.union(_KEYS))


def data_dir(call: Call) -> str:
    """Where the backups are, as the host sees it. Raises DecodingFailureError."""
    try:
        return gojson.get_str(call.fields, "dataDir") or DEFAULT_DATA_DIR
    except gojson.JsonError as error:
        raise _unreadable(call, error) from error


def read(call: Call) -> TuningConfig:
    """Args before runtimeConfig before CNI_ARGS before the configuration's own keys; sysctls of args are added.

    Raises DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7).
    """
    if call.invocation.raw is not None:
        _refuse_repeated(call.invocation.raw)
    try:
        return _read(call)
    except gojson.JsonError as error:
        raise _unreadable(call, error) from error


def _unreadable(call: Call, error: gojson.JsonError) -> DecodingFailureError:
    return DecodingFailureError(f"failed to load netconf: {error}", f"network {call.name!r}")


def _read(call: Call) -> TuningConfig:
    fields = call.fields
    by_args = configuration.own_args(call.invocation.args, ("MAC",)).get("MAC")
    runtime = gojson.get_object(fields, "runtimeConfig") or {}
    given = gojson.get_object(gojson.get_object(fields, "args") or {}, "cni") or {}
    own_mac = gojson.get_str(runtime, "mac") or by_args or gojson.get_str(fields, "mac") or ""
    # An empty address in args takes the others back.
    mac = _first(gojson.get_str(given, "mac"), own_mac)
    promiscuous = _first(gojson.get_bool(given, "promisc"), gojson.get_bool(fields, "promisc"))
    values = _values(fields) | _values(given)
    return TuningConfig(
        sysctls=tuple(_sysctl(key, value, call.invocation.ifname) for key, value in values.items()),
        attributes=Attributes(
            mac=configuration.mac_address(mac) if mac else "",
            promiscuous=promiscuous or None,
            mtu=_first(number(given, "mtu"), number(fields, "mtu")) or 0,
            allmulti=_first(gojson.get_bool(given, "allmulti"), gojson.get_bool(fields, "allmulti")),
            tx_queue_length=_first(number(given, "txQLen"), number(fields, "txQLen")),
        ),
        data_dir=data_dir(call),
    )


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def number(fields: Mapping[str, Any], key: str) -> int | None:
    """A number that the kernel can be told. Raises JsonError, InvalidNetworkConfigError."""
    value = gojson.get_int(fields, key)
    if value is not None and not 0 <= value <= _NUMBER_MAX:
        raise InvalidNetworkConfigError(f"invalid {key} {value}, must be between 0 and {_NUMBER_MAX}")
    return value


def _values(fields: Mapping[str, Any]) -> dict[str, str]:
    values = gojson.get_object(fields, "sysctl") or {}
    for key, value in values.items():
        if not isinstance(value, str | None):
            raise gojson.JsonError(f"sysctl: {key}: a string is needed, not {gojson.kind_of(value)}")
    return {key: value or "" for key, value in values.items()}


def _sysctl(key: str, value: str, ifname: str) -> Sysctl:
    # The interface's name comes last: it may hold dots.
    path = key.replace(".", "/").replace(_PLACEHOLDER, ifname, 1)
    first, *parts = [part for part in path.split("/") if part] or [""]
    if first != _NETWORK or not parts or len(key) > _KEY_MAX or "\0" in key:
        raise InvalidNetworkConfigError(
            f"invalid net sysctl key: {configuration.shown(path)}", "sysctls of the network subsystem only: net.…"
        )
    if not value.isascii():
        raise InvalidNetworkConfigError(f"invalid value of sysctl {key}: {configuration.shown(value)}")
    return Sysctl(key, tuple(parts), value)


class _Object(dict[str, Any]):
    """A JSON object that knows whether a key stands in it more than once."""

    def __init__(self, items: list[tuple[str, Any]]) -> None:
        super().__init__(items)
        self.is_repetitive = len(self) < len(items)


def _refuse_repeated(stdin: bytes) -> None:
    """Refuse a sysctl with two values; what has been read already keeps one of them. Raises InvalidNetworkConfigError.

    The text has been read once, so it is JSON.
    """
    for key, value in json.loads(stdin, object_pairs_hook=_Object).items():
        if key.lower() == "sysctl" and isinstance(value, _Object) and value.is_repetitive:
            raise InvalidNetworkConfigError("duplicated sysctl keys are not allowed")
