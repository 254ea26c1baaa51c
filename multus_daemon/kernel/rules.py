"""Rules of policy routing by the source of packets. Format: rtnetlink(7), struct fib_rule_hdr, linux/fib_rules.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from multus_daemon.kernel import inet
from multus_daemon.kernel.inet import ROUTE, RTA_TABLE, IpAddress, IpNetwork
from multus_daemon.kernel.links import Rtnl
from multus_daemon.kernel.transport import NLM_F_CREATE, NLM_F_EXCL, Request, attribute, attributes, to_number

_RTM_NEWRULE: Final = 32
_RTM_DELRULE: Final = 33
_RTM_GETRULE: Final = 34
_FRA_SRC: Final = 2
_TO_TABLE: Final = 1


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule."""

    source: IpNetwork | None
    table: int
    body: bytes
    """In the kernel's form."""


def add(source: IpAddress, table: int) -> Request:
    """Look up packets from the address in the table, before other rules; EEXIST if there is an equal rule."""
    # The header is that of a route.
    length, field = source.max_prefixlen, table if table <= inet.TABLE_FIELD_MAX else 0
    header = ROUTE.pack(inet.FAMILIES[source.version], 0, length, 0, field, 0, 0, _TO_TABLE, 0)
    body = header + attribute(_FRA_SRC, source.packed) + attribute(RTA_TABLE, table)
    return Request(_RTM_NEWRULE, body, NLM_F_CREATE | NLM_F_EXCL)


def delete(source: IpAddress, table: int) -> Request:
    """Remove such a rule; ENOENT if there is none."""
    return Request(_RTM_DELRULE, add(source, table).body)


def again(rule: Rule) -> Request:
    """Add a rule like that one; EEXIST if there is an equal rule."""
    return Request(_RTM_NEWRULE, rule.body, NLM_F_CREATE | NLM_F_EXCL)


def present(kernel: Rtnl) -> list[Rule]:
    """Return the rules, IPv4 first. Raises OSError."""
    found = []
    for family in inet.FAMILIES.values():
        for body in kernel.dump(Request(_RTM_GETRULE, ROUTE.pack(family, *[0] * 8))):
            _, _, length, _, table, *_ = ROUTE.unpack_from(body)
            values = attributes(body, ROUTE.size)
            packed = values.get(_FRA_SRC)
            source = inet.interface_of((packed, length)).network if packed else None
            found.append(Rule(source, to_number(values.get(RTA_TABLE)) or table, body))
    return found
