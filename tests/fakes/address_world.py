"""Nodes that share addresses, on a virtual clock: the product over a model of the API server, with faults by a seed.

The model loses requests and answers, cuts watches, repeats events and delays each object's events by its own time. A
node has records and a kernel; its daemon is killed at any step, and its disk may be lost. The world asserts all the
time that no address is in two kernels, and at the end that nothing is left and nothing is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ipaddress
import json
import logging
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import pytest

from multus_daemon import deadlines
from multus_daemon.cluster.kube import informer
from multus_daemon.cluster.kube.errors import ApiError, GoneError, NoAnswerError
from multus_daemon.cluster.kube.reservations import KubeReservations
from multus_daemon.metrics import Metrics
from multus_daemon.node.address_book import NodeAddressBook
from multus_daemon.node.address_files import FOREIGN, AddressFiles
from multus_daemon.node.addresses import Addresses
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec import addresses
from multus_daemon.spec.addresses import Address, AddressRange, Owner, Reservation, candidates
from multus_daemon.spec.ports import AddressHeldError, StoreUnavailableError
from tests.fakes.apiserver import _patched
from tests.virtual_time import VirtualLoop

Object = dict[str, Any]
NODES = ("a", "b", "c")
CIDR = "10.9.0.0/28"
POOL = addresses.pool_name(CIDR, "")
SOURCE = AddressRange(ipaddress.ip_network(CIDR), (range(0x0A090001, 0x0A09000F),), pool=POOL)
METRICS = Metrics()


class Broken(AssertionError):  # noqa: N818  # it is an assertion
    """A promise is broken; the message has the seed."""


class Server:
    """The API server: objects by kind and name, with a history that watches read."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.objects: dict[str, dict[str, Object]] = {addresses.RESERVATIONS: {}, addresses.POOLS: {}, "nodes": {}}
        self.history: list[tuple[int, str, str, Object]] = []
        self.version, self.oldest, self.uids = 100, 100, 0
        self.is_away = False
        self.epoch = 0
        """Changes when all watches are cut."""
        self.news = asyncio.Event()

    def put(self, kind: str, name: str, item: Object) -> None:
        """Create or replace."""
        self.version += 1
        self.uids += 1
        known = self.objects[kind].get(name)
        item = copy.deepcopy(item)
        item["metadata"] |= {"name": name, "resourceVersion": str(self.version)}
        item["metadata"]["uid"] = known["metadata"]["uid"] if known else f"uid-{self.uids}"
        self.objects[kind][name] = item
        self._tell("MODIFIED" if known else "ADDED", kind, item)

    def remove(self, kind: str, name: str) -> None:
        """Delete."""
        self.version += 1
        item = copy.deepcopy(self.objects[kind].pop(name))
        item["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", kind, item)

    def delete(self, kind: str, name: str) -> None:
        """Delete, or mark what has a finalizer."""
        item = copy.deepcopy(self.objects[kind][name])
        if item["metadata"].get("finalizers"):
            item["metadata"]["deletionTimestamp"] = "now"
            self.put(kind, name, item)
        else:
            self.remove(kind, name)

    def _tell(self, event: str, kind: str, item: Object) -> None:
        self.history.append((self.version, event, kind, item))
        self.news.set()
        self.news = asyncio.Event()

    def cut(self, *, compact: bool = False) -> None:
        """End all watches; `compact`: those that resume have to list."""
        self.epoch += 1
        if compact:
            self.oldest = self.version
        self.news.set()
        self.news = asyncio.Event()

    def restore(self, snapshot: Mapping[str, Mapping[str, Object]], version: int) -> None:
        """Have the state of an earlier time, as after a restore of etcd: also its versions come again."""
        self.objects = copy.deepcopy({kind: dict(found) for kind, found in snapshot.items()})
        self.history = [item for item in self.history if item[0] <= version]
        self.version = version
        self.cut()


