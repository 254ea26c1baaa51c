"""`vlan`: an interface of a VLAN on a master, as the reference's `plugins/main/vlan` makes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.single_link import MASTER_KEYS, MasterConfig, MasterPlugin
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError

KEYS: Final = (*MASTER_KEYS, "vlanId")
_VLAN_MAX: Final = 4094


class _Vlan(MasterPlugin):
    kind = "vlan"
    keeps_mac = False
    announces = ()

    def read(self, call: Call) -> MasterConfig:
        config = super().read(call)
        with contract.reading(call.name):
            number = gojson.get_int(call.fields, "vlanId") or 0
        if not config.master:
            problem = '"master" field is required. It specifies the host interface name to create the VLAN for'
            raise InvalidNetworkConfigError(problem, remedy=f"network {call.name!r}: set 'master'")
        if not 0 <= number <= _VLAN_MAX:
            raise InvalidNetworkConfigError(f"invalid VLAN ID {number} (must be between 0 and {_VLAN_MAX})")
        return replace(config, number=number)


unsupported, read, add, delete, check, status, keeps, differences = _Vlan().functions
