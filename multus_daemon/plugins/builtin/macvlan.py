"""`macvlan`: an interface with its own MAC address on a master, as the reference's `plugins/main/macvlan` makes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.single_link import MASTER_KEYS, MasterConfig, MasterPlugin

KEYS: Final = (*MASTER_KEYS, "mode", "mac", "bcqueuelen")


class _Macvlan(MasterPlugin):
    kind = "macvlan"
    default_mode = "bridge"

    def read(self, call: Call) -> MasterConfig:
        """Read the configuration. Raises InvalidEnvironmentError (4) for CNI_ARGS, else as that of all."""
        with contract.reading(call.name):
            mac = contract.mac_address(contract.requested_mac(call))
            queue = contract.number(call.fields, "bcqueuelen") or 0
            return replace(super().read(call), mac=mac, broadcast_queue=queue)


unsupported, read, add, delete, check, status, keeps, differences = _Macvlan().functions
