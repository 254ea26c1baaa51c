"""Make and remove a veth pair between container and host, as the reference plugins (plugins `pkg/ip`, SetupVeth)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel import removal
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import Link, Rtnl
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
    """What is known of a veth pair before its creation ends, and needed to undo that."""

    host_name: str = ""
    """Name of the host's end. Set before the creation: the name that it gets if that is free."""
    host_mac: str = ""
    """MAC address of the host's end; empty: a random one."""


def make(netns: PodNetns, ifname: str, pair: Pair, *, mtu: int, mac: str = "") -> tuple[Link, Link]:
    """Make a veth pair: an end on the host, up, and `ifname` in the pod, down. Returns host's and pod's end.

    Raises InternalError.
    """
    # Chosen here, so that the pod's end need not be read.
    mac = mac or random_mac()
    host = add(netns.host, ifname, netns.pod, netns.pod_netns, pair, mtu=mtu, mac=mac)
    with netns.on_host():
        ignore_advertisements(host.name)
    # Kernels omit the other end's index if it is the same number.
    index = host.peer or host.index
    return host, Link(index, ifname, mac, host.mtu, is_up=False, operstate="DOWN", kind="veth", peer=host.index)


def random_mac() -> str:
    """Return a MAC address: unicast, administered locally, as the kernel's own are.

    An address that a program has set stays: udev replaces those of the kernel, and a bridge's own follows its ports.
    """
    octets = bytearray(secrets.token_bytes(6))
    octets[0] = octets[0] & 0xFE | 0x02
    return octets.hex(":")


def ignore_advertisements(ifname: str) -> None:
    """Make the host ignore router advertisements of the container. Call it in the host's namespace."""
    interfaces.try_sysctl("ipv6", "conf", ifname, "accept_ra", value="0")


def add(host: Rtnl, ifname: str, there: Rtnl, netns: int, pair: Pair, *, mtu: int, mac: str = "") -> Link:
    """Add a veth pair: an end on the host, up, with a random name (set in `pair`), and `ifname` in `there`.

    `netns`: descriptor of the namespace of `there`. Returns the host's end. Raises InternalError.
    """
    name = ""
    for _ in range(_NAME_ATTEMPTS):
        name = pair.host_name or f"veth{secrets.token_hex(4)}"
        # Stored before the request: a request that fails may have been carried out.
        pair.host_name = name
        try:
            return host.add_veth(name, ifname, netns, mtu=mtu, mac=pair.host_mac or random_mac(), peer_mac=mac)
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
            with step(f'make veth pair "{ifname}" - "{name}"'):
                raise error
    raise InternalError(
        f'failed to find a free name for the host\'s end of "{ifname}"', f"the last one tried was {name!r}"
    )


def host_end(made: Sequence[Interface]) -> Interface | None:
    """Return the entry of the host's end, known by the form of its name: `made` may have others of the host."""
    return next((item for item in made if not item.sandbox and _HOST_END.fullmatch(item.name)), None)


def undo(pair: Pair, netns: PodNetns) -> None:
    """Remove the pair of `add` by its end on the host, which may exist without the container's namespace."""
    if pair.host_name and (link := netns.host.find_link(pair.host_name)):
        netns.host.delete_link(link.index)


def remove(call: Call, netns: PodNetns, *, addresses: bool = False) -> tuple[IpInterface, ...]:
    """Remove the container's link, and with a veth the host's end. It is no error if the link is gone.

    The first call of a request removes all links of `PodNetns.leaving`. If the container's end was renamed, the pair is
    removed by the host's end that ADD reported. `addresses`: return those of the link. Raises CniError.
    """
    if call.invocation.ifname in netns.removed:
        return netns.removed[call.invocation.ifname]
    with interfaces.ignoring_absent_netns(), interfaces.located(call), netns.inside():
        return _remove(call, netns, addresses=addresses)
    return ()


def _remove(call: Call, netns: PodNetns, *, addresses: bool) -> tuple[IpInterface, ...]:
    """Remove the call's link, and all in `PodNetns.leaving`; return the link's addresses, not link-local ones."""
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
    return before.get(ifname, ())


def _remove_host_end(call: Call, netns: PodNetns) -> None:
    """Remove the host's end that ADD reported, if the link with this name has the reported MAC address."""
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
