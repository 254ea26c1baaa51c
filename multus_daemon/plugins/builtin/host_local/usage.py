"""How much of each network's ranges is given, for the metrics: counted when it is asked, from the leases in memory.

A network is known from the daemon's second call of host-local on, when `index` keeps its leases. What other programs
change counts with the next call.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from multus_daemon.plugins.builtin.host_local.index import number_of

if TYPE_CHECKING:
    from multus_daemon.plugins.builtin.host_local.config import RangeSet
    from multus_daemon.plugins.builtin.host_local.index import Book

NETWORKS_MAX: Final = 128
COUNT_SECONDS: Final = 0.002
"""How long one question counts. The networks that are left over have their earlier value until the next one."""


@dataclass(slots=True)
class _Network:
    range_sets: tuple[RangeSet, ...]
    book: weakref.ref[Book]
    """Weak: `index` decides how much is kept."""
    ratio: float | None = None
    """What was counted last; None: nothing yet."""
    is_counted: bool = False


class Usage:
    """The networks that were used last. Thread-safe."""

    def __init__(self, *, networks_max: int = NETWORKS_MAX, seconds: float = COUNT_SECONDS) -> None:
        """`seconds`: how long `ratios` counts, but at least one network."""
        self._networks_max = networks_max
        self._seconds = seconds
        self._guard = threading.Lock()
        self._networks: OrderedDict[str, _Network] = OrderedDict()

    def served(self, network: str, range_sets: tuple[RangeSet, ...], book: Book) -> None:
        """Note that a call of the network is over, with the leases in `book`. Takes a microsecond."""
        with self._guard:
            before = self._networks.pop(network, None)
            self._networks[network] = _Network(range_sets, weakref.ref(book), before.ratio if before else None)
            if len(self._networks) > self._networks_max:
                self._networks.popitem(last=False)

    def ratios(self) -> dict[str, float]:
        """Return the share of the fullest range set that is given, by network. Reads no file."""
        with self._guard:
            networks = tuple(self._networks.items())
        end = time.monotonic() + self._seconds
        for _, network in networks:
            if not network.is_counted and (book := network.book()) is not None:
                # A copy, in one step: a call may change the book meanwhile.
                network.ratio = _fullest(network.range_sets, list(book.taken))
                network.is_counted = True
                if time.monotonic() >= end:
                    break
        return {name: network.ratio for name, network in networks if network.ratio is not None}


def _fullest(range_sets: Sequence[RangeSet], names: Sequence[str]) -> float:
    """Return the largest share of a set's addresses that are among `names`."""
    numbers = [number for name in names if (number := number_of(name))]
    ratio = 0.0
    for range_set in range_sets:
        size = given = 0
        for one in range_set.ranges:
            has_gateway = one.gateway in one
            size += one.last - one.first + 1 - has_gateway
            given += sum(version == one.version and one.first <= number <= one.last for version, number in numbers)
        ratio = max(ratio, min(1.0, given / size)) if size > 0 else 1.0
    return ratio


usage: Final = Usage()
"""Of this process, as the index is."""
