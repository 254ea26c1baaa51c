"""A veth pair between a container and the host, as the reference plugins make it (plugins `pkg/ip`, SetupVeth).

The functions raise InternalError.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel import removal, sysctl
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.links import ANY_LINK, Link, Rtnl
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin import interfaces
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import absent_is_done, step
from multus_daemon.spec.cni.errors import InternalError, InvalidNetnsError
from multus_daemon.spec.cni.result import Interface

_NAME_ATTEMPTS: Final = 10
_HOST_END: Final = re.compile("veth[0-9a-f]{8}")


@dataclass(slots=True)
class Pair:
    """What may have been made so far, for who undoes it."""

    host_name: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """What a DEL found."""

    is_namespace_gone: bool = False
    addresses: tuple[IpInterface, ...] | None = None
    """Those that the link had, without the link-local ones; None where there was no link."""
    living: tuple[IpInterface, ...] = ()
    """Where there was no link, or they were asked for: the addresses of the namespace's other links."""


def make(session: Session, ifname: str, pair: Pair, *, mtu: int, mac: str = "") -> tuple[Link, Link]:
    """The pair, up on the host, and `ifname` in the pod, down, with `mac` or a random one; both ends as they are."""
    # Chosen here, so that the pod's end need not be read.
    mac = mac or _random_mac()
    told = add(session.host, ifname, session.pod, session.pod_netns, pair, mtu=mtu, mac=mac)
    with step(f'find the host\'s end "{pair.host_name}"'):
        host = told or session.host.link(pair.host_name)
    with session.on_host():
        ignore_advertisements(host.name)
    # Kernels that leave the other end's index out do so where it is the same number.
    index = host.peer or host.index
    return host, Link(index, ifname, mac, host.mtu, is_up=False, operstate="DOWN", kind="veth", peer=host.index)


def _random_mac() -> str:
    """Of one link, administered locally, as the kernel's own are."""
    octets = bytearray(secrets.token_bytes(6))
    octets[0] = octets[0] & 0xFE | 0x02
    return octets.hex(":")


def ignore_advertisements(ifname: str) -> None:
    """Router advertisements of a container must not configure the host. In the host's namespace."""
    # Without IPv6 there is nothing to switch off.
    with contextlib.suppress(OSError):
        sysctl.write("ipv6", "conf", ifname, "accept_ra", value="0")


def skip_detection(ifname: str) -> None:
    """Nobody is asked whether the link's link-local address is a duplicate. In the host's namespace.

    For a host's end that is up and has no carrier yet: from that address the kernel asks for the neighbour to which it
    passes something on, and until the detection has ended, two seconds, it asks nobody.
    """
    # Without IPv6 there is nothing to detect, and where it can't be written the neighbour is heard later.
    with contextlib.suppress(OSError):
        sysctl.write("ipv6", "conf", ifname, "accept_dad", value="0")


def add(host: Rtnl, ifname: str, there: Rtnl, netns: int, pair: Pair, *, mtu: int, mac: str = "") -> Link | None:
    """A pair: up on the host, under a random name, which is in `pair`, and `ifname` `there`, where `netns` is open.

    The host's end, where the kernel tells of it.
    """
    name = ""
    for _ in range(_NAME_ATTEMPTS):
        name = f"veth{secrets.token_hex(4)}"
        # Before it is there: whether a request was done that failed otherwise is not always known.
        pair.host_name = name
        try:
            return host.add_veth(name, ifname, netns, mtu=mtu, peer_mac=mac)
        except FileExistsError as error:
            # Somebody else's.
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


def undo(pair: Pair, session: Session) -> None:
    """Remove what `make` has made: by the host's end, which is there whatever became of the container's namespace."""
    if pair.host_name:
        with absent_is_done():
            session.host.delete_link(session.host.link(pair.host_name).index)


def remove(call: Call, session: Session, *, others: bool = False) -> Removed:
    """Remove the container's end, and with it the host's, or another plugin's link. Absent is done. Raises CniError.

    The first of several that leave in one request takes all of them along (`Session.leaving`). Where the container's
    end has another name by now, the pair goes by the host's, which the ADD has reported. `others`: tell the addresses
    of the namespace's other links in any case.
    """
    if not call.invocation.netns:
        return Removed(is_namespace_gone=True)
    ifname = call.invocation.ifname
    if ifname in session.removed and not others:
        return Removed(addresses=session.removed[ifname])
    try:
        with interfaces.inside(call, session):
            return _remove(session, ifname, _host_end(call), others=others)
    except InvalidNetnsError as error:
        if not (isinstance(error.__cause__, NamespaceError) and error.__cause__.is_absent):
            raise
        return Removed(is_namespace_gone=True)


def _host_end(call: Call) -> Interface | None:
    """The host's end of the pair, as the ADD has reported it. Its name is one that only `add` and its like give."""
    made = () if call.prev_result is None else call.prev_result.interfaces
    return next((item for item in made if not item.sandbox and _HOST_END.fullmatch(item.name)), None)


def _remove(session: Session, ifname: str, host_end: Interface | None, *, others: bool) -> Removed:
    addresses = session.removed.get(ifname)
    if addresses is None:
        together = session.leaving if ifname in session.leaving else (ifname,)
        with step(f'remove "{ifname}"'):
            found = {link.name: link for name in together if (link := session.pod.find_link(name))}
            before = {name: _addresses(session, link) for name, link in found.items()}
            refused = removal.remove([link.index for link in found.values()])
            session.removed |= {name: before[name] for name, link in found.items() if link.index not in refused}
            if ifname in found and found[ifname].index in refused:
                raise refused[found[ifname].index]
        addresses = before.get(ifname)
        if host_end is not None and (ifname not in found or found[ifname].kind != "veth"):
            _remove_host_end(session, host_end)
    if addresses is not None and not others:
        return Removed(addresses=addresses)
    with step("list the addresses of other interfaces"):
        living = tuple(item.address for item in session.pod.addresses(ANY_LINK))
    return Removed(addresses=addresses, living=living)


def _remove_host_end(session: Session, reported: Interface) -> None:
    with step(f'remove "{reported.name}" on the host'):
        link = session.host.find_link(reported.name)
        if link is not None and (link.kind, link.mac) == ("veth", reported.mac.lower()):
            with session.on_host():
                refused = removal.remove([link.index])
            for error in refused.values():
                raise error


def _addresses(session: Session, link: Link) -> tuple[IpInterface, ...]:
    found = [item.address for item in session.pod.addresses(link.index)]
    return tuple(address for address in found if not address.ip.is_link_local)
