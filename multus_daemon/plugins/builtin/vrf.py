"""`vrf`: move an interface to a VRF of the pod, with addresses and routes, as the reference's `meta/vrf` does."""

from __future__ import annotations

import errno
import functools
import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from multus_daemon.kernel import inet, kinds
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract, interfaces, restore, sbr
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.plugins.builtin.interfaces import Change, ignoring_absent_netns, located, step
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError, Origin
from multus_daemon.spec.cni.result import Result

KEYS: Final = ("vrfname", "table")
_NOT_CHAINED: Final = "missing prevResult from earlier plugin"
_KIND: Final = "vrf"


@dataclass(frozen=True, slots=True)
class _Config:
    name: str
    table: int
    """0: that of the existing VRF, else the first that no VRF has."""


def read(call: Call) -> _Config:
    """Read the configuration. Raises DecodingFailureError (6), InvalidNetworkConfigError (7)."""
    with contract.reading(call.name):
        config = _Config(contract.ifname(call.fields, "vrfname"), contract.number(call.fields, "table") or 0)
    if not config.name:
        problem = "configuration is expected to have a valid vrf name"
        raise InvalidNetworkConfigError(problem, remedy=f"network {call.name!r}: set 'vrfname'")
    return config


def add(call: Call, netns: PodNetns) -> Result:
    """Move the interface to the VRF, which is made if it is not there; return prevResult."""
    previous = contract.previous(call, _NOT_CHAINED)
    _join(call, netns, read(call))
    return previous


def delete(call: Call, netns: PodNetns) -> None:
    """Take the interface out of the VRF, and remove a VRF without interfaces. Absent ones are not an error."""
    config, ifname = read(call), call.invocation.ifname
    with ignoring_absent_netns(), located(call), netns.inside():
        with step(f'take "{ifname}" out of VRF "{config.name}"'):
            vrf, link = netns.pod.find_link(config.name), netns.pod.find_link(ifname)
            if vrf is not None and link is not None and link.master == vrf.index:
                netns.pod.change(link.index, master=0)
        _remove_unused(netns, config.name)


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return why the interface is not in the VRF; nothing for an absent interface. Raises CniError."""
    contract.previous(call, _NOT_CHAINED)
    config, (_, own) = read(call), restore.recorded(call)
    with located(call), netns.inside():
        with step(f'look for "{own.name}"'):
            link, vrf = netns.pod.find_link(own.name), netns.pod.find_link(config.name)
            link = interfaces.find_renamed(netns, own, link) or link
        again = functools.partial(_join, call, netns, config) if link is not None else None
        if vrf is None:
            return [Difference(f'VRF "{config.name}" is not there', again)]
        if wrong := restore.wrong_kind(vrf, _KIND):
            return [wrong]
        found = list(restore.link(netns.pod, vrf))
        if config.table not in (0, vrf.number):
            found.append(Difference(f'table of VRF "{vrf.name}" is {vrf.number}, not {config.table}'))
        elif link is not None and link.master != vrf.index:
            found.append(Difference(f'"{link.name}" is not in VRF "{vrf.name}"', again))
        elif link is not None and link.name == own.name and call.invocation.observed is not None:
            # A VRF that was removed has taken its routes along.
            found += sbr.misplaced(netns, link, call.invocation.observed.routes)
        return found


def _join(call: Call, netns: PodNetns, config: _Config) -> None:
    """Move the interface to the VRF. If it raises, all is as before. Raises CniError."""
    with located(call), netns.inside(), Undo() as undo:
        with step(f'get "{call.invocation.ifname}"', asked=True):
            link = netns.pod.link(call.invocation.ifname)
        with step(f'look for VRF "{config.name}"'):
            vrf, links = netns.pod.find_link(config.name), netns.pod.links()
        if problem := _problem(config, link, vrf, links):
            raise InternalError(problem, origin=Origin.NETWORK)
        if vrf is None:
            taken = {item.number for item in links if item.kind == _KIND}
            table = config.table or next(number for number in itertools.count(1) if number not in taken)
            undo.arm("remove the VRF", functools.partial(_remove_unused, netns, config.name))
            with step(f'add VRF "{config.name}"'):
                netns.pod.add_link(config.name, _KIND, kinds.encode(_KIND, number=table), up=True)
                vrf = netns.pod.link(config.name)
        kept = _kept(netns, link)
        undo.arm("take the interface out of the VRF", lambda: _move(netns, link, kept, 0, inet.TABLE_MAIN))
        _move(netns, link, kept, vrf.index, vrf.number)


def _problem(config: _Config, link: Link, vrf: Link | None, links: Sequence[Link]) -> str:
    """Return why the link cannot be moved, empty if it can."""
    if vrf is not None and vrf.kind != _KIND:
        return f"Netlink {vrf.name} is not a VRF"
    if vrf is not None and config.table not in (0, vrf.number):
        return f"VRF {vrf.name} already exist with different routing table {vrf.number}"
    master = next((item.name for item in links if item.index == link.master), "")
    return f"interface {link.name} has already a master set: {master}" if master else ""


def _remove_unused(netns: PodNetns, name: str) -> None:
    """Remove the VRF if no interface is in it. Raises InternalError."""
    with netns.inside(), step(f'remove VRF "{name}"'):
        vrf = netns.pod.find_link(name)
        if vrf and vrf.kind == _KIND and not any(item.master == vrf.index for item in netns.pod.links()):
            netns.pod.delete_link(vrf.index)


def _kept(netns: PodNetns, link: Link) -> list[inet.IpInterface | inet.Route]:
    """Return what a link loses with its master: routes, and addresses of IPv6 unless `keep_addr_on_down` is set."""
    with step(f'read addresses and routes of "{link.name}"'):
        addresses = [item.address for item in netns.pod.addresses(link.index, socket.AF_INET6)]
        found = netns.pod.routes(oif=link.index)
    own = [item for item in found if item.is_unicast and item.protocol not in (inet.PROTOCOL_KERNEL, inet.PROTOCOL_RA)]
    # A gateway can be reached only over a route that is there.
    routes = sorted(own, key=lambda route: route.gateway is not None)
    return [*(address for address in addresses if not address.ip.is_link_local), *routes]


def _move(netns: PodNetns, link: Link, kept: Sequence[inet.IpInterface | inet.Route], master: int, table: int) -> None:
    """Give the link that master, 0: none, and what it loses with that. Raises InternalError."""
    changes = []
    for item in kept:
        if isinstance(item, inet.Route):
            what, request = f"route to {item.dst}", inet.add_route(replace(item, table=table), exclusive=False)
        else:
            what, request = f"IP address {item}", inet.add_address(link.index, item, dad=False)
        changes.append(Change(f'add {what} to "{link.name}"', request, tolerated=errno.EEXIST))
    with netns.inside(), step(f'set the master of "{link.name}"'):
        netns.pod.change(link.index, master=master)
    interfaces.apply(netns.pod, changes)
