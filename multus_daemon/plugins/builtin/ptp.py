"""`ptp`: a veth pair between container and host; the host is the container's only neighbour.

The kernel state is that of the reference plugin (containernetworking/plugins `plugins/main/ptp`), so that either can
remove what the other made; `docs/builtin-plugins.md` lists the differences. IPv6 addresses, and the link-local address
of the host's end, have no duplicate address detection, which would take one to two seconds; the key `dad` enables it.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import IpAddress, IpInterface
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import configuration, interfaces, masquerade, restore, veth
from multus_daemon.plugins.builtin.contract import Call, Undo, required_ipam_type, run_ipam
from multus_daemon.plugins.builtin.interfaces import Change
from multus_daemon.plugins.plugin import Difference
from multus_daemon.spec.cni import conf, gojson
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Dns, Interface, Result

_KEYS: Final = configuration.COMMON_KEYS.union(("mtu", "dad"), masquerade.KEYS)
# Position of the container's end in the result's interfaces; the host's end comes first.
_CONTAINER_INTERFACE: Final = 1

_Ends = Sequence[tuple[IpInterface, IpAddress]]
"""The container's addresses, each with its gateway."""


@dataclass(frozen=True, slots=True)
class _Config:
    mtu: int
    """Bytes, for both ends; 0: the kernel's default."""
    dns: Dns | None
    """Replaces the IPAM plugin's; None: keep that one."""
    masquerade: bool
    dad: bool
    """Run duplicate address detection for IPv6 addresses."""


def _read(call: Call) -> _Config:
    """Raises DecodingFailureError, InvalidNetworkConfigError."""
    fields = call.fields
    with configuration.reading(call.name):
        config = _Config(
            mtu=configuration.mtu(fields),
            dns=configuration.own_dns(fields),
            masquerade=masquerade.is_wanted(call),
            dad=bool(gojson.get_bool(fields, "dad")),
        )
    required_ipam_type(call)
    return config


def unsupported(call: Call) -> str:
    """Name the first key or value that this plugin does not know."""
    return configuration.unknown_key(call.fields, _KEYS) or masquerade.unsupported(call)


def validate(call: Call) -> None:
    """Read the configuration."""
    conf.once(call.fields, _read, functools.partial(_read, call))


def add(call: Call, netns: PodNetns) -> Result:
    """Make the pair. If it raises, nothing is left, and the addresses are released."""
    config = conf.once(call.fields, _read, functools.partial(_read, call))
    ifname = call.invocation.ifname
    with Undo() as undo:
        interfaces.require_absent(call, netns, kind="veth")
        undo.arm("release the addresses", functools.partial(run_ipam, call, "DEL"))
        answer = run_ipam(call, "ADD")
        _require_gateways(answer, call.name)
        pair = veth.Pair()
        undo.arm("remove the veth pair", functools.partial(veth.undo, pair, netns))
        with interfaces.located(call):
            netns.require()
            host, container = _connect(config, netns, ifname=ifname, wanted=answer, pair=pair)
        if config.masquerade:
            addresses = [inet.interface_of(ip.address) for ip in answer.ips]
            undo.arm("stop masquerading", functools.partial(masquerade.remove, call, addresses))
            masquerade.add(call, addresses)
    return replace(
        answer,
        interfaces=(Interface(host.name, host.mac), interfaces.made(call, container)),
        ips=tuple([replace(ip, interface=_CONTAINER_INTERFACE) for ip in answer.ips]),
        dns=answer.dns if config.dns is None else config.dns,
    )


def delete(call: Call, netns: PodNetns) -> None:
    """Remove the pair, release the addresses, remove the rules. Absent ones are not an error.

    A free address may be another pod's at once, so the interface goes first.
    """
    removed = masquerade.remove_link(call, netns)
    run_ipam(call, "DEL")
    masquerade.forget(call, removed)


def check(call: Call, netns: PodNetns) -> None:
    """Compare the container's end with prevResult. The host's end is not compared, as in the reference."""
    with interfaces.located(call), netns.inside():
        pass
    run_ipam(call, "CHECK")
    previous, expected = interfaces.previous_result(call, "ptp")
    with interfaces.located(call), netns.inside():
        # The reference does not look for the gateways' routes, without which nothing leaves the pod.
        interfaces.check(netns, expected, previous, "veth", gateways=True)


def keeps(call: Call) -> bool:
    """Report whether there may be rules."""
    return configuration.makes_rules(call.fields)


def status(call: Call) -> None:
    """Raise CniError if the configuration is not usable, or the IPAM plugin is not ready."""
    validate(call)
    run_ipam(call, "STATUS")


