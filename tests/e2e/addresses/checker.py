"""Judge what kernels had of addresses, and what the API said of them. Pure: histories in, faults out.

A `Stay` is an address in a network namespace, as its kernel showed it; an `Entry` is what the API server had of who
holds an address. Times are seconds of one clock. The end of a stay is the last time that it was seen: two stays overlap
only if both were really there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final, Generic, TypeAlias, TypeVar

Address: TypeAlias = IPv4Address | IPv6Address
Key = TypeVar("Key")

STILL: Final = math.inf
"""End of what is there when the test ends."""


class Kind(StrEnum):
    """What is wrong."""

    TWICE = "twice"
    """In two namespaces at once."""
    UNREPORTED = "unreported"
    """In two namespaces at once after a restored etcd, which may be, and nobody was told."""
    UNHELD = "unheld"
    """In a namespace, and for the API free."""
    ANOTHERS = "another's"
    """In a namespace, and for the API in the hands of another pod."""
    LEAKED = "leaked"
    """For the API taken, and in no namespace."""
    LEFT = "left"
    """There when the test has ended."""
    FOREIGN = "foreign"
    """No address that the network may give."""


@dataclass(frozen=True)
class Place:
    """A network namespace, the node that it is on, and the pod (NAMESPACE/NAME) that it is of."""

    node: str
    namespace: str
    pod: str


@dataclass(frozen=True)
class Stay:
    """An address in a namespace."""

    place: Place
    address: Address
    begin: float
    end: float = STILL


@dataclass(frozen=True)
class Entry:
    """What the API server had: the pod that holds an address."""

    address: Address
    pod: str
    begin: float
    end: float = STILL
    node: str = ""
    """The holder's node, where it is written down."""


@dataclass(frozen=True)
class Fence:
    """Somebody said that a node is gone: what it had before may be given to others from then on."""

    node: str
    at: float


@dataclass(frozen=True)
class Excuse:
    """A time in which nobody can write to the API server for a node; `node` is empty for all of them."""

    begin: float
    end: float
    node: str = ""


@dataclass(frozen=True)
class Bounds:
    """How long something may take, in seconds."""

    freed: float = 10.0
    """From the end of a stay until the address is free, or asserted for the next one."""
    held: float = 5.0
    """From the loss of what the API had of a live address until it has it again."""
    restored: float = 5.0
    """From a restored etcd: so long an address may be given that another one has."""


@dataclass(frozen=True)
class Orders:
    """What was done to the cluster."""

    fences: tuple[Fence, ...] = ()
    excuses: tuple[Excuse, ...] = ()
    restores: tuple[float, ...] = ()
    """Times at which etcd was restored from a snapshot and served again."""
    shared: Mapping[Address, frozenset[str]] = field(default_factory=dict)
    """Pods that may have an address at once, by an IPAMClaim."""
    reports: frozenset[tuple[Address, str]] = frozenset()
    """Duplicates that were told: address and pod."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    kind: Kind
    address: Address
    text: str
    seconds: float = 0.0
    """For how long."""
    node: str = ""
    """Whose address it was: of those that had it at once, the first one's."""

    def __str__(self) -> str:
        return f"{self.kind} {self.address}: {self.text} ({self.seconds:.1f} s)"


class History(Generic[Key]):
    """Makes intervals of looks: what is seen in two looks that follow each other was there between them."""

    def __init__(self) -> None:
        self._begun: dict[Key, float] = {}
        self._last: dict[Key, float] = {}
        self._done: list[tuple[Key, float, float]] = []

    def look(self, found: Iterable[Key], at: float, among: Callable[[Key], bool] = lambda _: True) -> None:
        """What was found at a time; `among`: which keys could have been found by this look."""
        present = set(found)
        for key in [key for key in self._begun if key not in present and among(key)]:
            self._done.append((key, self._begun.pop(key), self._last.pop(key)))
        for key in present:
            self._begun.setdefault(key, at)
            self._last[key] = at

    def intervals(self) -> Iterator[tuple[Key, float, float]]:
        """Each key with begin and end; the end of what the last look found is STILL."""
        yield from self._done
        yield from ((key, begin, STILL) for key, begin in self._begun.items())


def check(
    stays: Iterable[Stay],
    entries: Iterable[Entry],
    orders: Orders,
    *,
    end: float,
    bounds: Bounds | None = None,
    allowed: Callable[[Address], bool] = lambda _: True,
) -> list[Fault]:
    """Return everything that is wrong in a test that ended at `end`, when nothing should be left."""
    limits = bounds or Bounds()
    lived, had = _by_address(stays), _by_address(entries)
    faults: list[Fault] = []
    for address in sorted({*lived, *had}, key=lambda item: (item.version, int(item))):
        here, there = lived.get(address, []), had.get(address, [])
        if here and not allowed(address):
            faults.append(Fault(Kind.FOREIGN, address, f"given to {here[0].place.pod}"))
        faults += _twice(address, here, orders, limits, end)
        faults += _unheld(address, here, there, orders, limits, end)
        faults += _leaked(address, here, there, orders, limits, end)
        faults += [Fault(Kind.LEFT, address, f"in {stay.place.namespace}") for stay in here if stay.end > end]
        faults += [Fault(Kind.LEFT, address, f"held for {item.pod}") for item in there if item.end > end]
    return faults


