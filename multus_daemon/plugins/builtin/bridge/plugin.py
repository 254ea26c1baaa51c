"""`bridge`: a veth pair whose host end is a port of a bridge, which may be the containers' gateway.

The kernel state is that of the reference plugin (containernetworking/plugins `plugins/main/bridge`), so that either can
remove what the other made; `docs/builtin-plugins.md` lists the differences. The bridge and its addresses belong to the
network: they stay after a DEL, and after an ADD that fails.
"""

from __future__ import annotations

import functools
import ipaddress
from typing import Final

from msgspec.structs import replace

from multus_daemon.kernel import inet
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin import configuration, interfaces, masquerade, spoofing, veth
from multus_daemon.plugins.builtin.bridge import config, kernel, restore
from multus_daemon.plugins.builtin.bridge.config import BridgeConfig
from multus_daemon.plugins.builtin.contract import Call, Undo, ipam_type, run_ipam
from multus_daemon.plugins.builtin.interfaces import located, step
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.cni.result import Interface, IpConfig, Result, Route

# Position of the container's end in the result's interfaces, behind the bridge and the host's end.
_CONTAINER_INTERFACE: Final = 2


differences = restore.differences


def unsupported(call: Call) -> str:
    """Name the first key or value that this plugin does not know."""
    if unknown := configuration.unknown_key(call.fields, config.KEYS):
        return unknown
    for item in gojson.get_list(call.fields, "vlanTrunk") or ():
        trunk = item if isinstance(item, dict) else {}
        if unknown := configuration.unknown_key(trunk, config.TRUNK_KEYS, within="vlanTrunk: "):
            return unknown
    if gojson.get_bool(call.fields, "macspoofchk") and call.tools is None:
        return "macspoofchk: true"
    return masquerade.unsupported(call)


def validate(call: Call) -> None:
    """Read the configuration."""
    config.read(call)


def add(call: Call, netns: PodNetns) -> Result:
    """Make the port, and the bridge if it is missing. If it raises, the port and everything of it is removed.

    The pair comes before the addresses, because an IPAM plugin such as dhcp needs the container's end.
    """
    settings = config.read(call)
    ifname = call.invocation.ifname
    answer = Result()
    with Undo() as undo:
        interfaces.require_absent(call, netns, kind="veth")
        pair = veth.Pair()
        undo.arm("remove the veth pair", functools.partial(veth.undo, pair, netns))
        with located(call):
            netns.require()
            bridge, host, container = kernel.connect(netns, config=settings, ifname=ifname, pair=pair)
        if settings.spoof_check:
            undo.arm("remove the rules against other MAC addresses", functools.partial(spoofing.remove, call))
            spoofing.add(call, host.name, container.mac)
        if settings.is_layer3:
            undo.arm("release the addresses", functools.partial(run_ipam, call, "DEL"))
            answer = _with_gateways(run_ipam(call, "ADD"), settings)
        with located(call), netns.inside():
            on_host = kernel.configure(
                netns, config=settings, bridge=bridge, host=host, container=container, wanted=answer
            )
        if settings.is_layer3 and settings.masquerade:
            addresses = [inet.interface_of(ip.address) for ip in answer.ips]
            undo.arm("stop masquerading", functools.partial(masquerade.remove, call, addresses))
            masquerade.add(call, addresses)
    made = [Interface(link.name, link.mac) for link in on_host]
    made.insert(_CONTAINER_INTERFACE, interfaces.made(call, container))
    return replace(answer, interfaces=tuple(made), dns=answer.dns if settings.dns is None else settings.dns)


def delete(call: Call, netns: PodNetns) -> None:
    """Remove the pair, release the addresses, remove the rules; the bridge stays. Absent ones are not an error.

    The addresses are released only after the pair has been removed. Later steps run even if one fails.
    """
    removed = masquerade.remove_link(call, netns)
    failures: list[CniError] = []
    try:
        if ipam_type(call):
            run_ipam(call, "DEL")
    except CniError as error:
        failures.append(error)
    try:
        if call.tools is not None and gojson.get_bool(call.fields, "macspoofchk"):
            spoofing.remove(call)
    except gojson.JsonError:
        # An ADD refuses such a configuration.
        pass
    except CniError as error:
        failures.append(error)
    try:
        if ipam_type(call):
            masquerade.forget(call, removed)
    except CniError as error:
        failures.append(error)
    if failures:
        first, *others = failures
        raise first.with_context("; then: " + "; ".join(map(str, others))) if others else first


