"""`host-device`: moves a device of the host into the container, and back.

Keys, messages and the alias, which keeps the device's name on the host, are those of the reference plugin
(containernetworking/plugins `plugins/main/host-device`): either can move back a device that the other has moved. When a
namespace ends, the kernel returns a physical device to the host, with its name in the pod or as `dev<index>`. A DEL
without the namespace then restores its old name. A device with a user space driver stays.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import posixpath
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from multus_daemon import deadlines
from multus_daemon.kernel import inet, links, routes, rules
from multus_daemon.kernel.expected import of_renamed
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract, interfaces, restore
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.plugins.builtin.interfaces import Change, ignoring_absent_netns, located, step
from multus_daemon.plugins.builtin.link_plugin import LinkConfig, LinkPlugin
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, Route, read_dns

KEYS: Final = ("device", "hwaddr", "kernelpath", "pciBusID", "useInterfaceNetwork")
_PCI: Final = "/sys/bus/pci/devices"
_AUXILIARY: Final = "/sys/bus/auxiliary/devices"
_DEVICES: Final = "/sys/devices/"
_IN_USER_SPACE: Final = frozenset({"vfio-pci", "uio_pci_generic", "igb_uio"})
_ONE_OF: Final = 'specify either "device", "hwaddr", "kernelpath" or "pciBusID"'
# Ethernet, EUI-64, InfiniBand: bytes.
_MAC_SIZES: Final = (6, 8, 20)
# PROTOCOL of rtnetlink(7): made with an address, or advertised.
_OWN_ROUTES: Final = (inet.PROTOCOL_KERNEL, inet.PROTOCOL_RA)
_RETURN_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config(LinkConfig):
    """The checked configuration. Of the fields that identify the device, the first one that is not empty is used."""

    device: str
    hwaddr: str
    path: str
    """Path of the device in sysfs of the host."""
    bus_id: str
    """Address of a PCI device, or name of a device on the auxiliary bus."""
    takes_network: bool
    """True: the interface keeps the addresses and routes that it has on the host."""


class _HostDevice(LinkPlugin[_Config]):
    kind = "interface"

    def __init__(self) -> None:
        # What the device has on the host, if it keeps that: addresses, and routes in the kernel's form.
        self._ips: list[IpConfig] = []
        self._routes: list[bytes] = []
        self._rules: list[rules.Rule] = []

    def read(self, call: Call) -> _Config:
        """Read the configuration. Raises DecodingFailureError (6), InvalidNetworkConfigError (7)."""
        fields = call.fields
        with contract.reading(call.name):
            device, hwaddr = (gojson.get_str(fields, key) or "" for key in KEYS[:2])
            path = contract.path(fields, "kernelpath")
            config = _Config(
                device=device,
                hwaddr=next(filter(None, (names.mac_address(hwaddr, size) for size in _MAC_SIZES)), ""),
                path=path and posixpath.normpath(path),
                bus_id=contract.path(contract.requests(fields)[0], "deviceID") or contract.path(fields, "pciBusID"),
                takes_network=bool(gojson.get_bool(fields, "useInterfaceNetwork")),
                dns=read_dns(gojson.get_object(fields, "dns") or {}),
            )
        problem = ""
        if hwaddr and not (config.hwaddr or device):
            problem = f"failed to parse MAC address {contract.shown(hwaddr)}: invalid MAC address"
        elif device and (why := names.ifname_problem(device, longest=names.ALTERNATIVE_NAME_MAX_BYTES)):
            problem = f"failed to find host device: {contract.shown(device)}: {why}"
        elif path and not (device or hwaddr) and not config.path.startswith(_DEVICES):
            problem = f"kernel device path {contract.shown(path)} must be absolute and begin with {_DEVICES}"
        elif "/" in config.bus_id or config.bus_id in (".", ".."):
            problem = f"pciBusID {contract.shown(config.bus_id)} is not the address of a device"
        if problem:
            raise InvalidNetworkConfigError(problem, f"network {call.name!r}")
        return config

    def add(self, call: Call, netns: PodNetns) -> Result:
        """Move the device, get addresses from IPAM, configure it. If it raises, the device is back on the host."""
        result = super().add(call, netns)
        kept = [
            Route(str(item.dst), str(item.gateway or ""), 0, 0, item.priority, item.table, item.scope or None)
            for body in self._routes
            for item in inet.decode_routes(body)
        ]
        return replace(result, ips=(*result.ips, *self._ips), routes=(*result.routes, *kept))

    def make(
        self, call: Call, netns: PodNetns, config: _Config, undo: Undo, host: Interface | None = None
    ) -> Sequence[Link]:
        """Move the device into the pod's namespace; a device with a user space driver is not moved."""
        if _is_in_user_space(call, config):
            if config.takes_network:
                problem = "useInterfaceNetwork is not supported for dpdk-bound devices"
                raise InvalidNetworkConfigError(problem, f"network {call.name!r}")
            return ()
        ifname, link = call.invocation.ifname, _find(call, netns, config)
        if config.takes_network:
            with step(f'read addresses and routes of "{link.name}"'):
                self._ips, self._routes, self._rules = _network(netns, link)
        undo.arm(f"give {link.name} back", lambda: self._give_back(call, netns, link))
        # The kernel chooses the new name if the old one is taken there.
        moved = links.change(link.index, name=ifname, netns=netns.pod_netns)
        what = f'move "{ifname}" (host: "{link.name}") to containerNS'
        interfaces.apply(netns.host, [Change(what, links.change(link.index, alias=link.name)), Change(what, moved)])
        with step(f'find "{ifname}"'):
            return (netns.pod.link(ifname),)

    def _give_back(self, call: Call, netns: PodNetns, before: Link) -> None:
        """Undo a move, also an incomplete one."""
        with ignoring_absent_netns(), located(call):
            netns.require()
            for link in netns.pod.links():
                if (link.alias, link.mac) == (before.name, before.mac):
                    _return(netns, link, before.name)
        link = netns.host.link(before.name)
        netns.host.change(link.index, alias=before.alias)
        if before.is_up:
            interfaces.apply(netns.host, self._kept(link, tolerated=errno.EEXIST))

    def _kept(self, link: Link, *, tolerated: int = 0) -> list[Change]:
        """Return the changes that bring a link up with the addresses and routes that the device had on the host."""
        changes = [*interfaces.addresses(link, self._ips), Change("set it up", links.change(link.index, up=True))]
        again = [routes.again(body, oif=link.index) for body in self._routes]
        changes += [Change(f'add a route over "{link.name}"', request) for request in again]
        found = [Change("add a rule", rules.again(rule), tolerated=errno.EEXIST) for rule in self._rules]
        return [*(dataclasses.replace(change, tolerated=tolerated) for change in changes), *found]

    def configure(
        self, call: Call, netns: PodNetns, config: _Config, made: Sequence[Link], wanted: Result
    ) -> Sequence[Interface]:
        if not made:
            return (Interface(call.invocation.ifname, sandbox=call.invocation.netns),)
        (link,) = made
        if self._ips or self._routes:
            interfaces.apply(netns.pod, self._kept(link))
        if wanted.ips or not self._ips:
            interfaces.bring_up(netns, link, wanted, interfaces.routes(link, wanted))
        return (interfaces.made(call, link),)

    def remove(self, call: Call, netns: PodNetns) -> Sequence[Callable[[], object]]:
        """Move the device back to the host. If the namespace is gone, the kernel does that, which may take a moment."""
        config, mac = self.read(call), restore.recorded(call)[1].mac
        end = time.monotonic() + (deadlines.RETURN_SECONDS if mac else 0)
        with ignoring_absent_netns(), located(call):
            if call.invocation.netns:
                netns.require()
                end = 0.0
                with step("look for the device"):
                    link = _taken(call, netns, config, mac)
                if link is not None:
                    _return(netns, link, link.alias or config.device)
                    return ()
        with step("rename the device that the kernel returned"):
            while not _returned(netns, config, mac) and time.monotonic() < end:
                if any(item.mac == mac for item in netns.host.links()):
                    break
                deadline.pause(_RETURN_POLL_SECONDS)
        return ()

    def differences(self, call: Call, netns: PodNetns) -> list[Difference]:
        config, (result, own) = self.read(call), restore.recorded(call)
        if _is_in_user_space(call, config):
            return []
        if config.takes_network:
            # One without a gateway would be taken for a route of the IPAM plugin.
            result = replace(result, routes=tuple([route for route in result.routes if route.gw]))
        with located(call), netns.inside(), step(f'look for "{own.name}"'):
            link = netns.pod.find_link(own.name)
            moved = interfaces.find_renamed(netns, own, link)
        if moved is not None:
            problem = of_renamed(own.name, moved, link)
            return [problem] if problem else []
        if link is None:
            again = functools.partial(self.remake, call, netns, config, result)
            return [Difference(f'interface "{own.name}" is not there', again)]
        with located(call), netns.inside():
            return list(restore.pod(call, netns, link, own, restore.changes(link, result), mtu=0))


