"""The reservations of addresses that the cluster shares: OverlappingRangeIPReservations and IPPools of whereabouts.

Both are watched. A reservation is kept as one text by a number of its address: 10,000 take 2.5 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast
from urllib.parse import quote

import msgspec

from multus_daemon import deadlines
from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiError, KubeError
from multus_daemon.cluster.kube.informer import Informer
from multus_daemon.cluster.kube.latest import JSON_PATCH, MERGE_PATCH
from multus_daemon.cluster.kube.objects import DECODE_ERRORS, Item, Key, Metadata, Resource
from multus_daemon.metrics import Metrics
from multus_daemon.runtime import fs
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec import addresses
from multus_daemon.spec.addresses import Address, Owner, Reservation
from multus_daemon.spec.ports import AddressHeldError, StoreRefusesError, StoreUnavailableError

log = logging.getLogger(__name__)

Object = Mapping[str, Any]
_CHANGED: Final = (404, 409, 422)
"""Statuses of a request with a condition that the object does not fulfil, or whose object is gone."""
_VERSION_6: Final = 1 << 128
_POOLS_PAGE: Final = 10
"""Number of pools in one answer: the entries of a /16 are 10 MB."""


class KubeReservations:
    """The reservations of a namespace, for the event loop; `find` and `taken` are for any thread."""

    def __init__(self, client: ApiClient, namespace: str, metrics: Metrics) -> None:
        self.changed: Callable[[str], None] = lambda name: None
        """Called with the name of each reservation that is new, changes or is deleted; it must not block."""
        self.connected: Callable[[], None] = lambda: None
        """Called when the API server answers again after the watch was cut."""
        self._numbers: dict[tuple[str, int], set[int]] = {}
        """Addresses that are held, by scope and IP version, of those that were asked for."""
        self._client = client
        self._base = f"{addresses.API}/namespaces/{quote(namespace, safe='')}"
        held = Resource("reservations", f"{self._base}/{addresses.RESERVATIONS}", _decode, _uid)
        pools = Resource("pools", f"{self._base}/{addresses.POOLS}", decode_pool, page_size=_POOLS_PAGE)
        # Gates of their own: a cluster without whereabouts must not make the daemon unready.
        self._held: Informer[str] = Informer(client, held, Gates(), metrics, lambda: self.connected())
        self._pools: Informer[Pool] = Informer(client, pools, Gates(), metrics)
        self._held.changed, self._held.gone = partial(self._tell, is_held=True), partial(self._tell, is_held=False)

    def _tell(self, text: str, *, is_held: bool) -> None:
        for key in tuple(self._numbers):
            self._count(key, text, is_held=is_held)
        self.changed(text.partition("\t")[0])

    def _count(self, key: tuple[str, int], text: str, *, is_held: bool) -> None:
        """Add the address to those of its scope and version, or remove it."""
        name, (scope, version) = text.partition("\t")[0], key
        if ("." in name) == (version == 4) and (found := addresses.address_of(name, scope)):
            numbers = self._numbers[key]
            (numbers.add if is_held else numbers.discard)(int(found))

    async def run(self) -> None:
        """Watch for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._held.run(), name="reservations")
            group.create_task(self._pools.run(), name="pools")

    async def listed(self) -> None:
        """Return after the first lists."""
        await self._held.synced.wait()
        await self._pools.synced.wait()

    def relist(self) -> None:
        """List again: a reservation of this node is not as the watch says."""
        self._held.relist()
        self._pools.relist()

    @property
    def problem(self) -> str:
        """Why the objects are not watched now; empty if they are."""
        found = [item.problem for item in (self._held, self._pools) if not (item.connected and item.synced.is_set())]
        return found[0] if found else ""

    # --- from memory -------------------------------------------------------------------------------------------------

    def find(self, address: Address, scope: str) -> Reservation | None:
        """Return the reservation of the address; without container, network and range. None if there is none."""
        text = self._held.get(_key(addresses.object_name(address, scope)))
        if text is None:
            return None
        _, uid, podref, ifname, node, claim = text.split("\t")
        return Reservation(address, scope, podref, Owner("", ifname, ""), node, claim=claim, uid=uid)

    def taken(self, scope: str, pool: str, version: int) -> Container[int]:
        """Return the numbers of the addresses that reservations or entries of the pool hold."""
        held: Container[int] = cast(Mapping[int, str], self._held.live)
        if scope or version == 6:
            if (scope, version) not in self._numbers:
                self._numbers[scope, version] = set()
                for key in self._held.known():
                    if text := self._held.get(key):
                        self._count((scope, version), text, is_held=True)
            held = self._numbers[scope, version]
        entries = self._pools.get(("", pool))
        return addresses.Either(held, entries.numbers) if entries and entries.version == version else held

    def of_claim(self, claim: str, scope: str) -> list[Reservation]:
        """Return what a claim holds of the scope."""
        names = [text.partition("\t")[0] for text in self._held.known().values() if text.endswith(f"\t{claim}")]
        found = [address for name in names if (address := addresses.address_of(name, scope))]
        return [item for address in found if (item := self.find(address, scope))]

    def pools(self) -> Container[str]:
        """Return the names of the pools that whereabouts' binary has made."""
        return [name for _, name in self._pools.known()]

    # --- by the API server -------------------------------------------------------------------------------------------

    async def create(self, reservation: Reservation) -> Reservation:
        """Create the reservation; return it with its UID. Raises AddressHeldError, StoreUnavailableError."""
        body = addresses.encode(replace(reservation, uid="", also=()), fs.boot())
        try:
            with _as_port_errors(f"address {reservation.address} can't be reserved"):
                answer = await self._client.request("POST", f"{self._base}/{addresses.RESERVATIONS}", body=body)
                self._held.poke()
                return replace(reservation, uid=addresses.decode_object(answer).metadata.uid)
        except _ConflictError as error:
            holder = await self.read(reservation.name)
            by = f"pod {holder.podref}{f' on node {holder.node}' if holder.node else ''}" if holder else "another pod"
            raise AddressHeldError(f"{reservation.address} is held by {by}", holder) from error

    async def read(self, name: str) -> Reservation | None:
        """Return the reservation of this name as it is now; None if there is none. Raises StoreUnavailableError."""
        with _as_port_errors(f"reservation {name} can't be read"):
            answer = await self._existing(self._path(addresses.RESERVATIONS, name))
            return addresses.decode(answer) if answer is not None else None

    async def delete(self, reservation: Reservation) -> bool:
        """Delete the reservation with this UID, and its entry in the pool, if it is its container's.

        Returns False if it was not there. Raises StoreUnavailableError.
        """
        await self._leave(reservation)
        # After a crash between the requests the comparison of its node finds it.
        freed = {"metadata": {"uid": reservation.uid, "finalizers": None}}
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": reservation.uid}}
        path = self._path(addresses.RESERVATIONS, reservation.name)
        # Another one, or none, has this name; none after the first request, if somebody has deleted it.
        try:
            with _as_port_errors(f"address {reservation.address} can't be freed", _CHANGED):
                if reservation.node:
                    await self._client.request("PATCH", path, body=json.dumps(freed).encode(), content_type=MERGE_PATCH)
                await self._client.request("DELETE", path, body=json.dumps(options).encode())
        except _ConflictError:
            return False
        self._held.poke()
        return True

    async def of_node(self, node: str) -> list[Reservation]:
        """Return what the node holds, as it is now. Raises StoreUnavailableError."""
        found: list[Reservation] = []
        query = {"labelSelector": f"{addresses.NODE_LABEL}={addresses.node_label(node)}", "limit": "500"}
        with _as_port_errors("this node's reservations can't be listed"):
            while True:
                path, limit = f"{self._base}/{addresses.RESERVATIONS}", deadlines.ADDRESSES_OWN_SECONDS
                answer = await self._client.request("GET", path, query=query, timeout=limit)
                page = objects.decode_page(answer)
                found += [item for raw in page.items or () if (item := addresses.decode(raw))]
                if not page.metadata.continue_:
                    return found
                query["continue"] = page.metadata.continue_

    # --- pools of whereabouts' binary --------------------------------------------------------------------------------

    async def announce(self, reservation: Reservation, of_claim: Iterable[Reservation]) -> None:
        """Enter the reservation in its pool, if that is free there; write to its IPAMClaim what that holds.

        Raises StoreUnavailableError.
        """
        owner, claim = reservation.owner, reservation.claim
        entry = {"id": owner.container_id, "podref": reservation.podref, "ifname": owner.ifname}
        # The API server's patches compare what is missing as null.
        await self._patch_pool(reservation, "", None, {"op": "add", "value": entry})
        if claim and not claim.startswith(f"{addresses.STATEFUL_SET}/"):
            ips = [f"{item.address}/{item.range.partition('/')[2]}" for item in of_claim]
            status = {"ips": ips, "ownerPod": {"name": reservation.podref.partition("/")[2]}}
            # No such claim, an older custom resource, or no right: nothing depends on it.
            with contextlib.suppress(_ConflictError), _as_port_errors(f"{claim} can't be written", (403, *_CHANGED)):
                path, body = f"{addresses.path_of_claim(claim)}/status", json.dumps({"status": status}).encode()
                await self._client.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def _leave(self, reservation: Reservation) -> None:
        owner = reservation.owner
        # The entry of a claim's address is by any container that had it.
        tested = ("/ifname", owner.ifname) if reservation.claim else ("/id", owner.container_id)
        await self._patch_pool(reservation, *tested, {"op": "remove"})

    async def _patch_pool(self, reservation: Reservation, tested: str, value: str | None, change: Object) -> None:
        """Change the reservation's entry, if the pool is there and what is `tested` of the entry has the value."""
        if (known := self._pools.get(("", reservation.pool))) is None:
            return
        entry = f"/spec/allocations/{int(reservation.address) - known.first}"
        body = json.dumps([{"op": "test", "path": entry + tested, "value": value}, {**change, "path": entry}]).encode()
        what = f"IPPool {reservation.pool} can't be written"
        with contextlib.suppress(_ConflictError), _as_port_errors(what, _CHANGED):
            path = self._path(addresses.POOLS, reservation.pool)
            await self._client.request("PATCH", path, body=body, content_type=JSON_PATCH)

    async def free_entries(self, container_id: str, ifname: str, podref: str) -> None:
        """Free what the binary has given to the container's interface. Raises StoreUnavailableError."""
        await self.listed()
        for _, name in self._pools.known():
            with _as_port_errors(f"IPPool {name} can't be read"):
                answer = await self._existing(self._path(addresses.POOLS, name))
                found = [*_entries(answer, Owner(container_id, ifname, ""))] if answer is not None else []
            for entry in found:
                there = await self.read(entry.name)
                if there is not None and there.podref == podref and not there.node:
                    await self.delete(there)
                await self._leave(entry)

    # --- others ------------------------------------------------------------------------------------------------------

    async def why_gone(self, node: str) -> str:
        """Return why the node can hold nothing any more; empty if it can. Raises StoreUnavailableError."""
        with _as_port_errors(f"node {node} can't be read"):
            answer = await self._existing(objects.node_path(node))
            if answer is None:
                return "does not exist any more"
            taints = {taint.get("key") for taint in objects.taints_of(answer)}
        return f"has the taint {addresses.OUT_OF_SERVICE}" if addresses.OUT_OF_SERVICE in taints else ""

    async def has_claim(self, claim: str) -> bool:
        """Return False if the claim does not exist any more. Raises StoreUnavailableError."""
        with _as_port_errors(f"{claim} can't be read"):
            return await self._existing(addresses.path_of_claim(claim)) is not None

    async def _existing(self, path: str) -> bytes | None:
        try:
            return await self._client.request("GET", path, timeout=deadlines.API_READ_SECONDS)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def _path(self, plural: str, name: str) -> str:
        return f"{self._base}/{plural}/{quote(name, safe='')}"


