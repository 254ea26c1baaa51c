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

from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import IpAddress, IpInterface
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import contract, interfaces, masquerade, restore, veth
from multus_daemon.plugins.builtin.contract import Call, Undo, required_ipam_type
from multus_daemon.plugins.builtin.interfaces import Change
from multus_daemon.plugins.builtin.link_plugin import LinkConfig, PairPlugin, own_dns, veth_mtu
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from multus_daemon.spec.cni.result import Interface, Result

KEYS: Final = ("mtu", "dad", *masquerade.KEYS)

_Ends = Sequence[tuple[IpInterface, IpAddress]]
"""The container's addresses, each with its gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config(LinkConfig):
    masquerade: bool
    dad: bool
    """True: run duplicate address detection for IPv6 addresses."""


class _Ptp(PairPlugin[_Config]):
    def read(self, call: Call) -> _Config:
        fields = call.fields
        with contract.reading(call.name):
            config = _Config(
                mtu=veth_mtu(fields),
                dns=own_dns(fields),
                masquerade=masquerade.is_wanted(call),
                dad=bool(gojson.get_bool(fields, "dad")),
            )
        required_ipam_type(call)
        return config

    def make(
        self, call: Call, netns: PodNetns, config: _Config, undo: Undo, host: Interface | None = None
    ) -> Sequence[Link]:
        pair = restore.new_pair(netns, host)
        undo.arm("remove the veth pair", functools.partial(veth.undo, pair, netns))
        return veth.make(netns, call.invocation.ifname, pair, mtu=config.mtu, mac=config.mac)

    def completed(self, call: Call, config: _Config, answer: Result) -> Result:
        """Return `answer` if it has a gateway for each address. Raises InvalidNetworkConfigError."""
        for ip in answer.ips:
            if not ip.gateway or (":" not in ip.gateway) is not ip.is_ipv4:
                other = f"gives the gateway {ip.gateway} of the other family"
                raise InvalidNetworkConfigError(
                    f"IPAM plugin {other if ip.gateway else 'gives no gateway'} for {ip.address}",
                    remedy=f"network {call.name!r}: ptp routes all traffic through the host, which answers at the "
                    "gateway's address; set it in the ipam section",
                )
        return answer

    def configure(
        self, call: Call, netns: PodNetns, config: _Config, made: Sequence[Link], wanted: Result
    ) -> Sequence[Interface]:
        host, container = made
        interfaces.enable_forwarding(netns, wanted.ips)
        ends = _ends(wanted)
        if not config.dad and any(address.version == 6 for address, _ in ends):
            # The kernel uses the link-local address to find its neighbour, but only after the detection has ended.
            with netns.on_host():
                interfaces.try_sysctl("ipv6", "conf", host.name, "accept_dad", value="0")
        interfaces.bring_up(netns, container, wanted, _container_routes(container, wanted, ends), dad=config.dad)
        interfaces.apply(netns.host, _host_side(host, ends, dad=config.dad))
        return Interface(host.name, host.mac), interfaces.made(call, container)

    def differences(self, call: Call, netns: PodNetns) -> list[Difference]:
        config, (result, own) = self.read(call), restore.recorded(call)
        again = dataclasses.replace(config, mac=own.mac)
        remake = functools.partial(self.remake, call, netns, again, result)
        mtu, ends = config.mtu or restore.VETH_MTU, _ends(result)
        with interfaces.located(call), netns.inside():
            found = list(restore.forwarding(netns, result.ips))
            pod, host, of_pair = restore.pair(netns, own, result, remake, mtu=mtu)
            found += of_pair
            if host:
                found += restore.missing(netns, host, _host_side(host, ends, dad=config.dad), on_host=True)
            if pod:
                addresses = interfaces.addresses(pod, result.ips, dad=config.dad)
                changes = [*addresses, *_container_routes(pod, result, ends)]
                found += restore.pod(call, netns, pod, own, changes, mtu=mtu)
        if config.masquerade:
            found += masquerade.differences(call, [address for address, _ in ends])
        return found


unsupported, read, add, delete, check, status, keeps, differences = _Ptp().functions


def _ends(wanted: Result) -> _Ends:
    # A binary of the list may have added addresses without one.
    return [(inet.interface_of(ip.address), inet.address_of(ip.gateway)) for ip in wanted.ips if ip.gateway]


def _container_routes(link: Link, wanted: Result, ends: _Ends) -> list[Change]:
    """Return the changes that add the container's routes; the subnet's other hosts are reached through the host."""
    # A gateway outside the subnet is unreachable without a route of its own, and so is any other in the end.
    sources = {gateway: address.ip for address, gateway in reversed(ends)}
    changes = []
    for gateway, source in reversed(sources.items()):
        route = inet.Route(inet.interface_of(gateway), link.index, source=source, scope=inet.SCOPE_LINK)
        what = f"add route '{route.dst} dev {link.name} scope link src {source}'"
        changes.append(Change(what, inet.add_route(route), adds=route))
    changes += interfaces.routes(link, wanted)
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


def _host_side(host: Link, ends: _Ends, *, dad: bool) -> list[Change]:
    """Return the changes that add the gateways' addresses to the host's end, and a route to each container address."""
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
