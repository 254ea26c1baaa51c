"""Interfaces, addresses and routes in a pod, as the kernel has them."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from multus_daemon.kernel.pod_netns import PodNetns


def look(netns: str) -> dict[str, Any]:
    """`{"interfaces": [{name, mac, mtu, up, addresses}], "routes": [{dst, gw, interface}]}`, without loopback.

    Raises OSError if the namespace can't be entered.
    """
    with PodNetns(netns) as opened, opened.inside():
        names = {index: name for index, name in socket.if_nameindex() if name != "lo"}
        interfaces = []
        for name in names.values():
            link = opened.pod.link(name)
            # Every IPv6 interface has a link-local address, whatever its network.
            addresses = (item.address for item in opened.pod.addresses(link.index) if not item.address.is_link_local)
            entry = {"name": name, "mac": link.mac, "mtu": link.mtu, "up": link.is_up}
            interfaces.append({**entry, "addresses": list(map(str, addresses))})
        routes = [
            {"dst": str(route.dst), "gw": str(route.gateway or ""), "interface": names[route.oif]}
            for family in (socket.AF_INET, socket.AF_INET6)
            for route in opened.pod.routes(family)
            if route.oif in names and not (route.dst.is_link_local or route.dst.is_multicast)
        ]
    return {"interfaces": interfaces, "routes": routes}


def gateways(view: dict[str, Any], interface: str) -> list[str]:
    """Return the next hops behind `interface` in the answer of `look`, IPv4 first."""
    hops = {route["gw"] for route in view["routes"] if route["interface"] == interface and route["gw"]}
    return sorted(hops, key=lambda gateway: (ipaddress.ip_address(gateway).version, gateway))