class _ConflictError(Exception):
    """The object exists, or is not as the patch wants it."""


@contextlib.contextmanager
def _as_port_errors(what: str, conflicts: Container[int] = (409,)) -> Iterator[None]:
    """Turn errors of the API into StoreUnavailableError; those with a status of `conflicts` into _ConflictError."""
    try:
        yield
    except ApiError as error:
        if error.status in conflicts:
            raise _ConflictError(str(error)) from error
        kind = StoreRefusesError if error.status in (403, 404) else StoreUnavailableError
        raise kind(f"{what}: {error}", error.advice) from error
    except (KubeError, *DECODE_ERRORS) as error:
        raise StoreUnavailableError(f"{what}: {error}") from error


# --- what the API sends ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pool:
    """An IPPool: which addresses have an entry."""

    version: int
    first: int
    """The address at offset 0."""
    numbers: frozenset[int]
    """The addresses that have an entry."""


class _Entry(msgspec.Struct):
    id: str = ""
    podref: str = ""
    ifname: str = ""


class _PoolSpec(msgspec.Struct):
    range: str
    allocations: dict[str, _Entry] | None = None


class _Pool(msgspec.Struct):
    metadata: Metadata
    spec: _PoolSpec


_decode_pool: Final = msgspec.json.Decoder(_Pool).decode


