"""`sbr`: source based routing: packets from an address of the pod's interface use the routes of that interface.

Each address gets a rule and a routing table, to which the routes of the interface move. Tables, routes and messages are
those of the reference plugin (containernetworking/plugins `plugins/meta/sbr`): either removes what the other made.
"""

from __future__ import annotations

import errno
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel import inet, routes, rules
from multus_daemon.kernel.inet import TABLE_MAIN, IpAddress, IpInterface, Route, interface_of
from multus_daemon.kernel.links import Link
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.kernel.transport import NLM_F_CREATE, NLM_F_REPLACE, Request
from multus_daemon.plugins.builtin import contract, interfaces
from multus_daemon.plugins.builtin.contract import Call, Undo
from multus_daemon.plugins.builtin.interfaces import Change, ignoring_absent_netns, located, step
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.cni.errors import InvalidNetworkConfigError
from multus_daemon.spec.cni.result import IpConfig, Result
from multus_daemon.spec.cni.result import Route as ResultRoute

KEYS: Final = ("table", "addSourceHints", "gateways")
_NOT_CHAINED: Final = "This plugin must be called as chained plugin"
_FIRST_TABLE: Final = 100
_ANYWHERE: Final = {4: "0.0.0.0/0", 6: "::/0"}


@dataclass(frozen=True, slots=True)
class _Config:
    table: int | None
    """A routing table that another program fills; None: a new table for each address."""
    hints: bool
    """True: the routes to the subnets stay in the main table, with the address as their source."""
    gateways: Mapping[int, IpAddress]
    """By IP version, in place of those of the result."""


def read(call: Call) -> _Config:
    """Read the configuration. Raises DecodingFailureError (6), InvalidNetworkConfigError (7)."""
    with contract.reading(call.name, "failed to parse network configuration"):
        table = gojson.get_int(call.fields, "table")
        hints = bool(gojson.get_bool(call.fields, "addSourceHints"))
        given = gojson.get_strings(call.fields, "gateways") or ()
    gateways: dict[int, IpAddress] = {}
    for text in given:
        try:
            gateway = contract.ip_address(text)
        except ValueError as error:
            problem = f"invalid static gateway IP address: {contract.shown(text)}"
            raise InvalidNetworkConfigError(problem, f"network {call.name!r}: gateways") from error
        if gateway.version in gateways:
            both = f"{gateways[gateway.version]} and {gateway}"
            problem = f"gateways list contains multiple IPv{gateway.version} addresses: {both}"
            raise InvalidNetworkConfigError(problem, f"network {call.name!r}")
        gateways[gateway.version] = gateway
    if table is not None and contract.in_range("table", table, contract.UNSIGNED_MAX) == 0:
        raise InvalidNetworkConfigError(
            "table: 0 is an invalid argument: no rule can name it", f"network {call.name!r}"
        )
    return _Config(table, hints, gateways)


def add(call: Call, netns: PodNetns) -> Result:
    """Make rules and tables; return prevResult. If it raises, the routes are as before."""
    config, previous, ips = read(call), contract.previous(call, _NOT_CHAINED), _own(call)
    if not ips:
        raise InvalidNetworkConfigError(
            f"No IP addresses supplied on interface: {call.invocation.ifname}",
            remedy=f"network {call.name!r}: sbr must follow a plugin that gives the interface an address",
        )
    with located(call), Undo() as undo:
        netns.require()
        with step(f'find "{call.invocation.ifname}" and its routes'):
            link = netns.pod.link(call.invocation.ifname)
            known = rules.present(netns.pod)
            present = [] if config.table else routes.over(netns.pod, link.index)
        free = (table for table in itertools.count(_FIRST_TABLE) if table not in {rule.table for rule in known})
        sources = [(interface_of(ip.address), config.table or next(free)) for ip in ips]
        changes = [] if config.table else _changes(link, config, list(zip(ips, sources, strict=True)), present)
        added = [Request(inet.RTM_DELROUTE, item.request.body) for item in changes if item.request.flags]
        # The kernel refuses a gateway to which it has no route.
        before = [routes.again(body) for body, _ in sorted(present, key=lambda item: item[1].gateway is not None)]
        undo.arm("remove the rules", functools.partial(_remove, netns, [address.ip for address, _ in sources]))
        undo.arm("restore the routes", functools.partial(netns.pod.batch, [*added, *before]))
        interfaces.apply(netns.pod, [*(_rule(address.ip, table) for address, table in sources), *changes])
    return previous


def delete(call: Call, netns: PodNetns) -> None:
    """Remove the rules of the interface's addresses; the routes end with the interface."""
    with ignoring_absent_netns(), located(call), netns.inside(), step("remove the rules"):
        link = netns.pod.find_link(call.invocation.ifname)
        present = netns.pod.addresses(link.index) if link else ()
        own = [interface_of(ip.address).ip for ip in _own(call)]
        _remove(netns, [*own, *(item.address.ip for item in present)])