def keeps(call: Call) -> bool:
    """Report whether there may be rules."""
    return configuration.makes_rules(call.fields)


def status(call: Call) -> None:
    """Raise CniError if the configuration is not usable, or the IPAM plugin, if there is one, is not ready."""
    if config.read(call).is_layer3:
        run_ipam(call, "STATUS")


def _with_gateways(answer: Result, settings: BridgeConfig) -> Result:
    """Assign the addresses to the container's end; add the gateways and default routes that are configured.

    A gateway that the IPAM plugin does not name is the first address of the network.
    """
    ips = tuple([_with_gateway(ip, settings) for ip in answer.ips])
    routes = list(answer.routes)
    for ipv4 in (True, False) if settings.is_default_gateway else ():
        first = next((ip for ip in ips if ip.is_ipv4 is ipv4), None)
        has_default = any(route.is_default and route.gw and route.is_ipv4 is ipv4 for route in routes)
        if first is not None and not has_default:
            routes.append(Route("0.0.0.0/0" if ipv4 else "::/0", gw=first.gateway))
    return replace(answer, ips=ips, routes=tuple(routes))


def _with_gateway(ip: IpConfig, settings: BridgeConfig) -> IpConfig:
    gateway = ip.gateway
    if not gateway and settings.is_gateway:
        network = inet.interface_of(ip.address).network
        try:
            gateway = str(network.network_address + 1)
        except ipaddress.AddressValueError as error:
            raise InternalError(f"no address is left for a gateway of {ip.address}") from error
    return replace(ip, interface=_CONTAINER_INTERFACE, gateway=gateway)


def check(call: Call, netns: PodNetns) -> None:
    """Compare bridge, port and container with prevResult; run the IPAM plugin's CHECK."""
    settings = config.read(call)
    with located(call), netns.inside():
        pass
    if settings.is_layer3:
        run_ipam(call, "CHECK")
    previous, container = interfaces.previous_result(call, "bridge")
    bridge = next((item for item in previous.interfaces if item.name == settings.bridge and not item.sandbox), None)
    if bridge is None:
        raise InternalError(
            f"CNI created bridge {settings.bridge} was not found in prevResult",
            "has the configuration's 'bridge' changed since ADD?",
        )
    with located(call), netns.inside():
        master = _check_bridge(netns, bridge, settings)
        link = interfaces.check(netns, container, previous, "veth")
        _check_port(netns, link, master, previous)


def _check_bridge(netns: PodNetns, expected: Interface, settings: BridgeConfig) -> Link:
    with step(f'find bridge "{expected.name}"'):
        link = netns.host.link(expected.name)
    if link.kind != "bridge":
        raise InternalError(f'interface "{expected.name}" does not have link type of bridge')
    if link.mac != expected.mac.lower() and not _has_mac_of_port(netns, link):
        interfaces.require_mac(link, expected, f'bridge "{expected.name}"')
    if link.is_promiscuous is not settings.promiscuous:
        raise InternalError(
            f'bridge "{expected.name}" is {"" if link.is_promiscuous else "not "}promiscuous, '
            f"and promiscMode is {str(settings.promiscuous).lower()}"
        )
    return link


def _has_mac_of_port(netns: PodNetns, bridge: Link) -> bool:
    """Return True if the bridge has the MAC address of a port: it takes the lowest one unless an address was set.

    ADD sets one on a bridge that it makes or that it gives an address, not on another one.
    """
    with step(f'list the ports of "{bridge.name}"'):
        return bridge.mac in {port.mac for port in netns.host.ports(bridge.index)}


def _check_port(netns: PodNetns, container: Link, bridge: Link, previous: Result) -> None:
    """Require that the other end of the pair is a port of the bridge, with the name and MAC address of prevResult."""
    for expected in previous.interfaces:
        with step("look for the port"):
            link = None if expected.sandbox else netns.host.find_link(expected.name)
        if link is None:
            continue
        # A veth has the other end's index, as its own namespace numbers it.
        if link.index == container.peer and link.peer == container.index and link.master == bridge.index:
            interfaces.require_mac(link, expected, f'"{link.name}"')
            return
    raise InternalError(
        f'the other end of "{container.name}" is no port of bridge "{bridge.name}" by any name in prevResult'
    )