def _key(name: str) -> Key:
    """Return the key of a reservation: a number for an address without a scope, which takes the least memory."""
    if (address := addresses.address_of(name, "")) is None:
        return "", name
    # Informers only hash their keys.
    return cast(Key, int(address) | (_VERSION_6 if address.version == 6 else 0))


def _decode(data: bytes | msgspec.Raw) -> Item[str]:
    """Decode a reservation to its name, UID, pod, interface, node and claim."""
    item = addresses.decode_object(data)
    given, spec = item.metadata.annotations or {}, item.spec
    fields = (item.metadata.name, item.metadata.uid, spec.podref, spec.ifname)
    node, claim = given.get(addresses.NODE_LABEL, ""), given.get(addresses.CLAIM_ANNOTATION, "")
    return Item(_key(item.metadata.name), item.metadata.resourceVersion, "\t".join((*fields, node, claim)))


def _uid(text: str) -> str:
    return text.split("\t", 2)[1]


def decode_pool(data: bytes | msgspec.Raw) -> Item[Pool]:
    """Decode an IPPool. Raises one of DECODE_ERRORS."""
    item = _decode_pool(data)
    first, offsets = _first(item), filter(str.isdecimal, item.spec.allocations or ())
    numbers = frozenset([int(first) + int(offset) for offset in offsets])
    pool = Pool(first.version, int(first), numbers)
    return Item(("", item.metadata.name), item.metadata.resource_version, pool)


def _first(item: _Pool) -> Address:
    try:
        return ipaddress.ip_interface(item.spec.range).ip
    except ValueError as error:
        raise msgspec.DecodeError(f"spec.range: {error}") from error


def _entries(data: bytes, owner: Owner) -> Iterator[Reservation]:
    """Yield the owner's entries in a pool."""
    item = _decode_pool(data)
    first, name, spec = _first(item), item.metadata.name, item.spec
    scope = name.removesuffix(addresses.pool_name(spec.range, "")).removesuffix("-")
    for offset, entry in (spec.allocations or {}).items():
        if (entry.id, entry.ifname) == (owner.container_id, owner.ifname) and offset.isdecimal():
            yield Reservation(first + int(offset), scope, entry.podref, owner, range=spec.range, pool=name)
