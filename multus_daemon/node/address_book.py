"""The addresses of the cluster for the threads of requests: see `ports.AddressBook`."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

from multus_daemon.node.addresses import Addresses
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.addresses import Address, AddressRange, Either, Owner, Reservation, object_name

COUNTED_MAX: Final = 1 << 16
"""Maximum size of a range whose held addresses are counted at each scrape."""


class NodeAddressBook:
    """Implements `ports.AddressBook` by an `Addresses` on the event loop. What is in memory is read in any thread."""

    def __init__(self, addresses: Addresses, portal: LoopPortal) -> None:
        self._addresses = addresses
        self._portal = portal
        self._served: dict[tuple[str, str], AddressRange] = {}
        """By network and CIDR."""

    @property
    def refusal(self) -> str:
        """See `ports.AddressBook`."""
        return self._addresses.rights.refusal

    def ask(self) -> None:
        """See `ports.AddressBook`."""
        if not self._addresses.rights.has_asked:
            self._portal.call(self._addresses.rights.ask)

    def begin(self) -> None:
        """See `ports.AddressBook`."""
        if not self._addresses.is_listed:
            self._portal.call(self._addresses.ready)

    def taken(self, source: AddressRange) -> Container[int]:
        """See `ports.AddressBook`."""
        asked = self._addresses.asked.setdefault((source.scope, source.network.version), set())
        return Either(self._addresses.store().taken(source.scope, source.pool, source.network.version), asked)

    def serves(self, network: str, source: AddressRange) -> None:
        """See `ports.AddressBook`."""
        self._served[network, source.cidr] = source

    def holder(self, address: Address, source: AddressRange) -> Reservation | None:
        """See `ports.AddressBook`."""
        store, scope, pool = self._addresses.store(), source.scope, source.pool
        if found := self._addresses.files.held.get(object_name(address, scope)) or store.find(address, scope):
            return found
        is_entered = int(address) in store.taken(scope, pool, address.version)
        return Reservation(address, scope, "", Owner("", "", ""), pool=pool) if is_entered else None

    def is_cooling(self, address: Address, scope: str) -> bool:
        """See `ports.AddressBook`."""
        name = object_name(address, scope)
        return name in self._addresses.files.released or self._addresses.cooling.get(name) is not None

    def last(self, podref: str, ifname: str, scope: str) -> Address | None:
        """See `ports.AddressBook`."""
        return self._addresses.lasts.get((podref, ifname, scope))

    def claimed(self, claim: str, scope: str) -> Sequence[Reservation]:
        """See `ports.AddressBook`."""
        return self._addresses.store().of_claim(claim, scope)

    def create(self, reservation: Reservation) -> Reservation:
        """See `ports.AddressBook`."""
        return self._portal.call(self._addresses.reserve, reservation)

    def release(self, owner: Owner, podref: str) -> None:
        """See `ports.AddressBook`."""
        self._portal.tell(self._addresses.due, self._addresses.released(owner, podref))

    def held_by(self, owner: Owner) -> Sequence[Reservation]:
        """See `ports.AddressBook`."""
        return self._addresses.files.of(owner)

    def problem(self, owner: Owner) -> str:
        """See `ports.AddressBook`."""
        names = [item.name for item in self.held_by(owner) if item.name in self._addresses.reported]
        return "; ".join(filter(None, map(self._addresses.problems.get, names)))

    def gone(self, nodes: Iterable[str]) -> Mapping[str, str]:
        """See `ports.AddressBook`."""
        others = [*({*nodes} - {self._addresses.node})]
        # In random order: if the API server is slow, each ADD learns of some of them only.
        return self._portal.call(self._addresses.fencing.gone, random.sample(others, len(others)))

    def take_over(self, old: Reservation, new: Reservation) -> Reservation:
        """See `ports.AddressBook`."""
        return self._portal.call(self._addresses.replaced, old, new)

    # --- metrics -----------------------------------------------------------------------------------------------------

    def shared(self) -> float | None:
        """Return the number of this node's addresses that another pod has, too; None if the node has no addresses."""
        return len(self._addresses.reported) if self._addresses.is_wanted else None

    def ratios(self) -> dict[str, float]:
        """Return the share of the fullest range that is held, by network."""
        found: dict[str, float] = {}
        for (network, _), source in tuple(self._served.items()):
            if 0 < source.size <= COUNTED_MAX:
                taken = self.taken(source)
                ratio = sum(map(taken.__contains__, source.numbers())) / source.size
                found[network] = max(ratio, found.get(network, 0.0))
        return found
