"""`macvlan`: an interface on top of one of the host's (or of the container's own), with a MAC address of its own.

The kernel state is that of the reference plugin (containernetworking/plugins `plugins/main/macvlan`), so that either
can remove what the other made. Different on purpose: an ADD that fails leaves nothing behind; an interface that exists
is found before anything is made; MAC addresses are compared in the kernel's spelling.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import socket
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel import sysctl
from multus_daemon.kernel.links import MACVLAN_MODES, Link, Rtnl
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.ops import Session
from multus_daemon.plugins.builtin import checks, configuration, interfaces, ipam, veth
from multus_daemon.plugins.builtin.contract import Call
from multus_daemon.plugins.builtin.interfaces import absent_is_done, step
from multus_daemon.plugins.builtin.undo import Undo
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import (
    DecodingFailureError,
    InternalError,
    InvalidNetnsError,
    InvalidNetworkConfigError,
)
from multus_daemon.spec.cni.result import Dns, Interface, Result, read_dns

_KEYS: Final = ("master", "mode", "mtu", "mac", "linkInContainer", "bcqueuelen")
_DEFAULT_MODE: Final = "bridge"
_QUEUE_MAX: Final = 2**32 - 1
_NAME_ATTEMPTS: Final = 10


@dataclass(frozen=True, slots=True)
class _Config:
    master: str
    """Empty: the interface of the default route."""
    in_container: bool
    """The master is the container's, not the host's."""
    mode: str
    mtu: int
    """In bytes; 0: the master's."""
    mac: str
    """Empty: a random one."""
    broadcast_queue: int
    """In packets; 0: the kernel's default."""
    dns: Dns
    """Takes the place of what the IPAM plugin said, empty too."""


@dataclass(slots=True)
class _Made:
    """What has been made so far, written by the thread that makes it and read by who undoes it after its end."""

    temporary_name: str = ""
    index: int = 0


def unsupported(call: Call) -> str:
    """See `contract.Plugin`."""
    if found := configuration.unknown_key(call.fields, configuration.COMMON_KEYS.union(_KEYS)):
        return found
    mode = gojson.get_str(call.fields, "mode")
    return "" if not mode or mode in MACVLAN_MODES else f'mode: "{mode}"'


def validate(call: Call) -> None:
    """See `contract.Plugin`."""
    call.once(_read)


def add(call: Call, session: Session) -> Result:
    """Make the interface. Raises CniError, Interrupted; nothing is left then, addresses included.

    It comes before the addresses: an IPAM plugin such as dhcp needs it.
    """
    config = call.once(_read)
    master = _master(call, session, config)
    with Undo() as undo:
        interfaces.require_absent(call, session, kind="macvlan")
        made = _Made()
        undo.arm("remove the interface", functools.partial(_undo, call, session, made))
        with interfaces.inside(call, session):
            link = _create(session, config=config, master=master, ifname=call.invocation.ifname, made=made)
        wanted = Result(interfaces=(Interface(link.name, link.mac, sandbox=call.invocation.netns),))
        if ipam.is_named(call):
            undo.arm("release the addresses", functools.partial(ipam.delete, call))
            answer = ipam.add(call)
            ips = tuple(replace(ip, interface=0) for ip in answer.ips)
            wanted = replace(wanted, ips=ips, routes=answer.routes)
        with interfaces.inside(call, session):
            _configure(session, link=link, wanted=wanted)
    return replace(wanted, dns=config.dns)


def delete(call: Call, session: Session) -> None:
    """Release the addresses, then remove the interface. Absent is done."""
    if ipam.is_named(call):
        ipam.delete(call)
    veth.remove(call, session)


def check(call: Call, session: Session) -> None:
    """Compare the interface, its addresses and routes with prevResult; the master is there."""
    config = _read(call)
    _master(call, session, config)
    if ipam.is_named(call):
        ipam.check(call)
    previous = checks.previous_result(call, "macvlan")
    expected = checks.container_interface(call, previous)
    with interfaces.inside(call, session):
        link = checks.check_link(session, expected, "macvlan")
        if link.mode != config.mode:
            raise InternalError(
                f"container macvlan mode {link.mode} does not match expected value: {config.mode}",
                f'interface "{link.name}"',
            )
        checks.check_addresses(session, link, previous)
        checks.check_routes(session, previous)


def status(call: Call) -> None:
    """Ready where the configuration is usable and the IPAM plugin, if there is one, is ready."""
    _read(call)
    if ipam.is_named(call):
        ipam.status(call)


