"""Both stores of addresses that nodes share pass these tests: two stores, as two nodes have them, over one place."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.reservations import KubeReservations
from multus_daemon.cluster.standalone.reservations import DirectoryReservations
from multus_daemon.metrics import Metrics
from multus_daemon.spec.addresses import NAMESPACE, Owner, Reservation
from multus_daemon.spec.ports import AddressHeldError
from tests.aside import running
from tests.fakes.apiserver import FakeApiServer
from tests.waiting import eventually

Store = KubeReservations | DirectoryReservations
Two = tuple[Store, Store]


@contextlib.asynccontextmanager
async def of_kube(directory: Path) -> AsyncIterator[Callable[[], Store]]:
    server = FakeApiServer()
    await server.start()
    async with ApiClient(Kubeconfig(server.kubeconfig(directory / "kubeconfig"))) as client:
        yield lambda: KubeReservations(client, NAMESPACE, Metrics())
    await server.stop()


@contextlib.asynccontextmanager
async def of_directory(directory: Path) -> AsyncIterator[Callable[[], Store]]:
    yield lambda: DirectoryReservations(directory / "addresses")


@pytest.fixture(params=[of_kube, of_directory])
async def two(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Two]:
    async with request.param(tmp_path) as made, asyncio.timeout(30):
        one, other = made(), made()
        async with running(one.run()), running(other.run()):
            await one.listed()
            await other.listed()
            yield one, other


def wish(text: str = "10.9.0.1", node: str = "node-a", **more: Any) -> Reservation:
    owner = Owner("c1", "net1", "net")
    held = Reservation(ipaddress.ip_address(text), "", "web/a", owner, node, "web/net", "10.9.0.0/24", **more)
    return replace(held, pool="10.9.0.0-24")


@pytest.mark.parametrize(
    ("text", "scope"), [("10.9.0.1", ""), ("fd00::1", ""), ("fd00::", "blue"), ("10.9.0.1", "a-b")]
)
async def test_what_one_node_creates_the_other_knows(two: Two, text: str, scope: str) -> None:
    one, other = two
    made = await one.create(replace(wish(text), scope=scope))
    assert made.uid
    assert await other.read(made.name) == made
    ip = made.address
    await eventually(lambda: int(ip) in other.taken(scope, "10.9.0.0-24", ip.version))
    known = other.find(ip, scope)
    assert known is not None
    assert (known.uid, known.podref, known.node) == (made.uid, "web/a", "node-a")
    assert int(ip) not in other.taken("elsewhere", "10.9.0.0-24", ip.version)


async def test_of_many_at_once_one_creates_it(two: Two) -> None:
    nodes = [two[number % 2].create(wish(node=f"node-{number}")) for number in range(10)]
    found = await asyncio.gather(*nodes, return_exceptions=True)
    made = [item for item in found if isinstance(item, Reservation)]
    held = [item.holder for item in found if isinstance(item, AddressHeldError)]
    assert len(made) == 1
    assert held == made * 9


async def test_only_the_one_with_the_uid_is_deleted(two: Two) -> None:
    one, other = two
    made = await one.create(wish())
    assert not await other.delete(replace(made, uid="another"))
    assert await other.read(made.name) == made
    assert await one.delete(made)
    assert await other.read(made.name) is None
    assert not await one.delete(made)
    await eventually(lambda: other.find(made.address, "") is None)
    again = await other.create(wish())
    assert again.uid != made.uid


async def test_each_change_is_reported(two: Two) -> None:
    one, other = two
    told: list[str] = []
    other.changed = told.append
    made = await one.create(wish())
    await eventually(lambda: told == [made.name])
    await one.delete(made)
    await eventually(lambda: set(told[1:]) == {made.name} and other.find(made.address, "") is None)


async def test_what_a_node_or_a_claim_holds(two: Two) -> None:
    one, other = two
    of_a = await one.create(wish(claim="web/vm"))
    of_b = await one.create(wish("10.9.0.2", "node-" + "b" * 80))
    assert await other.of_node("node-a") == [of_a]
    assert await other.of_node("node-" + "b" * 80) == [of_b]
    assert await other.of_node("node-c") == []
    await eventually(lambda: [item.address for item in other.of_claim("web/vm", "")] == [of_a.address])


async def test_a_file_that_is_no_reservation_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / "10.9.0.1").write_text("not json")
    store = DirectoryReservations(tmp_path)
    async with running(store.run()), asyncio.timeout(30):
        await store.listed()
        with pytest.raises(AddressHeldError):
            await store.create(wish())
        assert await store.create(wish("10.9.0.2"))
