"""The configuration of bridge, checked; pure. Keys, defaults and the words of the errors are the reference plugin's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.plugins.builtin import configuration, ipam, masquerade
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import DecodingFailureError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Dns

DEFAULT_BRIDGE: Final = "cni0"
VLAN_MAX: Final = 4094
_TRUNK_KEYS: Final = ("minID", "maxID", "id")
_KEYS: Final = (
    *("bridge", "isGateway", "isDefaultGateway", "forceAddress", "mtu", "hairpinMode", "promiscMode"),
    *("vlan", "vlanTrunk", "preserveDefaultVlan", "macspoofchk", "enabledad", "disableContainerInterface"),
    *("portIsolation", *masquerade.KEYS),
)


@dataclass(frozen=True, slots=True)
class BridgeConfig:
    """One configuration of bridge."""

    bridge: str
    is_layer3: bool
    """An IPAM plugin assigns addresses."""
    is_gateway: bool
    """The bridge has the gateways' addresses."""
    is_default_gateway: bool
    force_address: bool
    """Another address that the bridge has goes."""
    masquerade: bool
    mtu: int
    """In bytes, of the pair, and of a bridge that is made; 0: the kernel's default."""
    hairpin: bool
    promiscuous: bool
    """Of the bridge."""
    vlan: int
    """The port's own; 0: none."""
    trunk: tuple[tuple[int, int], ...]
    """Ranges of VLANs that the port carries besides, first and last, in order."""
    vlan_filtering: bool
    """Of a bridge that is made."""
    preserve_default_vlan: bool
    spoof_check: bool
    """Frames from the container with another MAC address are dropped."""
    detect_duplicates: bool
    """IPv6 duplicate address detection in the container."""
    disable_container_interface: bool
    """The container's end stays down."""
    port_isolation: bool
    """No frames between this port and others that are isolated."""
    mac: str
    """Of the container's end; empty: a random one."""
    dns: Dns | None
    """Replaces what the IPAM plugin said; None: it stays."""


def unsupported(call: Call) -> str:
    """What the configuration asks for that is not known here; empty: nothing. Raises JsonError."""
    if found := configuration.unknown_key(call.fields, configuration.COMMON_KEYS.union(_KEYS)):
        return found
    for item in gojson.get_list(call.fields, "vlanTrunk") or ():
        if isinstance(item, dict) and (found := configuration.unknown_key(item, _TRUNK_KEYS, within="vlanTrunk: ")):
            return found
    if gojson.get_bool(call.fields, "macspoofchk") and call.tools is None:
        return "macspoofchk: true"
    return masquerade.unsupported(call)


def read(call: Call) -> BridgeConfig:
    """Raises DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7)."""
    try:
        config = _read(call)
    except gojson.JsonError as error:
        raise DecodingFailureError(f"failed to load netconf: {error}", f"network {call.name!r}") from error
    problem = names.ifname_problem(config.bridge)
    if problem or "%" in config.bridge:
        problem = problem or "interface name contains %, for which the kernel puts a number"
        raise InvalidNetworkConfigError(f'failed to create bridge "{config.bridge}": {problem}')
    if config.is_layer3 and config.disable_container_interface:
        raise InvalidNetworkConfigError("cannot use IPAM when DisableContainerInterface flag is set")
    if config.hairpin and config.promiscuous:
        raise InvalidNetworkConfigError("cannot set hairpin mode and promiscuous mode at the same time")
    return config


def _read(call: Call) -> BridgeConfig:
    fields = call.fields
    bridge = gojson.get_str(fields, "bridge")
    vlan = gojson.get_int(fields, "vlan") or 0
    if not 0 <= vlan <= VLAN_MAX:
        raise InvalidNetworkConfigError(f"invalid VLAN ID {vlan} (must be between 0 and {VLAN_MAX})")
    trunk = gojson.get_list(fields, "vlanTrunk")
    is_default_gateway = _flag(call, "isDefaultGateway")
    return BridgeConfig(
        bridge=DEFAULT_BRIDGE if bridge is None else bridge,
        is_layer3=ipam.is_named(call),
        is_gateway=_flag(call, "isGateway") or is_default_gateway,
        is_default_gateway=is_default_gateway,
        force_address=_flag(call, "forceAddress"),
        masquerade=masquerade.is_wanted(call),
        mtu=configuration.mtu(fields),
        hairpin=_flag(call, "hairpinMode"),
        promiscuous=_flag(call, "promiscMode"),
        vlan=vlan,
        trunk=_ranges(_trunk(trunk or ())),
        # Also for an empty trunk, as with the reference.
        vlan_filtering=vlan != 0 or trunk is not None,
        preserve_default_vlan=_flag(call, "preserveDefaultVlan"),
        spoof_check=_flag(call, "macspoofchk"),
        detect_duplicates=_flag(call, "enabledad"),
        disable_container_interface=_flag(call, "disableContainerInterface"),
        port_isolation=_flag(call, "portIsolation"),
        mac=_mac(call),
        dns=configuration.own_dns(fields),
    )


def _flag(call: Call, key: str) -> bool:
    return bool(gojson.get_bool(call.fields, key))


def _mac(call: Call) -> str:
    """runtimeConfig before args before CNI_ARGS."""
    by_args = configuration.own_args(call.invocation.args, ("MAC",)).get("MAC")
    given = gojson.get_object(gojson.get_object(call.fields, "args") or {}, "cni") or {}
    runtime = gojson.get_object(call.fields, "runtimeConfig") or {}
    text = gojson.get_str(runtime, "mac") or gojson.get_str(given, "mac") or by_args
    return configuration.mac_address(text) if text else ""


def _trunk(items: Iterable[Any]) -> set[tuple[int, int]]:
    """The VLANs of `vlanTrunk`, first and last: `{"minID", "maxID"}`, `{"id"}`, or both in one item."""
    vlans: set[tuple[int, int]] = set()
    for item in items:
        if not isinstance(item, dict):
            raise gojson.JsonError(f"vlanTrunk: an object is needed, not {gojson.kind_of(item)}")
        first, last, single = (gojson.get_int(item, key) for key in _TRUNK_KEYS)
        if first is not None and last is not None:
            for name, value in (("minID", first), ("maxID", last)):
                if not 0 < value <= VLAN_MAX:
                    raise InvalidNetworkConfigError(f"incorrect trunk {name} parameter", f"{value}")
            if last < first:
                raise InvalidNetworkConfigError("minID is greater than maxID in trunk parameter", f"{first}, {last}")
            vlans.add((first, last))
        elif first is not None or last is not None:
            missing = "minID" if first is None else "maxID"
            raise InvalidNetworkConfigError(
                f"minID and maxID should be configured simultaneously, {missing} is missing"
            )
        if single is not None:
            if not 0 < single <= VLAN_MAX:
                raise InvalidNetworkConfigError("incorrect trunk id parameter", f"{single}")
            vlans.add((single, single))
    return vlans


def _ranges(vlans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same numbers, those that are consecutive as one range, ascending."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(vlans):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)