def _read(call: Call) -> _Config:
    """runtimeConfig before CNI_ARGS before `mac`.

    Raises DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7).
    """
    fields = call.fields
    try:
        by_args = configuration.own_args(call.invocation.args, ("MAC",)).get("MAC")
        runtime = gojson.get_object(fields, "runtimeConfig") or {}
        mac = gojson.get_str(runtime, "mac") or by_args or gojson.get_str(fields, "mac")
        queue = gojson.get_int(fields, "bcqueuelen") or 0
        if not 0 <= queue <= _QUEUE_MAX:
            raise gojson.JsonError(f"bcqueuelen: a number of 32 bits is needed, not {queue}")
        config = _Config(
            master=gojson.get_str(fields, "master") or "",
            in_container=bool(gojson.get_bool(fields, "linkInContainer")),
            mode=gojson.get_str(fields, "mode") or _DEFAULT_MODE,
            mtu=gojson.get_int(fields, "mtu") or 0,
            mac=configuration.mac_address(mac) if mac else "",
            broadcast_queue=queue,
            dns=read_dns(gojson.get_object(fields, "dns") or {}),
        )
    except gojson.JsonError as error:
        raise DecodingFailureError(f"failed to load netconf: {error}", f"network {call.name!r}") from error
    if config.mode not in MACVLAN_MODES:
        raise InvalidNetworkConfigError(
            f'unknown macvlan mode: "{config.mode}"', f"network {call.name!r}: one of {', '.join(MACVLAN_MODES)}"
        )
    return config


# --- the master ------------------------------------------------------------------------------------------------------


def _master(call: Call, session: Session, config: _Config) -> Link:
    """The interface underneath, which allows the configured MTU. Raises CniError."""
    find = functools.partial(_find_master, config=config)
    if config.in_container:
        with interfaces.inside(call, session):
            return find(session.pod)
    return find(session.host)


def _find_master(kernel: Rtnl, *, config: _Config) -> Link:
    if config.master:
        with step(f'lookup master "{config.master}"'):
            link = kernel.link(config.master)
    else:
        link = _of_default_route(kernel)
    if not 0 <= config.mtu <= link.mtu:
        raise InvalidNetworkConfigError(
            f"invalid MTU {config.mtu}, must be [0, master MTU({link.mtu})]", f'the master is "{link.name}"'
        )
    return link


def _of_default_route(kernel: Rtnl) -> Link:
    with step("find the interface of the default route"):
        routes = [route for family in (socket.AF_INET, socket.AF_INET6) for route in kernel.routes(family)]
        for route in routes:
            if route.oif and not route.dst.network.prefixlen:
                return kernel.link_at(route.oif)
    raise InternalError("no default route interface found", "set 'master' in the configuration")


# --- in the pod's thread ---------------------------------------------------------------------------------------------


def _create(session: Session, *, config: _Config, master: Link, ifname: str, made: _Made) -> Link:
    """The interface, down."""
    _add(session, config, master, made)
    with step(f'find macvlan "{made.temporary_name}"'):
        made.index = session.pod.link(made.temporary_name).index
    with step(f'rename macvlan to "{ifname}"'):
        session.pod.rename(made.index, ifname)
        return session.pod.link(ifname)


def _add(session: Session, config: _Config, master: Link, made: _Made) -> None:
    # The kernel looks for the name in the namespace of the master as well: "eth0" would be taken there.
    kernel = session.pod if config.in_container else session.host
    with step(f'create macvlan on "{master.name}"'):
        for attempt in range(1, _NAME_ATTEMPTS + 1):
            made.temporary_name = f"veth{secrets.token_hex(4)}"
            try:
                kernel.add_macvlan(
                    made.temporary_name,
                    master.index,
                    session.pod_netns,
                    mode=config.mode,
                    mtu=config.mtu,
                    mac=config.mac,
                    broadcast_queue=config.broadcast_queue,
                )
                return
            except FileExistsError:
                made.temporary_name = ""
                if attempt == _NAME_ATTEMPTS:
                    raise


def _configure(session: Session, *, link: Link, wanted: Result) -> None:
    """Addresses and routes, if there are any, and the interface up."""
    if not wanted.ips:
        with step(f'set "{link.name}" up'):
            session.pod.set_up(link.index)
        return
    # So that neighbours forget whoever had the addresses before. As with the reference no failure: a kernel without
    # IPv6, or a read-only /proc, does not have them.
    for parts in (("ipv4", "conf", link.name, "arp_notify"), ("ipv6", "conf", link.name, "ndisc_notify")):
        with contextlib.suppress(OSError):
            sysctl.write(*parts, value="1")
    interfaces.bring_up(session, link, wanted, interfaces.routes(link, wanted))


def _undo(call: Call, session: Session, made: _Made) -> None:
    """Remove what `_create` has made. It goes with its namespace."""
    if not made.temporary_name:
        return
    try:
        with interfaces.inside(call, session), absent_is_done():
            session.pod.delete_link(made.index or session.pod.link(made.temporary_name).index)
    except InvalidNetnsError as error:
        if not (isinstance(error.__cause__, NamespaceError) and error.__cause__.is_absent):
            raise
