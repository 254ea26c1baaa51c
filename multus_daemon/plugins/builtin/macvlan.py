"""`macvlan`: an interface with its own MAC address on top of an interface of the host or the container.

The kernel state is that of the reference plugin (containernetworking/plugins `plugins/main/macvlan`), so that either
can remove what the other made; `docs/builtin-plugins.md` lists the differences.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import secrets
import socket
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel.links import MACVLAN_MODES, Link, Rtnl
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import configuration, interfaces, restore, veth
from multus_daemon.plugins.builtin.contract import Call, Undo, ipam_type, run_ipam
from multus_daemon.plugins.builtin.interfaces import ignoring_absent_link, ignoring_absent_netns, located, step
from multus_daemon.plugins.plugin import Difference
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import InternalError, InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Dns, Interface, Result, read_dns

_KEYS: Final = configuration.COMMON_KEYS.union(("master", "mode", "mtu", "mac", "linkInContainer", "bcqueuelen"))
_DEFAULT_MODE: Final = "bridge"
_NAME_ATTEMPTS: Final = 10


@dataclass(frozen=True, slots=True)
class _Config:
    master: str
    """Empty: the interface of the default route."""
    in_container: bool
    """The master is an interface of the container, not of the host."""
    mode: str
    mtu: int
    """Bytes; 0: the master's."""
    mac: str
    """Empty: a random one."""
    broadcast_queue: int
    """Packets; 0: the kernel's default."""
    dns: Dns
    """Replaces the IPAM plugin's, even if it is empty."""


@dataclass(slots=True)
class _Made:
    """State needed to undo a partial creation."""

    temporary_name: str = ""
    index: int = 0


def unsupported(call: Call) -> str:
    """Name the first key or value that this plugin does not know."""
    if unknown := configuration.unknown_key(call.fields, _KEYS):
        return unknown
    mode = gojson.get_str(call.fields, "mode")
    return "" if not mode or mode in MACVLAN_MODES else f'mode: "{mode}"'


def validate(call: Call) -> None:
    """Read the configuration."""
    _read(call)


def add(call: Call, netns: PodNetns) -> Result:
    """Make the interface. If it raises, nothing is left, and the addresses are released.

    The interface comes before the addresses, because an IPAM plugin such as dhcp needs it.
    """
    config = _read(call)
    master = _master(call, netns, config)
    with Undo() as undo:
        interfaces.require_absent(call, netns, kind="macvlan")
        made = _Made()
        undo.arm("remove the interface", functools.partial(_undo, call, netns, made))
        with located(call), netns.inside():
            link = _create(call, netns, config=config, master=master, ifname=call.invocation.ifname, made=made)
        wanted = Result(interfaces=(interfaces.made(call, link),))
        if ipam_type(call):
            undo.arm("release the addresses", functools.partial(run_ipam, call, "DEL"))
            answer = run_ipam(call, "ADD")
            ips = tuple(replace(ip, interface=0) for ip in answer.ips)
            wanted = replace(wanted, ips=ips, routes=answer.routes)
        with located(call), netns.inside():
            _bring_up(netns, link, wanted)
    return replace(wanted, dns=config.dns)


def delete(call: Call, netns: PodNetns) -> None:
    """Remove the interface, release the addresses. An absent interface is not an error.

    A free address may be another pod's at once, so the interface goes first, unless dhcp needs it to release.
    """
    ipam = ipam_type(call)
    if ipam == "dhcp":
        run_ipam(call, "DEL")
    veth.remove(call, netns)
    if ipam and ipam != "dhcp":
        run_ipam(call, "DEL")


