"""The configuration of bridge; pure. Keys, defaults and messages are the reference plugin's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from multus_daemon.plugins.builtin import configuration, masquerade
from multus_daemon.plugins.builtin.contract import Call, ipam_type
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Dns

_DEFAULT_BRIDGE: Final = "cni0"
_VLAN_MAX: Final = 4094
TRUNK_KEYS: Final = ("minID", "maxID", "id")
KEYS: Final = configuration.COMMON_KEYS.union(
    ("bridge", "isGateway", "isDefaultGateway", "forceAddress", "mtu", "hairpinMode", "promiscMode"),
    ("vlan", "vlanTrunk", "preserveDefaultVlan", "macspoofchk", "enabledad", "disableContainerInterface"),
    ("portIsolation", *masquerade.KEYS),
)


@dataclass(frozen=True, slots=True)
class BridgeConfig:
    """A checked configuration of bridge."""

    bridge: str
    is_layer3: bool
    """An IPAM plugin assigns addresses."""
    is_gateway: bool
    """The bridge has the gateways' addresses."""
    is_default_gateway: bool
    force_address: bool
    masquerade: bool
    mtu: int
    """Bytes, for the pair and for a new bridge; 0: the kernel's default."""
    hairpin: bool
    promiscuous: bool
    """Set it on the bridge."""
    vlan: int
    """The port's own; 0: none."""
    trunk: tuple[tuple[int, int], ...]
    """Ranges of other VLANs that the port carries, first and last, ascending."""
    vlan_filtering: bool
    """Set it on a new bridge."""
    preserve_default_vlan: bool
    spoof_check: bool
    """Drop frames from the container with another MAC address."""
    detect_duplicates: bool
    disable_container_interface: bool
    port_isolation: bool
    mac: str
    """The container's; empty: a random one."""
    dns: Dns | None
    """Replaces the IPAM plugin's; None: keep that one."""


def read(call: Call) -> BridgeConfig:
    """Raises DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7)."""
    with configuration.reading(call.name):
        config = _read(call)
    if problem := names.ifname_problem(config.bridge):
        raise InvalidNetworkConfigError(f'failed to create bridge "{config.bridge}": {problem}')
    if config.is_layer3 and config.disable_container_interface:
        raise InvalidNetworkConfigError("cannot use IPAM when DisableContainerInterface flag is set")
    if config.hairpin and config.promiscuous:
        raise InvalidNetworkConfigError("cannot set hairpin mode and promiscuous mode at the same time")
    return config


def _read(call: Call) -> BridgeConfig:
    fields = call.fields

    def flag(key: str) -> bool:
        return bool(gojson.get_bool(fields, key))

    bridge = gojson.get_str(fields, "bridge")
    vlan = gojson.get_int(fields, "vlan") or 0
    if not 0 <= vlan <= _VLAN_MAX:
        raise InvalidNetworkConfigError(f"invalid VLAN ID {vlan} (must be between 0 and {_VLAN_MAX})")
    trunk = gojson.get_list(fields, "vlanTrunk")
    is_default_gateway = flag("isDefaultGateway")
    return BridgeConfig(
        bridge=_DEFAULT_BRIDGE if bridge is None else bridge,
        is_layer3=bool(ipam_type(call)),
        is_gateway=flag("isGateway") or is_default_gateway,
        is_default_gateway=is_default_gateway,
        force_address=flag("forceAddress"),
        masquerade=masquerade.is_wanted(call),
        mtu=configuration.mtu(fields),
        hairpin=flag("hairpinMode"),
        promiscuous=flag("promiscMode"),
        vlan=vlan,
        trunk=_trunk(trunk or ()),
        # An empty trunk enables it too, as in the reference.
        vlan_filtering=vlan != 0 or trunk is not None,
        preserve_default_vlan=flag("preserveDefaultVlan"),
        spoof_check=flag("macspoofchk"),
        detect_duplicates=flag("enabledad"),
        disable_container_interface=flag("disableContainerInterface"),
        port_isolation=flag("portIsolation"),
        mac=_mac(call),
        dns=configuration.own_dns(fields),
    )


def _mac(call: Call) -> str:
    """Return the MAC address of runtimeConfig, else of args, else of CNI_ARGS."""
    by_args = configuration.own_args(call.invocation.args, ("MAC",)).get("MAC")
    runtime, given = configuration.requests(call.fields)
    text = gojson.get_str(runtime, "mac") or gojson.get_str(given, "mac") or by_args
    return configuration.mac_address(text) if text else ""


def _trunk(items: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """Return the VLANs of `vlanTrunk` as ranges, merged and ascending.

    An item is `{"minID", "maxID"}`, `{"id"}`, or both.
    """
    vlans: set[tuple[int, int]] = set()
    for item in items:
        if not isinstance(item, dict):
            raise gojson.JsonError(f"vlanTrunk: an object is needed, not {gojson.kind_of(item)}")
        first, last, single = (gojson.get_int(item, key) for key in TRUNK_KEYS)
        if first is not None and last is not None:
            for name, value in (("minID", first), ("maxID", last)):
                if not 0 < value <= _VLAN_MAX:
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
            if not 0 < single <= _VLAN_MAX:
                raise InvalidNetworkConfigError("incorrect trunk id parameter", f"{single}")
            vlans.add((single, single))
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(vlans):
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], last))
        else:
            ranges.append((first, last))
    return tuple(ranges)
