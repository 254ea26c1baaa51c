"""Which address comes next: round robin through the ranges of a set, requested ones first.

Pure, apart from the `Leases` that it is given: those are a locked directory (`store`), or a dict in tests. An ADD
takes one address from each set, or none at all.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Protocol

from multus_daemon.plugins.builtin.host_local.config import Address, HostLocalConfig, Range, RangeSet, text_of
from multus_daemon.plugins.builtin.ipam import ADDRESSES_MAX
from multus_daemon.spec.cni.errors import CniError, InternalError
from multus_daemon.spec.cni.result import IpConfig

_EXHAUSTED_ADVICE = (
    "`multusctl attachments` shows who holds them, with `--leaks` those that nobody deletes; "
    "delete pods, or give the network a larger range"
)


class Leases(Protocol):
    """The addresses of one network, held exclusively as long as the object is in use."""

    @property
    def taken(self) -> Container[str]:
        """What is given away, as text in Go's form."""
        ...

    def next_free(self, value: int, version: int) -> int:
        """The first address from `value` on that is not taken, both as numbers; possibly behind every range."""
        ...

    def refresh(self) -> bool:
        """Read anew what is taken, where that was known from an earlier call; else return False."""
        ...

    def owned(self) -> list[str]:
        """What the container's interface owns already."""
        ...

    def last_reserved(self, index: int) -> str:
        """The address that was given away last from the set `index`; empty if not known."""
        ...

    def reserve(self, address: str, index: int) -> bool:
        """Give `address` to the container's interface; False if it is taken after all.

        Where it raises, the address is not given away.
        """
        ...

    def release(self, address: str) -> None:
        """Take `address` back; absent is done."""
        ...


def allocate(config: HostLocalConfig, leases: Leases, container_id: str) -> tuple[IpConfig, ...]:
    """One address from each set, in the order of the sets, and all that were requested.

    When that can't be had, exactly what this call took is released again, and nothing older. Raises CniError (999
    as with the reference plugin: the node, not the configuration, decides) and OSError of `leases`.
    """
    if len(config.range_sets) > ADDRESSES_MAX:
        raise InternalError(f"{len(config.range_sets)} range sets, and at most {ADDRESSES_MAX} are taken")
    wanted = dict.fromkeys(config.requested)
    # Of before: sets have no address in common, so what this call takes from one is in no other.
    before = [(text, ipaddress.ip_address(text)) for text in leases.owned()]
    done: list[IpConfig] = []
    with contextlib.ExitStack() as undo:
        for index, range_set in enumerate(config.range_sets):
            requested = next((address for address in wanted if range_set.range_of(address)), None)
            try:
                if requested is None:
                    text, source = _next_free(range_set, leases, index, undo, before, container_id)
                else:
                    del wanted[requested]
                    text, source = _requested(range_set, requested, leases, index, undo)
            except CniError as error:
                raise InternalError(f"failed to allocate for range {index}: {error.msg}", error.details) from error
            done.append(IpConfig(f"{text}/{source.prefix_length}", str(source.gateway)))
        if wanted:
            rest = " ".join(map(str, wanted))
            raise InternalError(f"failed to allocate all requested IPs: {rest}")
        undo.pop_all()
    return tuple(done)


def _reserve(leases: Leases, text: str, index: int, undo: contextlib.ExitStack) -> bool:
    """Reserve, and have it undone if the ADD fails later."""
    if not leases.reserve(text, index):
        return False
    undo.callback(_release, leases, text)
    return True


def _release(leases: Leases, text: str) -> None:
    # The error that led here says more than one of the clean-up; the DEL that follows releases again.
    with contextlib.suppress(OSError):
        leases.release(text)


def _requested(
    range_set: RangeSet, address: Address, leases: Leases, index: int, undo: contextlib.ExitStack
) -> tuple[str, Range]:
    source = range_set.range_of(address)
    assert source is not None
    if address == source.gateway:
        raise InternalError(f"requested ip {address} is subnet's gateway")
    text = str(address)
    # An interface may own several addresses of a set by request, so nobody asks what it owns already.
    while text in leases.taken or not _reserve(leases, text, index, undo):
        if not leases.refresh():
            raise InternalError(f"requested IP address {address} is not available in range set {range_set}")
    return text, source


def _next_free(
    range_set: RangeSet,
    leases: Leases,
    index: int,
    undo: contextlib.ExitStack,
    before: Sequence[tuple[str, Address]],
    container_id: str,
) -> tuple[str, Range]:
    for owned, address in before:
        if range_set.range_of(address):
            raise InternalError(f"{owned} has been allocated to {container_id}, duplicate allocation is not allowed")
    while True:
        for text, source in candidates(range_set, leases.last_reserved(index), leases.next_free):
            if _reserve(leases, text, index, undo):
                return text, source
        if not leases.refresh():
            raise InternalError(f"no IP addresses available in range set: {range_set}", _EXHAUSTED_ADVICE)


def _every(value: int, _version: int) -> int:
    return value


def candidates(
    range_set: RangeSet, last_reserved: str, next_free: Callable[[int, int], int] = _every
) -> Iterator[tuple[str, Range]]:
    """Every address of the set but the gateways, once: from the one behind `last_reserved`, cyclically to itself.

    From the beginning where `last_reserved` is no address of the set. `next_free` passes over those that are taken
    (as `Leases`). Lazy: a /64 costs nothing.
    """
    ranges = range_set.ranges
    start, resume = 0, ranges[0].first - 1
    with contextlib.suppress(ValueError):
        last = ipaddress.ip_address(last_reserved)
        for position, candidate in enumerate(ranges):
            if last in candidate:
                start, resume = position, int(last)
                break
    yield from _walk(ranges[start], resume + 1, ranges[start].last, next_free)
    for offset in range(1, len(ranges)):
        following = ranges[(start + offset) % len(ranges)]
        yield from _walk(following, following.first, following.last, next_free)
    yield from _walk(ranges[start], ranges[start].first, resume, next_free)


def _walk(source: Range, first: int, last: int, next_free: Callable[[int, int], int]) -> Iterator[tuple[str, Range]]:
    skipped = int(source.gateway) if source.gateway.version == source.version else -1
    value = first
    while value <= last and (value := next_free(value, source.version)) <= last:
        if value != skipped:
            yield text_of(value, source.version), source
        value += 1
