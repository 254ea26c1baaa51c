"""What a pod has, as the kernel tells it: interfaces, addresses, routes."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from multus_daemon.kernel.inet import Route
from multus_daemon.kernel.ops import PodNetns


def look(netns: str) -> dict[str, Any]:
    """`{"interfaces": [{name, mac, mtu, up, addresses}], "routes": [{dst, gw, interface}]}`, without loopback.

    Raises OSError if the namespace can't be entered.
    """
    with PodNetns(netns) as opened, opened.inside():
        return _look(opened)


def _look(netns: PodNetns) -> dict[str, Any]:
    names = {index: name for index, name in socket.if_nameindex() if name != "lo"}
    interfaces = []
    for name in names.values():
        link = netns.pod.link(name)
        addresses = [item.address for item in netns.pod.addresses(link.index)]
        interfaces.append(
            {
                "name": name,
                "mac": link.mac,
                "mtu": link.mtu,
                "up": link.is_up,
                # Every IPv6 interface has a link-local address; it says nothing about the network.
                "addresses": [str(address) for address in addresses if not address.is_link_local],
            }
        )
    routes = [
        _shown(route, names[route.oif])
        for family in (socket.AF_INET, socket.AF_INET6)
        for route in netns.pod.routes(family)
        if route.oif in names and not (route.dst.is_link_local or route.dst.is_multicast)
    ]
    return {"interfaces": interfaces, "routes": routes}


def _shown(route: Route, interface: str) -> dict[str, str]:
    return {
        "dst": str(route.dst),
        "gw": str(route.gateway) if route.gateway else "",
        "interface": interface,
    }


def gateways(view: dict[str, Any], interface: str) -> list[str]:
    """The next hops behind `interface` in what `look` found, IPv4 first."""
    found = {route["gw"] for route in view["routes"] if route["interface"] == interface and route["gw"]}
    return sorted(found, key=lambda gateway: (ipaddress.ip_address(gateway).version, gateway))
