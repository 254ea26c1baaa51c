"""`tap`: an interface whose other end is a program of the pod, as the reference's `plugins/main/tap` makes it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel import kinds
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.plugins.builtin.link_plugin import LinkConfig
from multus_daemon.plugins.builtin.single_link import ARP, SinglePlugin
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.result import read_dns

KEYS: Final = ("multiQueue", "mtu", "mac", "owner", "group", "selinuxContext", "bridge")
_DEVICE: Final = "/dev/net/tun"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config(LinkConfig):
    multi_queue: bool
    owner: int | None
    group: int | None
    """Ids of those who may open it; None: not set."""
    selinux_context: str
    bridge: str
    """Of the pod; empty: none."""


class _Tap(SinglePlugin[_Config]):
    kind = kinds.TAP_KIND
    announces = (ARP,)

    def unsupported(self, call: Call) -> str:
        """Name `selinuxContext` without the programs of the host."""
        return "" if call.tools or not gojson.get_str(call.fields, "selinuxContext") else "selinuxContext"

    def read(self, call: Call) -> _Config:
        """Read the configuration. The MAC address is requested as for `macvlan`.

        Raises DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7).
        """
        fields = call.fields
        with contract.reading(call.name):
            config = _Config(
                multi_queue=bool(gojson.get_bool(fields, "multiQueue")),
                mtu=gojson.get_int(fields, "mtu") or 0,
                mac=contract.mac_address(contract.requested_mac(call)),
                owner=contract.number(fields, "owner"),
                group=contract.number(fields, "group"),
                selinux_context=gojson.get_str(fields, "selinuxContext") or "",
                bridge=contract.ifname(fields, "bridge"),
                dns=read_dns(gojson.get_object(fields, "dns") or {}),
            )
        contract.in_range("mtu", config.mtu, contract.UNSIGNED_MAX)
        if "\0" in config.selinux_context:
            raise InvalidNetworkConfigError(f"selinuxContext: {contract.shown(config.selinux_context)} has a NUL byte")
        return config

    def create(self, call: Call, netns: PodNetns, config: _Config, name: str) -> None:
        """Create the link by the device of the node."""
        with netns.inside(), step("create tap"):
            if config.selinux_context:
                _create_as(call, config, name)
            else:
                ids = {"owner": config.owner, "group": config.group}
                kinds.add_tap(call.on_host(_DEVICE), name, multi_queue=config.multi_queue, **ids)
            index = netns.pod.link(name).index
        with step(f'set MTU {config.mtu or "-"} and MAC address {config.mac or "-"} of "{name}"'):
            netns.pod.change(index, mtu=config.mtu or None, mac=config.mac or None)
        if config.bridge:
            with step(f"get bridge {config.bridge}", asked=True):
                netns.pod.change(index, master=netns.pod.link(config.bridge).index)

    def changed(self, netns: PodNetns, config: _Config, link: Link) -> Iterator[Difference]:
        """Yield that it is not a port of its bridge."""
        with step(f'look for bridge "{config.bridge}"'):
            bridge = netns.pod.find_link(config.bridge) if config.bridge else None
        if bridge is not None and link.master != bridge.index:
            repair = functools.partial(netns.pod.change, link.index, master=bridge.index)
            yield Difference(f'"{link.name}" is not a port of bridge "{bridge.name}"', repair)


def _create_as(call: Call, config: _Config, name: str) -> None:
    """Create the link by programs of the host: the kernel labels it like the process that makes it. Raises CniError."""
    options = ["multi_queue"] if config.multi_queue else []
    for key, value in (("user", config.owner), ("group", config.group)):
        options += [] if value is None else [key, str(value)]
    enter = [f"--net={call.invocation.netns}", "--", "runcon", "--", config.selinux_context]
    with contract.prefixed("selinuxContext"):
        end = call.host_tools.run("nsenter", [*enter, "ip", "tuntap", "add", name, "mode", "tap", *options])
    if end.status:
        raise InternalError(f"failed to create tap with selinuxContext: {end.stderr}", origin=Origin.NODE)


unsupported, read, add, delete, check, status, keeps, differences = _Tap().functions
