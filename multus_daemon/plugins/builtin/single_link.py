"""A plugin whose link has no other end: the verbs of `dummy`, `tap`, and of the links on top of a master.

A master is an interface of the host or the container, and has `ipvlan`, `macvlan` and `vlan`.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from msgspec import structs

from multus_daemon.kernel import kinds
from multus_daemon.kernel.expected import of_renamed
from multus_daemon.kernel.links import Link, Rtnl
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract, interfaces, restore
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.plugins.builtin.interfaces import ignoring_absent_netns, located, step
from multus_daemon.plugins.builtin.link_plugin import C, LinkConfig, LinkPlugin
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.result import Interface, Result, read_dns

ARP: Final = ("ipv4", "arp_notify")
NDISC: Final = ("ipv6", "ndisc_notify")


def temporary_name(call: Call) -> str:
    """Return a name that another attempt for the same interface has too."""
    subject = f"{call.invocation.container_id}/{call.invocation.ifname}"
    return f"veth{hashlib.sha256(subject.encode()).hexdigest()[:8]}"


class SinglePlugin(LinkPlugin[C]):
    """The verbs."""

    keeps_mac: ClassVar[bool] = True
    """False if the MAC address is always another link's."""
    announces: ClassVar[Sequence[tuple[str, str]]] = (ARP, NDISC)
    """Sysctls of the link with which neighbours forget the former owner of the addresses."""

    @abstractmethod
    def create(self, call: Call, netns: PodNetns, config: C, name: str) -> None:
        """Create the link as `name` in the pod's namespace, down. Raises CniError."""

    def absent(self, netns: PodNetns, config: C) -> str:
        """Return why the link cannot be made anew; empty if it can. Raises CniError."""
        return ""

    def changed(self, netns: PodNetns, config: C, link: Link) -> Iterator[Difference]:
        """Yield what else is not as configured."""
        yield from ()

    def make(self, call: Call, netns: PodNetns, config: C, undo: Undo, host: Interface | None = None) -> Sequence[Link]:
        """Make the interface under a name of its own: the kernel looks for the name in the master's namespace too."""
        name, ifname = temporary_name(call), call.invocation.ifname
        with step(f'look for "{name}"'):
            # The kernel had no memory to rename it, nor to remove it.
            self._remove(netns, name)
        index = 0
        undo.arm("remove the interface", lambda: self._undo(call, netns, index or name))
        self.create(call, netns, config, name)
        with step(f'find {self.kind} "{name}"'):
            index = netns.pod.link(name).index
        with step(f'rename {self.kind} to "{ifname}"'):
            netns.pod.change(index, name=ifname)
            return (netns.pod.link(ifname),)

    def _remove(self, netns: PodNetns, name: str | int) -> None:
        if (link := netns.pod.find_link(name)) and link.kind == self.kind:
            netns.pod.delete_link(link.index)

    def _undo(self, call: Call, netns: PodNetns, made: str | int) -> None:
        """Remove the link by its index or its first name. It is gone already if the pod's namespace is."""
        with ignoring_absent_netns(), located(call), netns.inside():
            self._remove(netns, made)

    def configure(
        self, call: Call, netns: PodNetns, config: C, made: Sequence[Link], wanted: Result
    ) -> Sequence[Interface]:
        """Set addresses and routes."""
        (link,) = made
        for family, name in self.announces if wanted.ips else ():
            interfaces.try_sysctl(family, "conf", link.name, name, value="1")
        interfaces.bring_up(netns, link, wanted, interfaces.routes(link, wanted))
        return (interfaces.made(call, link),)

    def differences(self, call: Call, netns: PodNetns) -> list[Difference]:
        """Return what is not as the recorded result has it. Raises CniError."""
        config = self.read(call)
        result, own = restore.recorded(call)
        with located(call), netns.inside():
            with step(f'look for "{own.name}"'):
                link = netns.pod.find_link(own.name)
                moved = interfaces.find_renamed(netns, own, link)
                if moved is None and self.keeps_mac and (link is None or link.kind != self.kind):
                    moved = restore.with_mac(netns, own, self.kind)
            if moved is not None:
                problem = of_renamed(own.name, moved, link)
                return [problem] if problem else []
            if link is None:
                text = f'interface "{own.name}" is not there'
                if reason := self.absent(netns, config):
                    return [Difference(f"{text}, and {reason}")]
                again = replace(config, mac=(own.mac or config.mac) if self.keeps_mac else "")
                return [Difference(text, functools.partial(self.remake, call, netns, again, result))]
            if wrong := restore.wrong_kind(link, self.kind):
                return [wrong]
            own = own if self.keeps_mac else structs.replace(own, mac="")
            found = list(restore.pod(call, netns, link, own, restore.changes(link, result), mtu=config.mtu))
            return [*found, *self.changed(netns, config, link)]


