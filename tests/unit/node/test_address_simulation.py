"""200 worlds of nodes that share addresses, each with other faults; `tests.soak.addresses` has 10,000."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from multus_daemon.cluster.kube.reservations import KubeReservations
from multus_daemon.node.addresses import Addresses
from multus_daemon.spec.addresses import Reservation
from multus_daemon.spec.ports import AddressHeldError, StoreUnavailableError
from tests.fakes import address_world
from tests.fakes.address_world import Broken

AT_ONCE = 25


@pytest.mark.parametrize("first", range(0, 200, AT_ONCE))
def test_no_address_is_doubled_or_lost(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        address_world.run(seed)


class _Hour(address_world.World):
    """An hour without an API server: containers end, a daemon is killed, and one container wants to begin."""

    async def run(self, steps: int) -> None:
        nodes = list(self.nodes.values())
        for node in nodes:
            self.server.put("nodes", node.name, {"metadata": {}, "spec": {}})
            node.start()
            for _ in range(4):
                await node.add(self.container())
        kept = {str(node.kernel[list(node.kernel)[-1]]) for node in nodes}
        begin = asyncio.get_running_loop().time()
        await self._away(nodes[0])
        for node in nodes:
            for container in list(node.kernel)[:-1]:
                await node.delete(container)
        assert asyncio.get_running_loop().time() < begin + 10
        await asyncio.sleep(1800)
        await nodes[0].kill()
        nodes[0].start()
        for node in nodes:
            with pytest.raises(StoreUnavailableError, match=r"of the cluster are not known|can't be reserved"):
                await node.attach(self.container())
        await asyncio.sleep(1800)
        assert len(self.server.objects["overlappingrangeipreservations"]) == 12
        self.server.is_away = False
        await asyncio.sleep(35)
        assert self.server.objects["overlappingrangeipreservations"].keys() == kept


@pytest.mark.parametrize("seed", range(5))
def test_an_hour_without_the_api_server(seed: int) -> None:
    """DELs succeed, an ADD says why it waits, and the deletions follow as soon as the server is back."""
    address_world.run(seed, make_world=_Hour)


class _Forgets(Addresses):
    """Frees what no record has, whatever the kernel has."""

    async def _is_in_use(self, subject: Reservation, *, is_released: bool) -> bool:
        return False


class _Hasty(Addresses):
    """Frees an address at its DEL, while the record still has it."""

    async def _settle(self, name: str) -> None:
        if name in self.files.released and name in self.files.held:
            await self._free(self.store(), self.files.held[name])
        else:
            await super()._settle(name)


class _Silent(Addresses):
    """Reports nothing."""

    async def _is_taken(self, mine: Reservation, error: AddressHeldError) -> None:
        return


class _Careless(Addresses):
    """Does not assert what is deleted."""

    def _changed(self, name: str) -> None:
        return

    async def _assert(self, *arguments: Any, **more: Any) -> None:
        return


class _Late(Addresses):
    """Never compares with what the cluster has."""

    async def _compare(self, store: Any) -> None:
        return


class _NoLock(KubeReservations):
    """Takes an address that another one has."""

    async def create(self, reservation: Reservation) -> Reservation:
        try:
            return await super().create(reservation)
        except AddressHeldError:
            return reservation


class _NoPrecondition(KubeReservations):
    """Deletes whatever has the name."""

    async def delete(self, reservation: Reservation) -> bool:
        there = await self.read(reservation.name)
        return there is not None and await super().delete(there)


FAULTS: Mapping[str, dict[str, Any]] = {
    "the kernel is not asked": {"make_book": _Forgets},
    "a DEL does not wait for the record": {"make_book": _Hasty},
    "a duplicate is not reported": {"make_book": _Silent},
    "what is deleted stays away": {"make_book": _Careless},
    "nothing is compared": {"make_book": _Late},
    "a creation is no lock": {"make_store": _NoLock},
    "a deletion has no precondition": {"make_store": _NoPrecondition},
}


def _first_broken(most: int, **made: Any) -> int | None:
    for seed in range(most):
        try:
            address_world.run(seed, **made)
        except Broken:
            return seed
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulation_finds_the_fault(fault: str) -> None:
    assert _first_broken(50, **FAULTS[fault]) is not None
