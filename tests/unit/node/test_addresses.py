"""The addresses that a node holds, over an API server in this process."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube import client as module
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.credentials import Kubeconfig
from multus_daemon.cluster.kube.reservations import KubeReservations
from multus_daemon.metrics import Metrics
from multus_daemon.node.address_book import NodeAddressBook
from multus_daemon.node.addresses import Addresses
from multus_daemon.node.fencing import Fencing
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec import addresses
from multus_daemon.spec.addresses import API, NAMESPACE, Address, AddressRange, Owner, Reservation
from multus_daemon.spec.ports import AddressHeldError, StoreUnavailableError
from tests.aside import running
from tests.fakes.apiserver import IPAM_CLAIMS, NODES, POOLS, RESERVATIONS, FakeApiServer
from tests.waiting import PATIENCE, eventually

POOL = "10.9.0.0-24"
SOURCE = AddressRange(ipaddress.ip_network("10.9.0.0/24"), (), pool=POOL)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for seconds waits for milliseconds."""
    monkeypatch.setattr(module, "REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(deadlines, "ADDRESSES_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(deadlines, "ADDRESS_TAKEN_SECONDS", 0.05)
    monkeypatch.setattr(deadlines, "ADDRESS_WAITS_SECONDS", 60.0)
    monkeypatch.setattr(deadlines, "ADDRESS_UNRECORDED_SECONDS", 0.05)
    monkeypatch.setattr(deadlines, "ADDRESS_ENTRY_SECONDS", 0.0)


@pytest.fixture
async def server() -> AsyncIterator[FakeApiServer]:
    server = FakeApiServer()
    await server.start()
    yield server
    await server.stop()


@dataclass
class Records:
    """What a node has: attachments on record, addresses in the kernel, and what was reported."""

    attached: set[tuple[str, str]] = field(default_factory=set)
    addresses: set[Address] = field(default_factory=set)
    reported: list[tuple[str, str]] = field(default_factory=list)

    def has(self, owner: Owner) -> bool | None:
        return (owner.container_id, owner.ifname) in self.attached

    def is_set_aside(self, owner: Owner) -> bool:
        return False

    def has_address(self, address: Address) -> bool:
        return address in self.addresses

    def report(self, mine: Reservation, other: Reservation) -> None:
        self.reported.append((mine.podref, other.podref))


class Node:
    """A node with its book."""

    def __init__(self, client: ApiClient, directory: Path, name: str = "node-a") -> None:
        self.records = Records()
        self.named = asyncio.Event()
        self.book = Addresses(directory, name, lambda: KubeReservations(client, NAMESPACE, Metrics()), named=self.named)
        self.book.holders = cast(Any, self.records)
        self.asked = NodeAddressBook(self.book, LoopPortal())

    async def add(self, address: str, container: str = "c1", pod: str = "web/a", **more: Any) -> Reservation:
        """As an ADD: the record comes before the address."""
        await self.book.ready()
        self.records.attached.add((container, "net1"))
        return await self.book.reserve(wish(address, container, pod, **more))

    async def delete(self, container: str = "c1") -> None:
        """As a DEL: the address is released, then the record goes."""
        await asyncio.to_thread(self.asked.release, Owner(container, "net1", "net"), "web/a")
        self.records.attached.discard((container, "net1"))
        self.book.follow(container, None, False)


def wish(address: str, container: str = "c1", pod: str = "web/a", **more: Any) -> Reservation:
    more = {"pool": POOL, "range": "10.9.0.0/24"} | more
    return Reservation(ipaddress.ip_address(address), "", pod, Owner(container, "net1", "net"), **more)


@pytest.fixture
async def client(server: FakeApiServer, tmp_path: Path) -> AsyncIterator[ApiClient]:
    async with ApiClient(Kubeconfig(server.kubeconfig(tmp_path / "kubeconfig"))) as client:
        yield client


@pytest.fixture
async def node(client: ApiClient, tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(client, tmp_path / "addresses")
    async with running(node.book.run()), asyncio.timeout(30):
        yield node


def names(server: FakeApiServer) -> set[str]:
    return {name for _, name in server.objects[RESERVATIONS]}


def holders(server: FakeApiServer) -> list[str]:
    return [item["spec"]["containerid"] for item in server.objects[RESERVATIONS].values()]


def pool(server: FakeApiServer, **entries: Any) -> None:
    spec = {"range": "10.9.0.0/24", "allocations": entries}
    server.put(POOLS, {"metadata": {"namespace": NAMESPACE, "name": POOL}, "spec": spec})


def entries(server: FakeApiServer) -> dict[str, Any]:
    found: dict[str, Any] = server.get(POOLS, NAMESPACE, POOL)["spec"]["allocations"]
    return found


async def test_a_node_without_such_an_address_asks_for_nothing(node: Node, server: FakeApiServer) -> None:
    await asyncio.sleep(0.05)
    assert server.requests == []


@pytest.mark.parametrize("is_ahead", [True, False], ids=["a pod is ahead of the watch", "the watch"])
async def test_a_right_that_lacks_is_known_before_the_first_pod(
    client: ApiClient, tmp_path: Path, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch, *, is_ahead: bool
) -> None:
    monkeypatch.setattr(deadlines, "ADDRESSES_REFUSED_SECONDS", 0.05)
    server.fail(403, times=3, method="GET", contains="overlappingrangeipreservations")
    node = Node(client, tmp_path / "addresses")
    async with running(node.book.run()), asyncio.timeout(30):
        await asyncio.sleep(0.05)
        assert (node.asked.refusal, server.requests) == ("", [])
        if is_ahead:
            await asyncio.to_thread(node.asked.ask)
            assert "403" in node.asked.refusal
        else:
            node.named.set()
            await eventually(lambda: "403" in node.asked.refusal)
        # Somebody grants it.
        await eventually(lambda: node.asked.refusal == "")


async def test_while_nobody_answers_no_right_lacks(node: Node, server: FakeApiServer) -> None:
    server.fail(503, times=20, method="GET", contains="overlappingrangeipreservations")
    async with asyncio.timeout(30):
        await asyncio.to_thread(node.asked.ask)
    assert node.asked.refusal == ""


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_right_that_is_taken_away_leaves_networks_to_the_binary(
    node: Node, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch, *, is_listed: bool
) -> None:
    for name in ("ADDRESSES_REFUSED_SECONDS", "ADDRESSES_LOOK_SECONDS", "ADDRESSES_LISTED_SECONDS"):
        monkeypatch.setattr(deadlines, name, 0.2)
    await asyncio.to_thread(node.asked.ask)
    if is_listed:
        await node.book.ready()
    server.fail(403, times=inf, contains="overlappingrangeipreservations")
    with pytest.raises(StoreUnavailableError):
        await node.add("10.9.0.1")
    await eventually(lambda: "403" in node.asked.refusal)
    server.faults.clear()
    await eventually(lambda: node.asked.refusal == "")
    # The watch goes on after a pause.
    monkeypatch.setattr(deadlines, "ADDRESSES_LISTED_SECONDS", 20.0)
    await node.add("10.9.0.2")


async def test_an_address_is_one_object_that_says_who_holds_it(node: Node, server: FakeApiServer) -> None:
    made = await node.add("10.9.0.1", network="web/net")
    found = server.get(RESERVATIONS, NAMESPACE, "10.9.0.1")
    assert found["spec"] == {"podref": "web/a", "ifname": "net1", "containerid": "c1"}
    assert found["metadata"]["labels"] == {"multus.io/node": "node-a", "multus.io/network": "web.net"}
    assert (made.uid, made.node) == (found["metadata"]["uid"], "node-a")
    assert server.count("POST") == 1
    await eventually(lambda: node.asked.holder(made.address, SOURCE) is not None)
    assert 10 << 24 | 9 << 16 | 1 in node.asked.taken(SOURCE)


@pytest.mark.parametrize(("address", "scope"), [("fd00::1", ""), ("10.9.0.1", "blue"), ("fd00::1", "ab")])
async def test_a_reservation_of_any_scope_and_version_is_taken(
    node: Node, server: FakeApiServer, address: str, scope: str
) -> None:
    ip = ipaddress.ip_address(address)
    await node.book.ready()
    network = ipaddress.ip_network(f"{ip}/24", strict=False)
    source = AddressRange(network, (), scope, POOL)
    taken = node.asked.taken(source)
    assert int(ip) not in taken
    node.records.attached.add(("c1", "net1"))
    made = await node.book.reserve(replace(wish(address), scope=scope))
    await eventually(lambda: int(ip) in node.book.store().taken(scope, POOL, ip.version))
    assert int(ip) not in node.book.store().taken("other", POOL, ip.version)
    assert node.asked.holder(ip, source) == made
    await node.delete()
    await eventually(lambda: int(ip) not in node.book.store().taken(scope, POOL, ip.version))


async def test_the_creation_is_the_lock(node: Node, client: ApiClient, tmp_path: Path, server: FakeApiServer) -> None:
    other = Node(client, tmp_path / "other", "node-b")
    async with running(other.book.run()):
        wishes = [node.add(f"10.9.0.{number}", "c1", "web/a") for number in range(1, 6)]
        wishes += [other.add(f"10.9.0.{number}", "c2", "web/b") for number in range(1, 6)]
        found = await asyncio.gather(*wishes, return_exceptions=True)
    held = [item for item in found if isinstance(item, AddressHeldError)]
    assert len(held) == 5
    assert all(error.holder is not None for error in held)
    assert names(server) == {f"10.9.0.{number}" for number in range(1, 6)}


async def test_a_del_frees_the_address_once_the_record_has_gone(node: Node, server: FakeApiServer) -> None:
    await node.add("10.9.0.1")
    node.asked.release(Owner("c1", "net1", "net"), "web/a")
    await asyncio.sleep(0.2)
    assert names(server) == {"10.9.0.1"}
    await node.delete()
    await eventually(lambda: not names(server))
    await eventually(lambda: node.asked.is_cooling(ipaddress.ip_address("10.9.0.1"), ""))
    assert node.asked.last("web/a", "net1", "") == ipaddress.ip_address("10.9.0.1")


async def test_an_address_that_is_freed_at_once_can_be_given_at_once(node: Node, server: FakeApiServer) -> None:
    made = await node.add("10.9.0.1")
    assert int(made.address) in node.asked.taken(SOURCE)
    await node.delete()
    await eventually(lambda: int(made.address) not in node.asked.taken(SOURCE), 3)


async def test_an_add_may_come_right_after_the_del_that_frees_its_address(node: Node, server: FakeApiServer) -> None:
    await node.add("10.9.0.1")
    # The queue has not been told yet.
    await asyncio.to_thread(node.book.released, Owner("c1", "net1", "net"), "web/a")
    with pytest.raises(AddressHeldError, match="pod web/a on this node"):
        await node.add("10.9.0.1", container="c2", pod="web/b")
    node.records.attached.discard(("c1", "net1"))
    await node.add("10.9.0.1", container="c2", pod="web/b")
    assert holders(server) == ["c2"]


async def test_an_address_without_a_record_is_freed_soon_after_its_namespace_has_gone(
    client: ApiClient, server: FakeApiServer, tmp_path: Path
) -> None:
    node = Node(client, tmp_path / "addresses")
    async with running(node.book.run()):
        await node.add("10.9.0.1")
    later = Node(client, tmp_path / "lost")
    later.records.addresses = {ipaddress.ip_address("10.9.0.1")}
    async with running(later.book.run()):
        await later.add("10.9.0.2", "c2")
        await asyncio.sleep(0.3)
        assert names(server) == {"10.9.0.1", "10.9.0.2"}
        later.records.addresses.clear()
        await eventually(lambda: names(server) == {"10.9.0.2"})


async def test_a_del_while_the_api_server_is_away_is_made_up_for(
    node: Node, server: FakeApiServer, client: ApiClient, tmp_path: Path
) -> None:
    await node.add("10.9.0.1")
    await server.stop()
    await node.delete()
    with pytest.raises(StoreUnavailableError, match=r"10\.9\.0\.2"):
        await node.add("10.9.0.2", "c2")
    await server.start()
    await eventually(lambda: not names(server))


async def test_a_deletion_by_others_only_marks_the_reservation(
    node: Node, client: ApiClient, server: FakeApiServer
) -> None:
    made = await node.add("10.9.0.1")
    await client.request("DELETE", f"{API}/namespaces/{NAMESPACE}/{RESERVATIONS}/10.9.0.1")
    found = server.get(RESERVATIONS, NAMESPACE, "10.9.0.1")["metadata"]
    assert (found["uid"], "deletionTimestamp" in found) == (made.uid, True)
    await node.delete()
    await eventually(lambda: not names(server))


async def test_a_reservation_that_is_gone_is_back_at_once(node: Node, server: FakeApiServer) -> None:
    await node.add("10.9.0.1")
    server.delete(RESERVATIONS, NAMESPACE, "10.9.0.1")
    await eventually(lambda: names(server) == {"10.9.0.1"})
    await node.delete()
    await eventually(lambda: not names(server))


async def test_after_a_restart_the_files_say_what_the_node_holds(
    server: FakeApiServer, client: ApiClient, tmp_path: Path
) -> None:
    node = Node(client, tmp_path / "addresses")
    async with running(node.book.run()):
        await node.add("10.9.0.1")
        await node.add("10.9.0.2", "c2", "web/b")
    later = Node(client, tmp_path / "addresses")
    await asyncio.to_thread(later.book.load)
    later.records.attached = {("c1", "net1")}
    server.delete(RESERVATIONS, NAMESPACE, "10.9.0.1")
    async with running(later.book.run()):
        await eventually(lambda: names(server) == {"10.9.0.1"})


async def test_what_is_not_on_record_is_freed_only_if_no_namespace_has_it(
    server: FakeApiServer, client: ApiClient, tmp_path: Path
) -> None:
    node = Node(client, tmp_path / "addresses")
    async with running(node.book.run()):
        await node.add("10.9.0.1")
        await node.add("10.9.0.2", "c2", "web/b")
    (tmp_path / "lost").mkdir()
    later = Node(client, tmp_path / "lost")
    await asyncio.to_thread(later.book.load)
    later.records.addresses = {ipaddress.ip_address("10.9.0.1")}
    async with running(later.book.run()):
        await eventually(lambda: names(server) == {"10.9.0.1"})
        await asyncio.sleep(0.2)
        assert names(server) == {"10.9.0.1"}


async def test_an_address_that_was_given_meanwhile_is_reported_at_both_pods(node: Node, server: FakeApiServer) -> None:
    mine = await node.add("10.9.0.1")
    server.delete(RESERVATIONS, NAMESPACE, "10.9.0.1")
    other = {"metadata": {"namespace": NAMESPACE, "name": "10.9.0.1"}, "spec": {"podref": "web/b", "ifname": "net1"}}
    server.put(RESERVATIONS, other)
    await eventually(lambda: node.records.reported == [("web/a", "web/b")])
    assert "web/b" in node.asked.problem(mine.owner)
    assert node.asked.shared() == 1
    server.delete(RESERVATIONS, NAMESPACE, "10.9.0.1")
    await eventually(lambda: node.asked.shared() == 0)
    assert node.asked.problem(mine.owner) == ""


def restored(server: FakeApiServer, address: str) -> None:
    """A restored etcd has the address in the hands of a container of the node that has ended before. No watch tells."""
    item = json.loads(addresses.encode(replace(wish(address, "c0", "web/old"), node="node-a")))
    item["metadata"]["namespace"] = NAMESPACE
    item["metadata"] |= {"uid": "of-the-snapshot", "resourceVersion": "1"}
    server.objects[RESERVATIONS][NAMESPACE, address] = item


async def test_of_a_container_that_has_ended_a_restored_etcd_has_nothing_for_long(
    node: Node, server: FakeApiServer
) -> None:
    await node.add("10.9.0.1")
    restored(server, "10.9.0.1")
    server.put(RESERVATIONS, server.get(RESERVATIONS, NAMESPACE, "10.9.0.1"))
    await eventually(lambda: holders(server) == ["c1"])
    assert node.records.reported == []


async def test_also_if_the_container_that_has_the_address_ends_then(node: Node, server: FakeApiServer) -> None:
    await node.add("10.9.0.1")
    # The watch tells of the creation.
    await asyncio.sleep(0.1)
    restored(server, "10.9.0.1")
    node.records.attached.clear()
    await asyncio.to_thread(node.asked.release, Owner("c1", "net1", "net"), "web/a")
    await eventually(lambda: names(server) == set())


async def test_an_address_of_a_node_that_is_gone_is_taken_over(
    node: Node, client: ApiClient, server: FakeApiServer, tmp_path: Path
) -> None:
    other = Node(client, tmp_path / "other", "node-b")
    async with running(other.book.run()):
        old = await other.add("10.9.0.1", "c2", "web/b")
    server.put(
        NODES, {"metadata": {"name": "node-c"}, "spec": {"taints": [{"key": "node.kubernetes.io/out-of-service"}]}}
    )
    server.put(NODES, {"metadata": {"name": "node-d"}, "spec": {}})
    server.put(NODES, {"metadata": {"name": "node-e"}, "spec": {"taints": "odd"}})
    await node.book.ready()
    gone = await node.book.fencing.gone(["node-b", "node-c", "node-d", "node-e"])
    assert gone == {"node-b": "does not exist any more", "node-c": "has the taint node.kubernetes.io/out-of-service"}
    node.records.attached.add(("c1", "net1"))
    made = await node.book.replaced(old, wish("10.9.0.1"))
    assert server.get(RESERVATIONS, NAMESPACE, "10.9.0.1")["metadata"]["uid"] == made.uid != old.uid
    with pytest.raises(AddressHeldError, match="web/a"):
        await node.book.replaced(old, wish("10.9.0.1", "c3"))


async def test_a_full_range_of_a_large_cluster_does_not_ask_for_each_node_again(
    node: Node, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [f"node-{number}" for number in range(30)]
    for other in others[:-1]:
        server.put(NODES, {"metadata": {"name": other}, "spec": {}})
    await node.book.ready()
    # An API server that is slow does not hold the ADD; the next one goes on.
    server.delay = 0.05
    monkeypatch.setattr(deadlines, "NODES_GONE_SECONDS", 0.3)
    assert await node.book.fencing.gone(others) == {}
    server.delay = 0
    monkeypatch.setattr(deadlines, "NODES_GONE_SECONDS", PATIENCE)
    for _ in range(2):
        assert await node.book.fencing.gone(others) == {"node-29": "does not exist any more"}
    # The one that was cut off, and the one that is gone, twice.
    assert server.count("GET", "/nodes/") <= len(others) + 2


async def test_a_slow_api_server_hides_no_node_for_ever(
    node: Node, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the kubelet waits so long between ADDs that each node is asked for again."""
    others = [f"node-{number:02}" for number in range(30)]
    for other in others[:-1]:
        server.put(NODES, {"metadata": {"name": other}, "spec": {}})
    server.delay = 0.02
    monkeypatch.setattr(deadlines, "NODES_GONE_SECONDS", 0.2)
    found: dict[str, str] = {}
    async with asyncio.timeout(PATIENCE):
        while not found:
            monkeypatch.setattr(node.book, "fencing", Fencing(node.book.store().why_gone))
            found = dict(await asyncio.to_thread(node.asked.gone, others))
    assert found == {"node-29": "does not exist any more"}


async def test_while_there_is_a_pool_the_address_has_an_entry(node: Node, server: FakeApiServer) -> None:
    pool(server, **{"7": {"id": "other", "podref": "web/x"}})
    await node.add("10.9.0.1")
    assert 10 << 24 | 9 << 16 | 7 in node.asked.taken(SOURCE)
    await eventually(lambda: entries(server).get("1") == {"id": "c1", "podref": "web/a", "ifname": "net1"})
    await node.delete()
    await eventually(lambda: not names(server))
    assert entries(server).keys() == {"7"}


async def test_a_del_frees_what_the_binary_has_given(node: Node, server: FakeApiServer) -> None:
    pool(server, **{"7": {"id": "c7", "podref": "web/a", "ifname": "net1"}, "8": {"id": "c8", "podref": "web/b"}})
    for address, podref in (("10.9.0.7", "web/a"), ("10.9.0.8", "web/b")):
        spec = {"podref": podref, "ifname": "net1"}
        server.put(RESERVATIONS, {"metadata": {"namespace": NAMESPACE, "name": address}, "spec": spec})
    await node.delete("c7")
    await eventually(lambda: entries(server).keys() == {"8"})
    assert names(server) == {"10.9.0.8"}


async def test_what_a_claim_holds_stays_until_the_claim_goes(node: Node, server: FakeApiServer) -> None:
    await node.add("10.9.0.1", claim="web/vm")
    server.fail(503, float("inf"), contains="ipamclaims")
    await node.delete()
    await asyncio.sleep(0.2)
    assert names(server) == {"10.9.0.1"}
    server.faults.clear()
    await eventually(lambda: not names(server))


def claim(server: FakeApiServer) -> None:
    spec = {"network": "net", "interface": "net1"}
    server.put(IPAM_CLAIMS, {"metadata": {"namespace": "web", "name": "vm"}, "spec": spec})


async def test_two_of_one_node_borrow_what_a_claim_holds(
    node: Node, server: FakeApiServer, client: ApiClient, tmp_path: Path
) -> None:
    """As while a virtual machine is made anew on its node. Each has it until its own end, also after a restart."""
    claim(server)
    pool(server)
    first, second = Owner("c1", "net1", "net"), Owner("c2", "net1", "net")
    made = await node.add("10.9.0.1", "c1", claim="web/vm")
    assert (await node.add("10.9.0.1", "c2", "web/b", claim="web/vm")).uid == made.uid
    assert [item.uid for owner in (first, second) for item in node.asked.held_by(owner)] == [made.uid] * 2
    await eventually(lambda: entries(server).keys() == {"1"})
    later = Node(client, tmp_path / "addresses")
    await asyncio.to_thread(later.book.load)
    assert [item.uid for owner in (first, second) for item in later.asked.held_by(owner)] == [made.uid] * 2
    server.delete(IPAM_CLAIMS, "web", "vm")
    await node.delete("c2")
    await asyncio.sleep(0.2)
    assert names(server) == {"10.9.0.1"}
    assert node.asked.held_by(first)
    await node.delete("c1")
    await eventually(lambda: not names(server))
    await eventually(lambda: not node.asked.held_by(first))
    await eventually(lambda: not entries(server))


async def test_what_the_second_one_does_not_get_the_first_keeps(node: Node, server: FakeApiServer) -> None:
    claim(server)
    made = await node.add("10.9.0.1", "c1", claim="web/vm")
    server.fail(503, float("inf"), method="POST")
    with pytest.raises(StoreUnavailableError):
        await node.add("10.9.0.1", "c2", "web/b", claim="web/vm")
    assert node.asked.held_by(made.owner) == [made]
    await node.delete("c2")
    await asyncio.sleep(0.2)
    assert node.asked.held_by(made.owner) == [made]


async def test_a_claim_says_what_it_holds_and_for_which_pod(node: Node, server: FakeApiServer) -> None:
    claim(server)
    await node.add("10.9.0.1", claim="web/vm")
    await node.add("fd00::1", claim="web/vm", range="fd00::/64")
    found = server.objects[IPAM_CLAIMS]["web", "vm"]
    status = {"ips": ["10.9.0.1/24", "fd00::1/64"], "ownerPod": {"name": "a"}}
    await eventually(lambda: server.get(IPAM_CLAIMS, "web", "vm").get("status") == status)
    await node.delete()
    await node.add("10.9.0.1", "c2", "web/b", claim="web/vm")
    await eventually(lambda: server.get(IPAM_CLAIMS, "web", "vm")["status"]["ownerPod"] == {"name": "b"})
    assert found["spec"] == server.get(IPAM_CLAIMS, "web", "vm")["spec"]


async def test_a_claim_that_may_not_be_written_changes_nothing(node: Node, server: FakeApiServer) -> None:
    server.fail(403, float("inf"), method="PATCH", contains="ipamclaims")
    claim(server)
    await node.add("10.9.0.1", claim="web/vm")
    await eventually(lambda: server.count("PATCH") == 1)
    await asyncio.sleep(0.2)
    assert server.count("PATCH") == 1
    assert not node.book._queue.problems


async def test_what_a_claim_has_lent_to_another_node_is_not_missing_there(
    node: Node, client: ApiClient, server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "ADDRESSES_COMPARED_SECONDS", 0.05)
    claim(server)
    other = Node(client, tmp_path / "other", "node-b")
    async with running(other.book.run()):
        await other.add("10.9.0.1", "c2", "web/b", claim="web/vm")
        await node.add("10.9.0.1", claim="web/vm")
        await eventually(lambda: server.get(IPAM_CLAIMS, "web", "vm")["status"]["ownerPod"] == {"name": "a"})
        posts, seen = server.count("POST"), len(server.requests)
        await asyncio.sleep(0.5)
        assert server.count("POST") == posts
        compared = server.requests[seen:]
        assert len(compared) > 4
        assert all("labelSelector" in str(request) for request in compared if "overlapping" in str(request)), compared
        server.delete(RESERVATIONS, NAMESPACE, "10.9.0.1")
        await eventually(lambda: names(server) == {"10.9.0.1"})
