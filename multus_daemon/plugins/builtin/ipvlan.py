"""`ipvlan`: an interface with the MAC address of its master, as the reference's `plugins/main/ipvlan` makes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from msgspec import structs

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.single_link import MASTER_KEYS, MasterConfig, MasterPlugin
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Result

KEYS: Final = (*MASTER_KEYS, "mode")


class _Ipvlan(MasterPlugin):
    kind = "ipvlan"
    default_mode = "l2"
    keeps_mac = False
    exceeds_mtu = True

    def read(self, call: Call) -> MasterConfig:
        config = super().read(call)
        return replace(config, mtu=max(config.mtu, 0))

    def create(self, call: Call, netns: PodNetns, config: MasterConfig, name: str) -> None:
        """Create the link on the master, or on the one interface of the plugin before this one."""
        if call.invocation.verb == "ADD" and not config.master and call.prev_result is not None:
            named = [item.name for item in call.prev_result.interfaces if item.name]
            if len(named) != 1:
                problem = "chained master failure. PrevResult lacks a single named interface"
                raise InvalidNetworkConfigError(problem, remedy=f"network {call.name!r}: set 'master'")
            config = replace(config, master=named[0])
        super().create(call, netns, config, name)

    def given(self, call: Call) -> Result:
        """Return the addresses of the plugin before this one."""
        previous = call.prev_result or Result()
        if not previous.ips:
            contract.required_ipam_type(call)
        return structs.replace(previous, interfaces=())


unsupported, read, add, delete, check, status, keeps, differences = _Ipvlan().functions