Interval = TypeVar("Interval", Stay, Entry)


def _by_address(items: Iterable[Interval]) -> dict[Address, list[Interval]]:
    found: dict[Address, list[Interval]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.begin):
        found[item.address].append(item)
    return found


# --- in two namespaces ---------------------------------------------------------------------------------------------


def _twice(address: Address, stays: list[Stay], orders: Orders, bounds: Bounds, end: float) -> Iterator[Fault]:
    """Yield each pair of namespaces that had the address at once, and might not."""
    for index, second in enumerate(stays):
        for first in stays[:index]:
            until = min(first.end, second.end, end)
            if first.place.namespace == second.place.namespace or second.begin > until:
                continue
            if {first.place.pod, second.place.pod} <= orders.shared.get(address, frozenset()):
                continue
            text = f"{_of(first)} has it from {first.begin:.1f}, {_of(second)} from {second.begin:.1f} to {until:.1f}"
            if _fenced(first, second, orders):
                continue
            if any(at <= second.begin <= at + bounds.restored and first.begin <= at for at in orders.restores):
                pods = (first.place.pod, second.place.pod)
                if not all((address, pod) in orders.reports for pod in pods):
                    yield Fault(Kind.UNREPORTED, address, text, until - second.begin, first.place.node)
                continue
            yield Fault(Kind.TWICE, address, text, until - second.begin, first.place.node)


def _fenced(first: Stay, second: Stay, orders: Orders) -> bool:
    """Return whether the node of the first was said to be gone, after the stay began and before the other one did."""
    return any(fence.node == first.place.node and first.begin <= fence.at <= second.begin for fence in orders.fences)


def _of(stay: Stay) -> str:
    return f"{stay.place.pod} on {stay.place.node}"


# --- in a namespace, and not held ----------------------------------------------------------------------------------


def _unheld(
    address: Address, stays: list[Stay], entries: list[Entry], orders: Orders, bounds: Bounds, end: float
) -> Iterator[Fault]:
    """Yield each stretch in which a live address had no entry, or another pod's, for longer than is allowed."""
    for stay in stays:
        rightful = orders.shared.get(address, frozenset()) | {stay.place.pod}
        limit = min([stay.end, end, *(f.at for f in orders.fences if f.node == stay.place.node and f.at >= stay.begin)])
        own = [(item.begin, item.end) for item in entries if item.pod in rightful]
        for begin, until in _without((stay.begin, limit), own):
            other = next((i for i in entries if i.pod not in rightful and i.begin < until and i.end > begin), None)
            # One that ended before etcd was restored has to be freed first. Nobody else can take the address meanwhile.
            is_dead = other is not None and all(item.place.pod != other.pod or item.end < begin for item in stays)
            seconds = _longest(begin, until, orders.excuses, stay.place.node)
            if seconds <= (bounds.freed if is_dead else bounds.held):
                continue
            if other and (address, stay.place.pod) in orders.reports and any(at <= until for at in orders.restores):
                # It was given after a restore, and that was told.
                continue
            kind = Kind.ANOTHERS if other else Kind.UNHELD
            text = f"in {_of(stay)}, from {begin:.1f} to {until:.1f} {f'held for {other.pod}' if other else 'free'}"
            yield Fault(kind, address, text, seconds, stay.place.node)


# --- held, and in no namespace -------------------------------------------------------------------------------------


def _leaked(
    address: Address, stays: list[Stay], entries: list[Entry], orders: Orders, bounds: Bounds, end: float
) -> Iterator[Fault]:
    """Yield each stretch in which an entry had no namespace for longer than is allowed.

    The node that had the address last is the one that has to free it.
    """
    lives = [(stay.begin, stay.end) for stay in stays]
    for entry in entries:
        for begin, until in _without((entry.begin, min(entry.end, end)), lives):
            before = [stay for stay in stays if stay.begin <= begin]
            node = entry.node or (before[-1].place.node if before else "")
            seconds = _longest(begin, until, orders.excuses, node)
            if seconds > bounds.freed:
                text = f"held for {entry.pod} from {begin:.1f} to {until:.1f}"
                yield Fault(Kind.LEAKED, address, text, seconds, node)


# --- time ----------------------------------------------------------------------------------------------------------

Span: TypeAlias = tuple[float, float]


def _without(span: Span, holes: Iterable[Span]) -> Iterator[Span]:
    """Yield the parts of a span that no hole covers."""
    begin, end = span
    for left, right in sorted(holes):
        if left > begin:
            yield begin, min(left, end)
        begin = max(begin, right)
        if begin >= end:
            return
    if begin < end:
        yield begin, end


def _longest(begin: float, end: float, excuses: Iterable[Excuse], node: str) -> float:
    """Return the longest time at a stretch of a span in which the node could do something."""
    spans = [(excuse.begin, excuse.end) for excuse in excuses if excuse.node in ("", node)]
    return max((right - left for left, right in _without((begin, end), spans)), default=0.0)