_VERBS: Final = _HostDevice()
read, delete, check, status = _VERBS.read, _VERBS.delete, _VERBS.check, _VERBS.status


def add(call: Call, netns: PodNetns) -> Result:
    """Move the device into the container."""
    return _HostDevice().add(call, netns)


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return the differences from the recorded result. Raises CniError."""
    return _HostDevice().differences(call, netns)


# --- the device on the host ------------------------------------------------------------------------------------------


def _find(call: Call, netns: PodNetns, config: _Config) -> Link:
    """Return the host's link that the configuration names. Raises CniError."""
    host = netns.host
    if not (config.device or config.hwaddr or config.path or config.bus_id):
        # Without the pod, `multusctl validate` does not know the device of a resource.
        raise InvalidNetworkConfigError(_ONE_OF, f"network {call.name!r}")
    with step("find host device", asked=True):
        if config.device:
            # The kernel may have returned it after the DEL of its last pod.
            return host.find_link(config.device) or _returned(netns, config, "") or host.link(config.device)
        if not config.hwaddr:
            return host.link(_name(call, config))
        if link := next((item for item in host.links() if item.mac == config.hwaddr), None):
            return link
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), config.hwaddr)


def _name(call: Call, config: _Config) -> str:
    """Return the name of the first network interface of a device in sysfs. Raises OSError, IoFailureError."""
    path = call.on_host(config.path or f"{_PCI}/{config.bus_id}")
    if not config.path and not path.exists():
        path = call.on_host(f"{_AUXILIARY}/{config.bus_id}")
    # A virtio device has it one level deeper.
    found = sorted([*path.glob("net/*"), *path.glob("virtio*/net/*")])
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return found[0].name


