"""`dummy`: an interface that drops what it sends, as the reference's `plugins/main/dummy` makes it."""

from __future__ import annotations

from typing import Final

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.contract import Call, ipam_type
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.plugins.builtin.link_plugin import LinkConfig
from multus_daemon.plugins.builtin.single_link import SinglePlugin
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError

KEYS: Final = ()


class _Dummy(SinglePlugin[LinkConfig]):
    kind = "dummy"
    announces = ()

    def read(self, call: Call) -> LinkConfig:
        if not ipam_type(call):
            problem = "dummy interface requires an IPAM configuration"
            raise InvalidNetworkConfigError(problem, remedy=f"network {call.name!r}: set ipam.type")
        return LinkConfig()

    def create(self, call: Call, netns: PodNetns, config: LinkConfig, name: str) -> None:
        with step("create dummy"):
            netns.pod.add_link(name, self.kind, mac=config.mac)


unsupported, read, add, delete, check, status, keeps, differences = _Dummy().functions