@dataclass
class Client:
    """A node's way to the API server, in place of `ApiClient`."""

    server: Server
    is_cut: bool = False
    loses: float = 0.0
    """Share of requests that are lost, and of answers."""
    removes: Callable[[Object], None] = lambda item: None
    """Called with each reservation that the product deletes."""

    async def turn(self) -> None:
        """No pause."""

    def _reach(self, what: str, share: float) -> None:
        if self.server.is_away or self.is_cut or self.server.chance.random() < share:
            raise NoAnswerError(f"{what}: lost")

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: bytes = b"", **_: object
    ) -> bytes:
        """Answer a request after some time."""
        what = f"{method} {path}"
        await asyncio.sleep(self.server.chance.uniform(0.001, 0.05))
        self._reach(what, self.loses)
        answer = self._serve(method, path, query or {}, body)
        await asyncio.sleep(self.server.chance.uniform(0.001, 0.05))
        self._reach(what, self.loses)
        return json.dumps(answer).encode()

    def _serve(self, method: str, path: str, query: Mapping[str, str], body: bytes) -> Object:
        server, parts = self.server, path.split("/")
        kind = next(kind for kind in server.objects if kind in parts)
        name, found = unquote(parts[-1]), server.objects[kind]
        if parts[-1] == kind and method == "GET":
            label, _, value = query.get("labelSelector", "").partition("=")
            items = [
                item for item in found.values() if not label or item["metadata"].get("labels", {}).get(label) == value
            ]
            return {"metadata": {"resourceVersion": str(server.version)}, "items": items}
        if method == "POST":
            item = json.loads(body)
            if item["metadata"]["name"] in found:
                raise ApiError(409, "AlreadyExists", "exists", request=path)
            server.put(kind, item["metadata"]["name"], item)
            return found[item["metadata"]["name"]]
        if name not in found:
            raise ApiError(404, "NotFound", "not found", request=path)
        if method == "DELETE":
            if json.loads(body)["preconditions"]["uid"] != found[name]["metadata"]["uid"]:
                raise ApiError(409, "Conflict", "uid", request=path)
            self.removes(found[name])
            server.delete(kind, name)
            return {}
        if method == "PATCH" and kind == addresses.RESERVATIONS:
            patch, item = json.loads(body), copy.deepcopy(found[name])
            if patch["metadata"]["uid"] != item["metadata"]["uid"]:
                raise ApiError(409, "Conflict", "uid", request=path)
            self.removes(item)
            item["metadata"].pop("finalizers", None)
            server.put(kind, name, item)
            if "deletionTimestamp" in item["metadata"]:
                server.remove(kind, name)
            return item
        if method == "PATCH":
            try:
                server.put(kind, name, _patched(found[name], json.loads(body)))
            except LookupError as error:
                raise ApiError(422, "Invalid", str(error), request=path) from error
        return found[name]

    async def lines(
        self, path: str, query: Mapping[str, str], *, on_open: Callable[[], None], **_: object
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events since a version. Those of each object are late by a time of its own; some come twice."""
        server, kind = self.server, path.rpartition("/")[2]
        await asyncio.sleep(server.chance.uniform(0.001, 0.05))
        self._reach(path, self.loses)
        seen, epoch = int(query["resourceVersion"]), server.epoch
        if seen > server.version:
            raise ApiError(504, "Timeout", "Too large resource version", request=path)
        if seen < server.oldest:
            raise GoneError(410, "Expired", "too old", request=path)
        on_open()
        while server.epoch == epoch and not (self.is_cut or server.is_away):
            due = [item for item in server.history if item[0] > seen and item[2] == kind]
            if not due:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(600):
                        await server.news.wait()
                continue
            await asyncio.sleep(server.chance.uniform(0.001, 0.3))
            seen = due[-1][0]
            # A sort by object keeps the order of each object's events.
            order = {item[3]["metadata"]["name"]: server.chance.random() for item in due}
            for _version, event, _kind, item in sorted(due, key=lambda found: order[found[3]["metadata"]["name"]]):
                if server.epoch != epoch:
                    return
                for _again in range(1 + (server.chance.random() < 0.1)):
                    yield json.dumps({"type": event, "object": item}).encode()


class Disk(AddressFiles):
    """The files of a node, in memory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(Path("/nowhere"))
        self._content = files

    def load(self) -> bool:
        for name, data in self._content.items():
            if name.startswith(FOREIGN):
                self.foreign[name] = data.decode()
            elif (item := addresses.decode(data)) is not None:
                self.held[name] = item
        return bool(self._content)

    def keep(self, reservation: Reservation) -> None:
        self._content[reservation.name] = addresses.encode(reservation)
        self.held[reservation.name] = reservation

    def keep_foreign(self, owner: Owner, podref: str) -> str:
        name = FOREIGN.join(("", owner.container_id, owner.ifname))
        self._content[name] = podref.encode()
        self.foreign[name] = podref
        return name

    def forget(self, name: str) -> None:
        self._content.pop(name, None)
        self.held.pop(name, None)
        self.foreign.pop(name, None)
        self.released.discard(name)


@dataclass
class Node:
    """A node: what survives its daemon, and the daemon."""

    world: World
    name: str
    client: Client
    files: dict[str, bytes] = field(default_factory=dict)
    records: set[str] = field(default_factory=set)
    """Containers on record."""
    kernel: dict[str, Address] = field(default_factory=dict)
    """The address that each container's namespace has."""
    at_work: set[str] = field(default_factory=set)
    reported: set[tuple[str, str]] = field(default_factory=set)
    book: Addresses = field(init=False)
    task: asyncio.Task[None] | None = None
    verbs: set[asyncio.Task[None]] = field(default_factory=set)

    # What `node.holders` is to the book.

    def has(self, owner: Owner) -> bool | None:
        return owner.container_id in self.records

    def is_set_aside(self, owner: Owner) -> bool:
        return False

    def has_address(self, address: Address) -> bool:
        return address in self.kernel.values()

    def report(self, mine: Reservation, other: Reservation) -> None:
        self.reported.add((mine.name, other.podref))

    # The daemon.

    def start(self) -> None:
        """Start the daemon with what the disk has."""
        client = cast(Any, self.client)
        opened, named = self.world.make_store, asyncio.Event()
        # The cluster has a network with such addresses.
        named.set()
        self.book = self.world.make_book(
            Path("/nowhere"),
            self.name,
            lambda: opened(client, addresses.NAMESPACE, METRICS),
            in_thread=_at_once,
            named=named,
        )
        self.book.files = Disk(self.files)
        self.book.holders = cast(Any, self)
        self.book.load()
        self.task = asyncio.create_task(self.book.run())

    async def kill(self) -> None:
        """End the daemon at whatever step it is; its requests end with it."""
        assert self.task is not None
        tasks = [self.task, *self.verbs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.at_work.clear()

    def verb(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a verb as a request of the daemon."""
        task = asyncio.create_task(work)
        self.verbs.add(task)
        task.add_done_callback(self.verbs.discard)

    async def add(self, container: str) -> None:
        """Attach a container, as the plugin does, if it can be."""
        with contextlib.suppress(StoreUnavailableError, AddressHeldError):
            await self.attach(container)

    async def attach(self, container: str) -> None:
        """Attach a container. Raises StoreUnavailableError, AddressHeldError."""
        owner, chance = Owner(container, "net1", "net"), self.world.chance
        self.at_work.add(container)
        self.records.add(container)
        try:
            await self.book.ready()
            made = await self._choose(owner)
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            self.kernel[container] = made.address
            self.world.look(made.address)
        except (StoreUnavailableError, AddressHeldError):
            self.book.due(self.book.released(owner, f"web/{container}"))
            await asyncio.sleep(chance.uniform(0.0, 0.2))
            self.records.discard(container)
            self.book.follow(container, None, False)
            raise
        finally:
            self.at_work.discard(container)

    async def _choose(self, owner: Owner) -> Reservation:
        book, pod = NodeAddressBook(self.book, LoopPortal()), f"web/{owner.container_id}"
        chance = self.world.chance.randrange
        for address in candidates(SOURCE, book.taken(SOURCE), lambda item: book.is_cooling(item, ""), (), chance):
            with contextlib.suppress(AddressHeldError):
                return await self.book.reserve(Reservation(address, "", pod, owner, range=CIDR, pool=POOL))
        held = [item for number in SOURCE.numbers() if (item := book.holder(SOURCE.address(number), SOURCE))]
        gone = await self.book.fencing.gone(sorted({item.node for item in held} - {"", self.name}))
        for old in held:
            if old.node in gone:
                with contextlib.suppress(AddressHeldError):
                    wish = Reservation(old.address, "", pod, owner, range=CIDR, pool=POOL)
                    return await self.book.replaced(old, wish)
        raise AddressHeldError("exhausted", None)

    async def delete(self, container: str) -> None:
        """Detach a container: most plugins remove the interface first, some release the address first."""
        owner, chance = Owner(container, "net1", "net"), self.world.chance
        self.at_work.add(container)
        # Without a record no plugin is called.
        is_late = container in self.records and chance.random() < 0.3
        if not is_late:
            self.kernel.pop(container, None)
            await asyncio.sleep(chance.uniform(0.0, 0.2))
        self.book.due(self.book.released(owner, f"web/{container}"))
        await asyncio.sleep(chance.uniform(0.0, 0.2))
        self.kernel.pop(container, None)
        self.records.discard(container)
        self.book.follow(container, None, False)
        self.at_work.discard(container)


async def _at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*arguments)


class World:
    """Three nodes, an API server, and whereabouts' binary on a fourth node."""

    def __init__(
        self,
        seed: int,
        *,
        make_book: Callable[..., Addresses] = Addresses,
        make_store: Callable[..., KubeReservations] = KubeReservations,
    ) -> None:
        self.seed = seed
        self.make_book, self.make_store = make_book, make_store
        self.chance = random.Random(seed)
        self.server = Server(self.chance)
        self.nodes = {name: Node(self, name, Client(self.server, removes=self._removes)) for name in NODES}
        self.found: list[str] = []
        """Faults in what the product has asked for."""
        self.excused: set[Address] = set()
        """Addresses whose reservation was taken away while they were in use: another pod may get one, and is told."""
        self.taken_over: set[str] = set()
        """Containers of the binary whose DEL a daemon gets: it frees their addresses, but does not assert them."""
        self.binary: dict[str, Address] = {}
        """Addresses of the binary's containers."""
        self.numbers = 0

    def broken(self, text: str) -> Broken:
        return Broken(f"seed {self.seed}: {text}")

    def users(self, address: Address) -> list[str]:
        """The containers whose namespaces have the address."""
        nodes = [(node.name, node.kernel) for node in self.nodes.values()] + [("binary", self.binary)]
        return [
            f"{name}/{container}" for name, kernel in nodes for container, item in kernel.items() if item == address
        ]

    def look(self, address: Address) -> None:
        """Assert that one namespace has the address."""
        if len(users := self.users(address)) > 1 and address not in self.excused:
            raise self.broken(f"{address} is in {users}")

    def _removes(self, item: Object) -> None:
        """Note that the product deletes the reservation of an address that its holder has."""
        container, name = item["spec"]["podref"].partition("/")[2], item["metadata"]["name"]
        if container in self.users_by_name(ipaddress.ip_address(name)):
            self.found.append(f"the reservation of {name}, which {container} has, is deleted")

    def users_by_name(self, address: Address) -> set[str]:
        """The names of the containers whose namespaces have the address."""
        return {name.partition("/")[2] for name in self.users(address)}

    def container(self) -> str:
        self.numbers += 1
        return f"c{self.numbers}"

    # --- faults ------------------------------------------------------------------------------------------------------

    def excuse(self) -> None:
        """After reservations have vanished: what is in use without its own, or is being given, may be given again."""
        held = self.server.objects[addresses.RESERVATIONS]
        used = {(item, name) for node in self.nodes.values() for name, item in node.kernel.items()}
        used |= {(item, name) for name, item in self.binary.items()}
        files = [item for node in self.nodes.values() for item in node.book.files.held.values()]
        used |= {(item.address, item.owner.container_id) for item in files}
        holders = {name: item["spec"]["podref"] for name, item in held.items()}
        self.excused |= {item for item, name in used if holders.get(str(item)) != f"web/{name}"}

    def _accuse(self) -> None:
        """Excuse an address no more once its one user, or nobody, has it again."""
        held = self.server.objects[addresses.RESERVATIONS]
        files = [item for node in self.nodes.values() for item in node.book.files.held.values()]
        for address in tuple(self.excused):
            users = self.users_by_name(address)
            users |= {item.owner.container_id for item in files if item.address == address}
            holder = held[str(address)]["spec"]["podref"] if str(address) in held else ""
            if {f"web/{name}" for name in users} <= {holder}:
                self.excused.discard(address)

    async def step(self) -> None:
        """One thing that happens."""
        self._accuse()
        if self.found:
            raise self.broken(self.found[0])
        chance, node = self.chance, self.chance.choice(list(self.nodes.values()))
        await asyncio.sleep(chance.choice((0.0, 0.01, 0.3, 3.0)))
        kind = chance.choices(
            (
                "add",
                "delete",
                "kill",
                "cut",
                "watch",
                "away",
                "stranger",
                "lose",
                "restore",
                "die",
                "binary",
                "foreign",
            ),
            (30, 20, 5, 3, 4, 2, 3, 2, 1, 1, 4, 2),
        )[0]
        await getattr(self, f"_{kind}")(node)

    async def _add(self, node: Node) -> None:
        node.verb(node.add(self.container()))

    async def _delete(self, node: Node) -> None:
        if containers := sorted((node.records | node.kernel.keys()) - node.at_work):
            node.verb(node.delete(self.chance.choice(containers)))

    async def _kill(self, node: Node) -> None:
        await node.kill()
        await asyncio.sleep(self.chance.choice((0.0, 1.0, 20.0)))
        node.start()

    async def _cut(self, node: Node) -> None:
        node.client.is_cut = not node.client.is_cut
        self.server.cut()

    async def _watch(self, node: Node) -> None:
        self.server.cut(compact=self.chance.random() < 0.5)
        for item in self.nodes.values():
            item.client.loses = self.chance.choice((0.0, 0.0, 0.05, 0.3))

    async def _away(self, node: Node) -> None:
        self.server.is_away = not self.server.is_away
        self.server.cut()

    async def _stranger(self, node: Node) -> None:
        """Somebody deletes a reservation, as whereabouts' reconciler may; or even takes its finalizer away."""
        if held := sorted(self.server.objects[addresses.RESERVATIONS]):
            remove = self.chance.choice((self.server.delete, self.server.remove))
            remove(addresses.RESERVATIONS, self.chance.choice(held))
            self.excuse()

    async def _lose(self, node: Node) -> None:
        """The node loses its records and files; its containers run on. Its requests had a record."""
        await node.kill()
        node.files.clear()
        node.records.clear()
        node.start()

    async def _restore(self, node: Node) -> None:
        snapshot, version = copy.deepcopy(self.server.objects), self.server.version
        for _ in range(self.chance.randrange(8)):
            await self._step_of_containers()
        self.server.restore(snapshot, version)
        self.excuse()

    async def _step_of_containers(self) -> None:
        node = self.chance.choice(list(self.nodes.values()))
        await (self._add if self.chance.random() < 0.5 else self._delete)(node)
        await asyncio.sleep(self.chance.uniform(0.0, 2.0))

    async def _die(self, node: Node) -> None:
        """The node loses power for good, its Node object is deleted; later another machine has its name."""
        await node.kill()
        node.kernel.clear()
        node.records.clear()
        node.files.clear()
        self.server.remove("nodes", node.name)
        for _ in range(self.chance.randrange(12)):
            await self._step_of_living(node)
        self.server.put("nodes", node.name, {"metadata": {}, "spec": {}})
        node.start()

    async def _step_of_living(self, dead: Node) -> None:
        node = self.chance.choice([item for item in self.nodes.values() if item is not dead])
        await (self._add if self.chance.random() < 0.8 else self._delete)(node)
        await asyncio.sleep(self.chance.uniform(0.0, 2.0))

    async def _binary(self, node: Node) -> None:
        """The binary's ADD or DEL on its node: the pool, then the reservation."""
        found = self.server.objects
        empty: Object = {"metadata": {}, "spec": {"range": CIDR, "allocations": {}}}
        pool: Object = copy.deepcopy(found[addresses.POOLS].get(POOL) or empty)
        entries = pool["spec"]["allocations"]
        if self.server.is_away:
            return
        if self.binary and self.chance.random() < 0.5:
            self._free_of_binary(self.chance.choice(sorted(self.binary)))
            return
        container = self.container()
        for number in SOURCE.numbers():
            address, offset = SOURCE.address(number), str(number - int(SOURCE.network.network_address))
            if offset not in entries and addresses.object_name(address, "") not in found[addresses.RESERVATIONS]:
                entries[offset] = {"id": container, "podref": f"web/{container}", "ifname": "net1"}
                self.server.put(addresses.POOLS, POOL, pool)
                spec = {"podref": f"web/{container}", "ifname": "net1"}
                self.server.put(addresses.RESERVATIONS, str(address), {"metadata": {}, "spec": spec})
                self.binary[container] = address
                self.look(address)
                return

    def _free_of_binary(self, container: str) -> None:
        address, pool = self.binary.pop(container), copy.deepcopy(self.server.objects[addresses.POOLS][POOL])
        entries = pool["spec"]["allocations"]
        pool["spec"]["allocations"] = {key: item for key, item in entries.items() if item["id"] != container}
        self.server.put(addresses.POOLS, POOL, pool)
        there = self.server.objects[addresses.RESERVATIONS].get(str(address))
        if there is not None and there["spec"]["podref"] == f"web/{container}":
            self.server.remove(addresses.RESERVATIONS, str(address))

    async def _foreign(self, node: Node) -> None:
        """The binary has left its node, which this daemon has taken over: it gets the DEL."""
        if self.binary:
            container = self.chance.choice(sorted(self.binary))
            node.kernel[container] = self.binary.pop(container)
            node.records.add(container)
            self.taken_over.add(container)
            node.verb(node.delete(container))

    async def _usurp(self, node: Node) -> None:
        """While a node is cut off, somebody deletes its reservations, and another node gives away the addresses."""
        node.client.is_cut = True
        self.server.cut()
        for name in [str(item) for item in node.kernel.values()]:
            if name in self.server.objects[addresses.RESERVATIONS]:
                self.server.remove(addresses.RESERVATIONS, name)
        self.excuse()
        for _ in range(5):
            await self._step_of_living(node)
        for _ in range(self.chance.randrange(3)):
            await self._delete(node)

    # --- the run -----------------------------------------------------------------------------------------------------

    async def run(self, steps: int) -> None:
        """Let things happen, heal the faults, and assert that what is held is what is used; then end all containers."""
        for node in self.nodes.values():
            self.server.put("nodes", node.name, {"metadata": {}, "spec": {}})
            node.start()
        for _ in range(steps):
            await self.step()
        await self._usurp(self.chance.choice(list(self.nodes.values())))
        await self._heal()
        # Nobody knows of an address that a node and the cluster have lost.
        used = [(node, name, item) for node in self.nodes.values() for name, item in node.kernel.items()]
        asserted = [item for item in used if item[1] not in self.taken_over]
        known = {item for node, name, item in asserted if name in node.records or item not in self.excused}
        await self._settled("living", known, {item for _, _, item in used})
        await asyncio.sleep(60.0)
        self._require_reports()
        if self.found:
            raise self.broken(self.found[0])
        for node in self.nodes.values():
            for container in sorted(node.records | node.kernel.keys()):
                await node.delete(container)
        for container in sorted(self.binary):
            self._free_of_binary(container)
        await self._settled("ended", set(), set())

    async def _heal(self) -> None:
        self.server.is_away = False
        for node in self.nodes.values():
            node.client.is_cut, node.client.loses = False, 0.0
        self.server.cut(compact=True)
        while any(node.verbs for node in self.nodes.values()):
            await asyncio.sleep(1.0)
        for node in self.nodes.values():
            # The runtime ends what an ADD has not finished.
            for container in sorted(node.records - node.kernel.keys()):
                await node.delete(container)

    async def _settled(self, when: str, known: set[Address], used: set[Address]) -> None:
        """Wait until what is `known` to be used is held, and nothing but what is used."""
        end = asyncio.get_running_loop().time() + 3 * deadlines.ADDRESSES_COMPARED_SECONDS
        wanted, users = {str(item) for item in known}, {str(item) for item in [*used, *self.binary.values()]}
        while True:
            held = self.server.objects[addresses.RESERVATIONS]
            # What the binary has lost nobody asserts, and what it has left its reconciler frees.
            missing = wanted - held.keys()
            left = {name: item for name, item in held.items() if item["metadata"].get("labels") and name not in users}
            files = {node.name: sorted(node.files) for node in self.nodes.values() if node.files and not used}
            if not (missing or left or files):
                return
            if asyncio.get_running_loop().time() > end:
                raise self.broken(f"{when}: left {left}, missing {missing}, files {files}")
            await asyncio.sleep(5.0)

    def _require_reports(self) -> None:
        """Each address that two containers have is reported by a node that does not hold it."""
        for address in self.excused:
            users = self.users(address)
            on_record = [
                node
                for node in self.nodes.values()
                for name, item in node.kernel.items()
                if item == address and name in node.records
            ]
            if len(users) > 1 and len(on_record) > 1 and not any(node.book.reported for node in on_record):
                raise self.broken(f"{address} of {users} is not reported")


def run(seed: int, *, steps: int = 30, make_world: type[World] = World, **made: Any) -> None:
    """Run one world in virtual time; raise Broken if a promise does not hold. `made`: as for World."""
    random.seed(seed)
    logging.disable(logging.CRITICAL)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
        patch.setattr(informer, "time", clock)
        patch.setattr(deadlines, "ADDRESSES_COMPARED_SECONDS", 60.0)
        try:
            runner.run(_run(seed, steps, make_world, made))
        finally:
            logging.disable(logging.NOTSET)


async def _run(seed: int, steps: int, make_world: type[World], made: dict[str, Any]) -> None:
    world = make_world(seed, **made)
    try:
        await world.run(steps)
    finally:
        for node in world.nodes.values():
            await node.kill()