def _is_in_user_space(call: Call, config: _Config) -> bool:
    driver = call.on_host(f"{_PCI}/{config.bus_id}") / "driver"
    return bool(config.bus_id) and driver.is_symlink() and driver.readlink().name in _IN_USER_SPACE


def _network(netns: PodNetns, link: Link) -> tuple[list[IpConfig], list[bytes], list[rules.Rule]]:
    """Return the link's permanent addresses, and its routes in the kernel's form. Raises OSError."""
    ips = [IpConfig(str(item.address), interface=0) for item in netns.host.addresses(link.index) if item.is_configured]
    found = routes.over(netns.host, link.index, inet.ANY_TABLE)
    # Those of an address, and of a router, come by themselves.
    kept = [item for item in found if item[1].table != inet.TABLE_LOCAL and item[1].protocol not in _OWN_ROUTES]
    own, tables = [inet.interface_of(ip.address).ip for ip in ips], {route.table for _, route in kept}
    # By which packets from the addresses take the routes.
    about = [
        rule
        for rule in rules.present(netns.host)
        if rule.source and rule.table in tables and any(ip in rule.source for ip in own)
    ]
    return ips, [body for body, _ in kept], about


# --- back ------------------------------------------------------------------------------------------------------------


def _taken(call: Call, netns: PodNetns, config: _Config, mac: str) -> Link | None:
    """Return the device's link in the pod, even if renamed there; None if it is gone. Raises OSError, InternalError."""
    ifname = call.invocation.ifname
    link = netns.pod.find_link(ifname)
    if link is None or not link.alias:
        link = next((item for item in netns.pod.links() if item.alias and item.mac == mac != ""), link)
    if link is None or link.alias or mac != link.mac:
        # Without both it is another link, which has the name.
        return link if link and link.alias else None
    if not config.device:
        raise InternalError(f'failed to find original ifname for "{ifname}" (alias is not set)', origin=Origin.POD)
    return link


def _return(netns: PodNetns, link: Link, name: str) -> None:
    """Move a link of the pod to the host, down, called `name`, without an alias. Raises InternalError."""
    with step(f'move "{name}" to hostNS'):
        if names.ifname_problem(name) or netns.host.find_link(name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        # The kernel moves it first, under the new name if the present one is taken.
        netns.pod.request(links.change(link.index, netns=netns.host_netns, name=name, alias=""))


def _returned(netns: PodNetns, config: _Config, mac: str) -> Link | None:
    """Restore the name of a link that the kernel has returned to the host; return it, if found. Raises OSError."""
    for link in netns.host.links():
        is_ours = config.device == link.alias or mac == link.mac != ""
        if is_ours and link.alias not in ("", link.name) and not names.ifname_problem(link.alias):
            down = links.change(link.index, up=False)
            for error in netns.host.batch([down, links.change(link.index, name=link.alias, alias="")]).values():
                raise error
            return netns.host.link(link.index)
    return None
