"""A veth pair between a container and the host, as the reference plugins make it (plugins `pkg/ip`, SetupVeth)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel import removal
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import ANY_LINK, Link, Rtnl
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import interfaces
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import step
from multus_daemon.spec.cni.errors import InternalError
from multus_daemon.spec.cni.result import Interface

_NAME_ATTEMPTS: Final = 10
_HOST_END: Final = re.compile("veth[0-9a-f]{8}")


@dataclass(slots=True)
class Pair:
    """State needed to undo a partial creation."""

    host_name: str = ""
    """If set before the creation, the name that the host's end gets if it is free."""


@dataclass(frozen=True, slots=True)
class Removed:
    """The addresses that a DEL found."""

    addresses: tuple[IpInterface, ...] | None = None
    """Addresses of the link, without link-local ones; None if there was no link."""
    living: tuple[IpInterface, ...] = ()
    """Addresses of the namespace's other links, if there was no link or they were asked for."""


def make(netns: PodNetns, ifname: str, pair: Pair, *, mtu: int, mac: str = "") -> tuple[Link, Link]:
    """Make a pair: up on the host, `ifname` in the pod, down, with `mac` or a random one. Returns host's and pod's end.

    Raises InternalError.
    """
    # Chosen here, so that the pod's end need not be read.
    mac = mac or random_mac()
    host = add(netns.host, ifname, netns.pod, netns.pod_netns, pair, mtu=mtu, mac=mac)
    if host is None:
        with step(f'find the host\'s end "{pair.host_name}"'):
            host = netns.host.link(pair.host_name)
    with netns.on_host():
        ignore_advertisements(host.name)
    # Kernels omit the other end's index if it is the same number.
    index = host.peer or host.index
    return host, Link(index, ifname, mac, host.mtu, is_up=False, operstate="DOWN", kind="veth", peer=host.index)


def random_mac() -> str:
    """Return a MAC address: unicast, administered locally, as the kernel's own are.

    An address that was chosen stays: udev replaces those of the kernel, and a bridge follows its lowest port.
    """
    octets = bytearray(secrets.token_bytes(6))
    octets[0] = octets[0] & 0xFE | 0x02
    return octets.hex(":")


def ignore_advertisements(ifname: str) -> None:
    """Keep a container's router advertisements from configuring the host. Call it in the host's namespace."""
    interfaces.try_sysctl("ipv6", "conf", ifname, "accept_ra", value="0")


def add(host: Rtnl, ifname: str, there: Rtnl, netns: int, pair: Pair, *, mtu: int, mac: str = "") -> Link | None:
    """Add a pair: up on the host, with a random name that is stored in `pair`, and `ifname` in `there`.

    `netns`: descriptor of the namespace of `there`. Returns the host's end, None if the kernel does not describe it.
    Raises InternalError.
    """
    name = ""
    for _ in range(_NAME_ATTEMPTS):
        name = pair.host_name or f"veth{secrets.token_hex(4)}"
        # Stored before the request: a request that fails may have been carried out.
        pair.host_name = name
        try:
            return host.add_veth(name, ifname, netns, mtu=mtu, mac=random_mac(), peer_mac=mac)
        except FileExistsError as error:
            # The name belongs to another link, which must not be removed.
            pair.host_name = ""
            with step(f'find "{ifname}"'):
                taken = there.find_link(ifname) is not None
            if taken:
                raise InternalError(
                    f'container veth name ("{ifname}") peer provided ("{name}") already exists'
                ) from error
        except OSError as error:
            raise InternalError(f'failed to make veth pair "{ifname}" - "{name}": {error.strerror}') from error
    raise InternalError(f'failed to find a free name for the host\'s end of "{ifname}"', f"the last one was {name!r}")


def host_end(made: Sequence[Interface]) -> Interface | None:
    """Return the entry of the host's end, by its name: a binary of the list may have added interfaces of the host."""
    return next((item for item in made if not item.sandbox and _HOST_END.fullmatch(item.name)), None)


def undo(pair: Pair, netns: PodNetns) -> None:
    """Remove the link of `add` by the host's end, which exists even if the container's namespace does not."""
    if pair.host_name:
        with interfaces.ignoring_absent_link():
            netns.host.delete_link(netns.host.link(pair.host_name).index)


def remove(call: Call, netns: PodNetns, *, addresses: bool = False, others: bool = False) -> Removed:
    """Remove the container's end and with it the host's, or another plugin's link. An absent link is not an error.

    The first call of a request removes all links of `PodNetns.leaving`. If the container's end was renamed, the pair is
    removed by the host's end that ADD reported. `addresses`: return them; `others`: even those of the namespace's other
    links if there was a link. Raises CniError.
    """
    ifname = call.invocation.ifname
    if not call.invocation.netns:
        return Removed()
    if ifname in netns.removed and not others:
        return Removed(netns.removed[ifname])
    with interfaces.ignoring_absent_netns(), interfaces.located(call), netns.inside():
        found = netns.removed.get(ifname)
        if found is None:
            found = _remove(call, netns, addresses=addresses)
        if not addresses or (found is not None and not others):
            return Removed(found)
        with step("list the addresses of other interfaces"):
            return Removed(found, tuple([item.address for item in netns.pod.addresses(ANY_LINK)]))
    return Removed()


def _remove(call: Call, netns: PodNetns, *, addresses: bool) -> tuple[IpInterface, ...] | None:
    """Remove the call's link with those that leave with it; return the addresses that it had, None without a link."""
    ifname = call.invocation.ifname
    links: dict[str, Link] = {}
    before: dict[str, tuple[IpInterface, ...]] = {}
    with step(f'remove "{ifname}"'):
        leaving = netns.leaving if ifname in netns.leaving else (ifname,)
        for name in leaving:
            if link := netns.pod.find_link(name):
                links[name] = link
                # Later calls may ask for the addresses of the other links.
                present = netns.pod.addresses(link.index) if addresses or len(leaving) > 1 else ()
                before[name] = tuple([item.address for item in present if not item.address.ip.is_link_local])
        refused = removal.remove(netns.pod, [link.index for link in links.values()])
        netns.removed |= {name: before[name] for name, link in links.items() if link.index not in refused}
        if ifname in links and links[ifname].index in refused:
            raise refused[links[ifname].index]
    if ifname not in links or links[ifname].kind != "veth":
        _remove_host_end(call, netns)
    return before.get(ifname)


def _remove_host_end(call: Call, netns: PodNetns) -> None:
    """Remove the host's end that ADD reported, if the link of this name has the reported MAC address."""
    for reported in () if call.prev_result is None else call.prev_result.interfaces:
        # Only `add` and its counterpart in the reference plugins give such a name.
        if reported.sandbox or not _HOST_END.fullmatch(reported.name):
            continue
        with step(f'remove "{reported.name}" on the host'):
            link = netns.host.find_link(reported.name)
            if link is not None and (link.kind, link.mac) == ("veth", reported.mac.lower()):
                with netns.on_host():
                    refused = removal.remove(netns.host, [link.index])
                for error in refused.values():
                    raise error
        return
