"""The addresses that a cluster shares, in memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Container, Iterable, Mapping, Sequence

from multus_daemon.spec.addresses import Address, AddressRange, Owner, Reservation
from multus_daemon.spec.ports import AddressHeldError


class Cluster:
    """What the API server has."""

    def __init__(self) -> None:
        self.reservations: dict[str, Reservation] = {}
        self.pools: dict[str, dict[int, Reservation]] = {}
        """Entries that whereabouts' binary has made, by the name of the pool and the address."""
        self.gone: dict[str, str] = {}
        self.guard = threading.Lock()
        self.made = 0


class FakeAddressBook:
    """Implements `ports.AddressBook` for a node; records its calls and fails at the one it is told to.

    `stale`: addresses that it does not know to be held, as a watch that is behind; `late`: not to be free.
    """

    def __init__(self, node: str = "here", cluster: Cluster | None = None) -> None:
        self.node = node
        self.cluster = cluster or Cluster()
        self.calls: list[tuple[object, ...]] = []
        self.cooling: set[Address] = set()
        self.lasts: dict[tuple[str, str], Address] = {}
        self.stale: set[int] = set()
        self.late: set[int] = set()
        self.borrowed: dict[Owner, Reservation] = {}
        """What a container uses of its claim."""
        self.problems: dict[Owner, str] = {}
        self.refusal = ""
        self._failures: dict[int, BaseException] = {}

    def fail_at(self, number: int, error: BaseException) -> None:
        """Raise `error` at the call `number`, counted from 1, of those that ask the API server or write a file."""
        self._failures[number] = error

    def _call(self, *call: object) -> None:
        self.calls.append(call)
        if error := self._failures.pop(len(self.calls), None):
            raise error

    def ask(self) -> None:
        """See `ports.AddressBook`."""

    def begin(self) -> None:
        """See `ports.AddressBook`."""
        self._call("begin")

    def taken(self, source: AddressRange) -> Container[int]:
        """See `ports.AddressBook`."""
        scope, pool, version = source.scope, source.pool, source.network.version
        held = self.cluster.reservations.values()
        ours = {int(item.address) for item in held if (item.scope, item.address.version) == (scope, version)}
        return (ours | self.cluster.pools.get(pool, {}).keys() | self.late) - self.stale

    def serves(self, network: str, source: AddressRange) -> None:
        """See `ports.AddressBook`."""

    def holder(self, address: Address, source: AddressRange) -> Reservation | None:
        """See `ports.AddressBook`."""
        name = Reservation(address, source.scope, "", Owner("", "", "")).name
        return self.cluster.reservations.get(name) or self.cluster.pools.get(source.pool, {}).get(int(address))

    def is_cooling(self, address: Address, scope: str) -> bool:
        """See `ports.AddressBook`."""
        return address in self.cooling

    def last(self, podref: str, ifname: str, scope: str) -> Address | None:
        """See `ports.AddressBook`."""
        return self.lasts.get((podref, ifname))

    def create(self, reservation: Reservation) -> Reservation:
        """See `ports.AddressBook`."""
        self._call("create", str(reservation.address))
        with self.cluster.guard:
            held = self.cluster.reservations.get(reservation.name)
            if held is not None and held.claim and held.claim == reservation.claim:
                self.borrowed[reservation.owner] = held
                return held
            if held is not None and held.owner != reservation.owner:
                raise AddressHeldError(f"{held.podref} has it, on node {held.node}", held)
            self.cluster.made += 1
            made = dataclasses.replace(reservation, node=self.node, uid=str(self.cluster.made))
            self.cluster.reservations[made.name] = made
            if made.claim:
                self.borrowed[made.owner] = made
            return made

    def take_over(self, old: Reservation, new: Reservation) -> Reservation:
        """See `ports.AddressBook`."""
        with self.cluster.guard:
            if self.cluster.reservations.get(old.name, old).uid != old.uid:
                raise AddressHeldError(f"{old.podref} does not have it any more", None)
            self.cluster.reservations.pop(old.name, None)
            self.cluster.pools.get(new.pool, {}).pop(int(old.address), None)
        return self.create(new)

    def claimed(self, claim: str, scope: str) -> Sequence[Reservation]:
        """See `ports.AddressBook`."""
        return [item for item in self.cluster.reservations.values() if (item.claim, item.scope) == (claim, scope)]

    def release(self, owner: Owner, podref: str) -> None:
        """See `ports.AddressBook`. Everything is freed at once."""
        self._call("release", owner.container_id)
        self.borrowed.pop(owner, None)
        for item in self.held_by(owner):
            if not item.claim:
                del self.cluster.reservations[item.name]

    def held_by(self, owner: Owner) -> Sequence[Reservation]:
        """See `ports.AddressBook`."""
        own = [item for item in self.cluster.reservations.values() if item.owner == owner and not item.claim]
        return [*own, *([self.borrowed[owner]] if owner in self.borrowed else [])]

    def problem(self, owner: Owner) -> str:
        """See `ports.AddressBook`."""
        return self.problems.get(owner, "")

    def gone(self, nodes: Iterable[str]) -> Mapping[str, str]:
        """See `ports.AddressBook`."""
        return {node: self.cluster.gone[node] for node in nodes if node in self.cluster.gone}