# --- links on top of a master ----------------------------------------------------------------------------------------

MASTER_KEYS: Final = ("master", "mtu", "linkInContainer")
"""The keys that all links on top of a master have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig(LinkConfig):
    """A checked configuration."""

    master: str
    """Empty: the interface of the default route."""
    in_container: bool
    """The master is an interface of the container, not of the host."""
    mode: str = ""
    number: int = 0
    """Mode and number as of a `Link`."""
    broadcast_queue: int = 0
    """Packets; 0: the kernel's default."""

    def kernel(self, netns: PodNetns) -> Rtnl:
        """Return the socket in the namespace of the master."""
        return netns.pod if self.in_container else netns.host


class MasterPlugin(SinglePlugin[MasterConfig]):
    """The verbs."""

    default_mode: ClassVar[str] = ""
    exceeds_mtu: ClassVar[bool] = False
    """True if the link may have a larger MTU than its master."""

    def unsupported(self, call: Call) -> str:
        """Name a mode that this plugin does not know."""
        mode = gojson.get_str(call.fields, "mode")
        return f'mode: "{mode}"' if mode and mode not in kinds.MODES.get(self.kind, (mode,)) else ""

    def read(self, call: Call) -> MasterConfig:
        """Read the keys that all have. Raises DecodingFailureError (6), InvalidNetworkConfigError (7)."""
        fields = call.fields
        with contract.reading(call.name):
            config = MasterConfig(
                master=contract.ifname(fields, "master", longest=names.ALTERNATIVE_NAME_MAX_BYTES),
                in_container=bool(gojson.get_bool(fields, "linkInContainer")),
                mtu=gojson.get_int(fields, "mtu") or 0,
                dns=read_dns(gojson.get_object(fields, "dns") or {}),
                mode=(self.default_mode and gojson.get_str(fields, "mode")) or self.default_mode,
            )
        if config.mode and config.mode not in kinds.MODES[self.kind]:
            advice = f"network {call.name!r}: one of {', '.join(kinds.MODES[self.kind])}"
            raise InvalidNetworkConfigError(f'unknown {self.kind} mode: "{config.mode}"', remedy=advice)
        return config

    def create(self, call: Call, netns: PodNetns, config: MasterConfig, name: str) -> None:
        """Create the link on the master."""
        below, kind, mac = self._master(netns, config), self.kind, config.mac
        data = kinds.encode(kind, config.mode, config.number, config.broadcast_queue)
        with step(f'create {kind} on "{below.name}"'):
            kernel = config.kernel(netns)
            kernel.add_link(name, kind, data, below=below.index, netns=netns.pod_netns, mtu=config.mtu, mac=mac)

    def check(self, call: Call, netns: PodNetns) -> None:
        """Look for the master too."""
        super().check(call, netns)
        self._master(netns, self.read(call))

    def _master(self, netns: PodNetns, config: MasterConfig) -> Link:
        """Return the master, which must allow the configured MTU. Raises CniError."""
        link = _find(config.kernel(netns), config.master)
        if not (self.exceeds_mtu or 0 <= config.mtu <= link.mtu):
            raise InvalidNetworkConfigError(
                f"invalid MTU {config.mtu}, must be [0, master MTU({link.mtu})]",
                remedy=f"the master is \"{link.name}\": lower 'mtu', or raise the MTU of the master",
            )
        return link

    def absent(self, netns: PodNetns, config: MasterConfig) -> str:
        """Return that the master is not there."""
        with step(f'look for master "{config.master}"'):
            is_absent = config.master and config.kernel(netns).find_link(config.master) is None
        return f'its master "{config.master}" is not there' if is_absent else ""

    def changed(self, netns: PodNetns, config: MasterConfig, link: Link) -> Iterator[Difference]:
        """Yield another mode or number, which a running pod may have set."""
        for what, found, wanted in (("mode", link.mode, config.mode), ("VLAN", link.number, config.number)):
            if found != wanted:
                yield Difference(f'{what} of "{link.name}" is {found}, not {wanted}')


def _find(kernel: Rtnl, name: str) -> Link:
    """Return the link of that name, or of the default route if the name is empty. Raises CniError."""
    if name:
        with step(f'lookup master "{name}"'):
            return kernel.link(name)
    with step("find the interface of the default route"):
        oif = next((route.oif for route in kernel.routes() if route.oif and not route.dst.network.prefixlen), 0)
        if not oif:
            absent = OSError(errno.ENODEV, os.strerror(errno.ENODEV))
            raise InternalError("no default route interface found", origin=Origin.NETWORK) from absent
        return kernel.link(oif)