def _require_gateways(answer: Result, network: str) -> None:
    for ip in answer.ips:
        if not ip.gateway or (":" not in ip.gateway) is not ip.is_ipv4:
            problem = "gives no gateway" if not ip.gateway else f"gives the gateway {ip.gateway} of the other family"
            raise InvalidNetworkConfigError(
                f"IPAM plugin {problem} for {ip.address}",
                f"network {network!r}: ptp routes all traffic through the host, which answers at the gateway's "
                "address; set it in the ipam section",
            )


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return what is not as the recorded result has it. Raises CniError."""
    config = _read(call)
    result, own = restore.recorded(call)
    host_entry = veth.host_end(result.interfaces)
    remake = functools.partial(_remake, call, netns, config, result, own, host_entry)
    mtu, ends = config.mtu or restore.VETH_MTU, _ends(result)
    with interfaces.located(call), netns.inside():
        found = list(restore.forwarding(netns, result.ips))
        pair = restore.pair(netns, own, host_entry, remake)
        if pair.difference:
            found.append(pair.difference)
        if pair.host:
            mac = host_entry.mac if host_entry else ""
            found += restore.link(netns.host, pair.host, mac=mac, mtu=mtu, on_host=True)
            found += restore.missing(netns, pair.host, _host_side(pair.host, ends, dad=config.dad), on_host=True)
        if pair.pod:
            addresses = interfaces.addresses(pair.pod, result.ips, dad=config.dad)
            changes = [*addresses, *_container_routes(pair.pod, result, ends)]
            found += restore.pod(call, netns, pair.pod, own, changes, mtu=mtu)
    if config.masquerade:
        found += masquerade.differences(call, [address for address, _ in ends])
    return found


def _remake(
    call: Call, netns: PodNetns, config: _Config, result: Result, own: Interface, host: Interface | None
) -> None:
    """Make the pair anew, with the recorded names, MAC addresses, addresses and routes."""
    with Undo() as undo, interfaces.located(call), netns.inside():
        pair = restore.new_pair(netns, host)
        undo.arm("remove the veth pair", functools.partial(veth.undo, pair, netns))
        end, _ = _connect(config, netns, ifname=own.name, wanted=result, pair=pair, mac=own.mac)
        restore.set_mac(netns, end, host)


def _ends(wanted: Result) -> _Ends:
    # A binary of the list may have added addresses without one.
    return [(inet.interface_of(ip.address), inet.address_of(ip.gateway)) for ip in wanted.ips if ip.gateway]


def _connect(
    config: _Config, netns: PodNetns, *, ifname: str, wanted: Result, pair: veth.Pair, mac: str = ""
) -> tuple[Link, Link]:
    """Make all changes in the kernel; return the host's and the container's end."""
    interfaces.enable_forwarding(netns, wanted.ips)
    host, container = veth.make(netns, ifname, pair, mtu=config.mtu, mac=mac)
    ends = _ends(wanted)
    if not config.dad and any(address.version == 6 for address, _ in ends):
        # The kernel uses the link-local address to find its neighbour, but only after the detection has ended.
        with netns.on_host():
            interfaces.try_sysctl("ipv6", "conf", host.name, "accept_dad", value="0")
    interfaces.bring_up(netns, container, wanted, _container_routes(container, wanted, ends), dad=config.dad)
    interfaces.apply(netns.host, _host_side(host, ends, dad=config.dad))
    return host, container


def _container_routes(link: Link, wanted: Result, ends: _Ends) -> list[Change]:
    """Return the routes of `wanted`; neighbours on the subnet are reached through the host instead of by ARP."""
    # A gateway outside the subnet is unreachable without a route of its own, and so is any other in the end.
    first = {gateway: _to_gateway(link, address, gateway) for address, gateway in reversed(ends)}
    changes = [*reversed(first.values()), *interfaces.routes(link, wanted)]
    replaced: set[inet.IpNetwork] = set()
    for address, gateway in ends:
        network = address.network
        # An address of full length has no subnet; several addresses of one subnet have one route.
        if network.prefixlen < network.max_prefixlen and network not in replaced:
            replaced.add(network)
            # The kernel makes it with the first address of the subnet only, and when the link comes up.
            connected = dataclasses.replace(inet.connected(address, link.index), source=None)
            what = f"delete route '{network} dev {link.name}'"
            changes.append(Change(what, inet.delete_route(connected), tolerated=errno.ESRCH))
            route = inet.Route(inet.interface_of(network), link.index, gateway=gateway, source=address.ip)
            what = f"add route '{network} via {gateway} dev {link.name} src {address.ip}'"
            changes.append(Change(what, inet.add_route(route), adds=route))
    return changes


def _to_gateway(link: Link, address: IpInterface, gateway: IpAddress) -> Change:
    route = inet.Route(inet.interface_of(gateway), link.index, source=address.ip, scope=inet.SCOPE_LINK)
    what = f"add route '{route.dst} dev {link.name} scope link src {address.ip}'"
    return Change(what, inet.add_route(route), adds=route)


def _host_side(host: Link, ends: _Ends, *, dad: bool) -> list[Change]:
    """Return the gateways' addresses on the host's end, and a route to each container address."""
    changes: list[Change] = []
    gateways: set[IpAddress] = set()
    for address, gateway in ends:
        if gateway not in gateways:
            gateways.add(gateway)
            own = inet.interface_of(gateway)
            request = inet.add_address(host.index, own, broadcast=False, dad=dad)
            changes.append(Change(f'add IP address {gateway} to "{host.name}" on the host', request, adds=own))
        route = inet.Route(inet.interface_of(address.ip), host.index, scope=inet.SCOPE_HOST)
        what = f"add route '{route.dst} dev {host.name} scope host' on the host"
        # An administrator may have added it, so EEXIST is tolerated, as in the reference.
        changes.append(Change(what, inet.add_route(route), tolerated=errno.EEXIST, adds=route))
    return changes