def differences(call: Call, netns: PodNetns) -> list[Difference]:
    """Return the rules that are missing, and the routes of their tables, if they are on record. Raises CniError."""
    config, ips, observed = read(call), _own(call), call.invocation.observed
    left = observed.routes if observed and not config.table else ()
    tables = sorted({route.table or 0 for route in left} - {TABLE_MAIN})
    found = []
    with located(call), netns.inside():
        with step("read rules and routes"):
            link, known = netns.pod.find_link(call.invocation.ifname), rules.present(netns.pod)
        for number, ip in enumerate(ips):
            source = interface_of(ip.address).ip
            table = config.table or (tables[number] if len(tables) == len(ips) else 0)
            if not any(_is_of(rule, [source]) and table in (0, rule.table) for rule in known):
                again = functools.partial(interfaces.apply, netns.pod, [_rule(source, table)]) if table else None
                found.append(Difference(f"rule from {source} lookup {table or 'a table'} is missing", again))
        if link and left:
            found += misplaced(netns, link, left)
    return found


def misplaced(netns: PodNetns, link: Link, left: Sequence[ResultRoute]) -> Iterator[Difference]:
    """Yield the recorded routes that their table lacks, or that are in the main table, too. Raises InternalError.

    After a repair has made the interface again, its routes are in the main table.
    """
    known = {(interface_of(item.dst), item.gw, item.table or 0) for item in left}
    with step(f'read the routes over "{link.name}"'):
        there = netns.pod.routes(table=inet.ANY_TABLE, oif=link.index)
    present = {(item.dst, str(item.gateway or ""), item.table): item for item in there}
    for dst, gw, table in sorted(known - present.keys(), key=lambda item: (item[1] != "", str(item))):
        scope = inet.SCOPE_LINK if dst.version == 4 and not gw else inet.SCOPE_GLOBAL
        wanted = Route(dst, link.index, inet.address_of(gw) if gw else None, scope=scope, table=table)
        change = _route(f"{dst} table {table}", inet.add_route(wanted))
        text = f'route to {dst} in table {table} is not on "{link.name}"'
        yield Difference(text, functools.partial(interfaces.apply, netns.pod, [change]))
    for dst, gw, table in known:
        if table != TABLE_MAIN and (dst, gw, TABLE_MAIN) in present.keys() - known:
            gone = inet.delete_route(present[dst, gw, TABLE_MAIN])
            text = f'route to {dst} on "{link.name}" is in the main table'
            yield Difference(text, functools.partial(netns.pod.batch, [gone]))


def _own(call: Call) -> list[IpConfig]:
    """Return the addresses of the call's interface in the result, and those of no interface that the result has."""
    result, ifname = call.prev_result or Result(), call.invocation.ifname
    others = {number for number, item in enumerate(result.interfaces) if item.name != ifname}
    return [ip for ip in result.ips if ip.interface not in others]


# --- rules and routes ------------------------------------------------------------------------------------------------


def _changes(
    link: Link,
    config: _Config,
    sources: Sequence[tuple[IpConfig, tuple[IpInterface, int]]],
    present: Sequence[tuple[bytes, Route]],
) -> list[Change]:
    """Return the changes that fill the tables, and remove the routes (`hints`: not to subnets) from the main table."""
    changes, hints = list[Change](), list[Change]()
    for ip, (address, table) in sources:
        gateway = config.gateways.get(address.version) or (inet.address_of(ip.gateway) if ip.gateway else None)
        if gateway:
            anywhere = interface_of(_ANYWHERE[address.version])
            default = Route(anywhere, link.index, gateway, table=table)
            changes.append(_route(f"default via {gateway} table {table}", inet.add_route(default)))
        for body, route in present:
            if route.source in (None, address.ip) and (route.gateway is None or route.gateway in address.network):
                changes.append(_route(f"{route.dst} table {table}", routes.again(body, table=table)))
        if config.hints:
            scope = inet.SCOPE_LINK if address.version == 4 else inet.SCOPE_GLOBAL
            hint = Route(interface_of(address.network), link.index, source=address.ip, scope=scope)
            hints.append(_route(f"{address.network} src {address.ip}", inet.add_route(hint)))
    for body, route in present:
        if not (config.hints and route.scope == inet.SCOPE_LINK):
            request = Request(inet.RTM_DELROUTE, routes.again(body).body)
            hints.append(Change(f"delete route to {route.dst}", request, tolerated=errno.ESRCH))
    return [*changes, *hints]


def _route(what: str, request: Request) -> Change:
    # A table may have routes of an earlier ADD.
    return Change(f"add route {what}", Request(request.kind, request.body, NLM_F_CREATE | NLM_F_REPLACE))


def _rule(source: IpAddress, table: int) -> Change:
    return Change(f"add rule from {source}", rules.add(source, table), tolerated=errno.EEXIST)


def _is_of(rule: rules.Rule, sources: Sequence[IpAddress]) -> bool:
    network = rule.source
    return network is not None and network.num_addresses == 1 and network.network_address in sources


def _remove(netns: PodNetns, sources: Sequence[IpAddress]) -> None:
    """Remove the rules with these sources. Raises OSError."""
    stale = [rule for rule in rules.present(netns.pod) if _is_of(rule, sources)]
    requests = [rules.delete(rule.source.network_address, rule.table) for rule in stale if rule.source]
    for error in netns.pod.batch(requests).values():
        if error.errno != errno.ENOENT:
            raise error