def check(call: Call, netns: PodNetns) -> None:
    """Compare the interface, its addresses and routes with prevResult; look for the master."""
    config = _read(call)
    _master(call, netns, config)
    if ipam_type(call):
        run_ipam(call, "CHECK")
    previous, expected = interfaces.previous_result(call, "macvlan")
    with located(call), netns.inside():
        link = interfaces.check(netns, expected, previous, "macvlan")
        if link.mode != config.mode:
            problem = f"container macvlan mode {link.mode} does not match expected value: {config.mode}"
            raise InternalError(problem, f'interface "{link.name}"')


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return what is not as the recorded result has it. Raises CniError."""
    config = _read(call)
    result, own = restore.recorded(call)
    with located(call), netns.inside():
        with step(f'look for "{own.name}"'):
            link = netns.pod.find_link(own.name)
            moved = interfaces.find_renamed(netns, own, link)
            if moved is None and (link is None or link.kind != "macvlan"):
                moved = restore.with_mac(netns, own, "macvlan")
        if moved is not None:
            problem = restore.of_renamed(own.name, moved, link)
            return [problem] if problem else []
        if link is None:
            return [_absent(call, netns, config, result, own)]
        if wrong := restore.wrong_kind(link, "macvlan"):
            return [wrong]
        found = list(restore.pod(call, netns, link, own, restore.changes(link, result), mtu=config.mtu))
        if link.mode != config.mode:
            found.append(Difference(f'mode of "{link.name}" is {link.mode}, not {config.mode}'))
    return found


def _absent(call: Call, netns: PodNetns, config: _Config, result: Result, own: Interface) -> Difference:
    text = f'interface "{own.name}" is not there'
    kernel = netns.pod if config.in_container else netns.host
    if config.master:
        with step(f'look for master "{config.master}"'):
            if kernel.find_link(config.master) is None:
                return Difference(f'{text}, and its master "{config.master}" is not there')
    return Difference(text, functools.partial(_remake, call, netns, config, result, own))


def _remake(call: Call, netns: PodNetns, config: _Config, result: Result, own: Interface) -> None:
    """Make the interface anew, with the recorded MAC address, addresses and routes."""
    config = dataclasses.replace(config, mac=own.mac or config.mac)
    master, made = _master(call, netns, config), _Made()
    with Undo() as undo, located(call), netns.inside():
        undo.arm("remove the interface", functools.partial(_undo, call, netns, made))
        link = _create(call, netns, config=config, master=master, ifname=own.name, made=made)
        _bring_up(netns, link, result)


def status(call: Call) -> None:
    """Raise CniError if the configuration is not usable, or the IPAM plugin, if there is one, is not ready."""
    _read(call)
    if ipam_type(call):
        run_ipam(call, "STATUS")


def _read(call: Call) -> _Config:
    """Read the configuration. The MAC address comes from runtimeConfig, else CNI_ARGS, else `mac`.

    Raises DecodingFailureError (6), InvalidEnvironmentError (4) for CNI_ARGS, InvalidNetworkConfigError (7).
    """
    fields = call.fields
    with configuration.reading(call.name):
        by_args = configuration.own_args(call.invocation.args, ("MAC",)).get("MAC")
        runtime = gojson.get_object(fields, "runtimeConfig") or {}
        mac = gojson.get_str(runtime, "mac") or by_args or gojson.get_str(fields, "mac")
        queue = gojson.get_int(fields, "bcqueuelen") or 0
        if not 0 <= queue <= configuration.UNSIGNED_MAX:
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
    if config.master and (problem := names.ifname_problem(config.master, longest=names.ALTERNATIVE_NAME_MAX_BYTES)):
        raise InvalidNetworkConfigError(f"master: {configuration.shown(config.master)}: {problem}")
    if config.mode not in MACVLAN_MODES:
        advice = f"network {call.name!r}: one of {', '.join(MACVLAN_MODES)}"
        raise InvalidNetworkConfigError(f'unknown macvlan mode: "{config.mode}"', advice)
    return config


def _master(call: Call, netns: PodNetns, config: _Config) -> Link:
    """Return the interface underneath, which must allow the configured MTU. Raises CniError."""
    if config.in_container:
        with located(call), netns.inside():
            return _find_master(netns.pod, config)
    return _find_master(netns.host, config)


def _find_master(kernel: Rtnl, config: _Config) -> Link:
    if config.master:
        with step(f'lookup master "{config.master}"'):
            link = kernel.link(config.master)
    else:
        with step("find the interface of the default route"):
            routes = [*kernel.routes(socket.AF_INET), *kernel.routes(socket.AF_INET6)]
            oif = next((route.oif for route in routes if route.oif and not route.dst.network.prefixlen), 0)
            if not oif:
                raise InternalError("no default route interface found")
            link = kernel.link_at(oif)
    if not 0 <= config.mtu <= link.mtu:
        raise InvalidNetworkConfigError(
            f"invalid MTU {config.mtu}, must be [0, master MTU({link.mtu})]",
            f'the master is "{link.name}": lower mtu, or raise its',
        )
    return link


def _create(call: Call, netns: PodNetns, *, config: _Config, master: Link, ifname: str, made: _Made) -> Link:
    """Make the interface, down. The kernel looks for the name in the master's namespace too, where `eth0` is taken."""
    kernel = netns.pod if config.in_container else netns.host
    name = _temporary_name(call)
    with step(f'look for "{name}"'):
        # The kernel had no memory to rename it, nor to remove it.
        if (left := netns.pod.find_link(name)) and left.kind == "macvlan":
            netns.pod.delete_link(left.index)
    with step(f'create macvlan on "{master.name}"'):
        for attempt in range(1, _NAME_ATTEMPTS + 1):
            made.temporary_name = name
            try:
                kernel.add_macvlan(
                    made.temporary_name,
                    master.index,
                    netns.pod_netns,
                    mode=config.mode,
                    mtu=config.mtu,
                    mac=config.mac,
                    broadcast_queue=config.broadcast_queue,
                )
                break
            except FileExistsError:
                made.temporary_name = ""
                if attempt == _NAME_ATTEMPTS:
                    raise
                name = f"veth{secrets.token_hex(4)}"
    with step(f'find macvlan "{made.temporary_name}"'):
        made.index = netns.pod.link(made.temporary_name).index
    with step(f'rename macvlan to "{ifname}"'):
        netns.pod.rename(made.index, ifname)
        return netns.pod.link(ifname)


def _temporary_name(call: Call) -> str:
    """Return a name that another attempt for the same interface has too."""
    subject = f"{call.invocation.container_id}/{call.invocation.ifname}"
    return f"veth{hashlib.sha256(subject.encode()).hexdigest()[:8]}"


def _bring_up(netns: PodNetns, link: Link, wanted: Result) -> None:
    if wanted.ips:
        # Neighbours must forget the former owner of the addresses.
        interfaces.try_sysctl("ipv4", "conf", link.name, "arp_notify", value="1")
        interfaces.try_sysctl("ipv6", "conf", link.name, "ndisc_notify", value="1")
    interfaces.bring_up(netns, link, wanted, interfaces.routes(link, wanted))


def _undo(call: Call, netns: PodNetns, made: _Made) -> None:
    """Remove the link that `_create` made. It is gone already if the pod's namespace is."""
    if made.temporary_name:
        with ignoring_absent_netns(), located(call), netns.inside(), ignoring_absent_link():
            netns.pod.delete_link(made.index or netns.pod.link(made.temporary_name).index)
