"""The addresses that the cluster shares and this node holds: reserved by an ADD, asserted, and freed.

Each has a file below cniDir as long as it is held. While the record has its attachment, its reservation is created
again if somebody deletes it. It is deleted once the record no longer has the attachment; if no DEL has released it,
only if no namespace of the node has the address. Without such a file nothing is watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from multus_daemon import deadlines
from multus_daemon.node.address_files import FOREIGN, AddressFiles
from multus_daemon.node.address_rights import ADVICE, AddressRights
from multus_daemon.node.fencing import Fencing
from multus_daemon.runtime.aio import KeyedLock
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.runtime.recent import Recent
from multus_daemon.runtime.workqueue import WorkQueue
from multus_daemon.spec.addresses import Address, Owner, Reservation
from multus_daemon.spec.ports import AddressHeldError, StoreRefusesError, StoreUnavailableError

if TYPE_CHECKING:
    from multus_daemon.cluster.kube.reservations import KubeReservations
    from multus_daemon.cluster.standalone.reservations import DirectoryReservations
    from multus_daemon.node.holders import Holders

    Store: TypeAlias = KubeReservations | DirectoryReservations

log = logging.getLogger(__name__)

AT_ONCE: Final = 8
KEPT_MAX: Final = 4096
"""Freed addresses that are remembered."""


class Addresses:
    """Reserves, asserts and frees; `run` is a root task. `load` and `follow` are for any thread."""

    def __init__(
        self,
        directory: Path,
        node: str,
        opened: Callable[[], Store] | None,
        *,
        named: asyncio.Event | None = None,
        in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        """`opened` returns the store, at the first use; None if there is no cluster.

        `named` is set once a network has such addresses. `in_thread` runs what blocks.
        """
        self.node = node
        self.holders: Holders
        """Set before `run`."""
        self.files = AddressFiles(directory)
        self.is_listed = False
        """True once the first list is here."""
        self.rights = AddressRights(named)
        self.fencing = Fencing(lambda node: self.store().why_gone(node))
        self._opened = opened
        self._store: Store | None = None
        self._wanted = asyncio.Event()
        self._in_thread = in_thread
        self._portal = LoopPortal()
        clock = asyncio.get_running_loop().time
        self.cooling: Recent[str, bool] = Recent(KEPT_MAX, deadlines.ADDRESS_COOLS_SECONDS, clock=clock)
        self.lasts: Recent[tuple[str, str, str], Address] = Recent(KEPT_MAX)
        self.asked: dict[tuple[str, int], set[int]] = {}
        """Numbers of the addresses that this node has just asked for, by scope and IP version."""
        self._to_enter: set[str] = set()
        """Names of those that wait for their entry in a pool."""
        self.problems: dict[str, str] = {}
        """Why an address is another pod's, too, by name."""
        self.reported: set[str] = set()
        self._names = KeyedLock()
        retry = deadlines.ADDRESS_RETRY_SECONDS
        self._queue = WorkQueue[str](self._settle, retry=retry, failed=_failed, at_once=AT_ONCE, name="addresses")
        self._missing: set[str] = set()
        """Names of those that the last list of this node's did not have, whatever the watch says."""
        self._is_news = False
        """True if the watch was cut since the last comparison."""

    # --- at start ----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the files, before the first request. Blocks. Raises OSError."""
        if self.files.load():
            self._portal.tell(self._wanted.set)

    @property
    def is_wanted(self) -> bool:
        """True once the node has, or had, such an address."""
        return self._wanted.is_set()

    async def run(self) -> None:
        """Once there is such an address, watch and compare for ever."""
        async with asyncio.TaskGroup() as group:
            # An earlier node of this name may hold an address.
            asking = self.rights.run(lambda: self.store().of_node(self.node), self._wanted.set)
            group.create_task(asking, name="rights to addresses")
            await self._wanted.wait()
            store = self.store()
            store.changed, store.connected = self._changed, self._connected
            group.create_task(store.run(), name="reservations")
            group.create_task(self._queue.run(), name="addresses")
            group.create_task(self._compare(store), name="compare")

    async def ready(self) -> None:
        """Begin to watch; wait for the first list. Raises StoreUnavailableError."""
        store = self.store()
        self._wanted.set()
        try:
            async with asyncio.timeout(deadlines.ADDRESSES_LISTED_SECONDS):
                await store.listed()
            self.is_listed = True
        except TimeoutError:
            reason = store.problem or "they are still being listed"
            error = StoreUnavailableError(f"the addresses of the cluster are not known: {reason}", ADVICE)
            self.rights.doubt(error)
            raise error from None

    def store(self) -> Store:
        """Return the store. Raises StoreUnavailableError if there is no cluster."""
        if self._store is None:
            if self._opened is None:
                raise StoreUnavailableError("addresses of the cluster need a running daemon")
            self._store = self._opened()
        return self._store

    # --- requests ----------------------------------------------------------------------------------------------------

    async def reserve(self, wish: Reservation) -> Reservation:
        """Reserve the address for its owner, see `create`. Raises AddressHeldError, StoreUnavailableError, OSError."""
        store, name, wish = self.store(), wish.name, replace(wish, node=self.node, uid="")
        with self._asking(wish):
            async with self._names.hold(name):
                if (mine := self.files.held.get(name)) and not wish.is_same(mine) and name in self.files.released:
                    # Its DEL may have ended a moment ago.
                    await self._settle_held(name)
                mine = self.files.held.get(name)
                if mine is not None and not wish.is_same(mine):
                    raise AddressHeldError(f"{mine.address} is held by pod {mine.podref} on this node", mine)
                self.files.released.discard(name)
                if mine is not None and mine.uid and wish.owner in mine.owners:
                    return mine
                if mine is not None and wish.claim:
                    wish = replace(wish, also=tuple(owner for owner in mine.owners if owner != wish.owner))
                try:
                    await self._in_thread(self.files.keep, wish)
                    made = await _created(store, wish)
                    await self._in_thread(self.files.keep, made)
                except BaseException as error:
                    if isinstance(error, StoreRefusesError):
                        self.rights.doubt(error)
                    if mine is not None and mine.uid:
                        # Others have it.
                        await self._in_thread(self.files.keep, mine)
                    elif isinstance(error, AddressHeldError):
                        await self._in_thread(self.files.forget, name)
                    else:
                        # It may be there.
                        self.files.released.add(name)
                        self.due([name])
                    raise
        if wish.claim or wish.pool in store.pools():
            self._to_enter.add(name)
            self._queue.add_after(name, deadlines.ADDRESS_ENTRY_SECONDS)
        return made

    @contextlib.contextmanager
    def _asking(self, wish: Reservation) -> Iterator[None]:
        """Have the address taken during the block, and until the watch has reported its reservation."""
        asked = self.asked.setdefault((wish.scope, wish.address.version), set())
        asked.add(int(wish.address))
        try:
            yield
        finally:
            asyncio.get_running_loop().call_later(deadlines.ADDRESS_REPORTED_SECONDS, asked.discard, int(wish.address))

    async def replaced(self, old: Reservation, new: Reservation) -> Reservation:
        """Reserve an address of a node that is gone, see `take_over`. Raises as `reserve`."""
        store = self.store()
        there = await store.read(old.name)
        if there is not None and (there.node != old.node or not await store.delete(there)):
            raise AddressHeldError(f"{old.address} is held by pod {there.podref} now", there)
        return await self.reserve(new)

    # --- what happens to an address ----------------------------------------------------------------------------------

    def follow(self, container_id: str, entry: object | None, is_read: bool) -> None:
        """Called by the view about a record, in any thread."""
        names = self.files.names_of(container_id)
        if names and (entry is None or not self.files.released.isdisjoint(names)):
            self._portal.tell(self.due, names)

    def released(self, owner: Owner, podref: str) -> list[str]:
        """Note a DEL; return what is `due`. Blocks; for any thread. Raises OSError."""
        found = self.files.of(owner)
        names = [item.name for item in found]
        if not names and (self._store is None or self._store.pools()):
            # Its ADD may have been by whereabouts' binary.
            names = [self.files.keep_foreign(owner, podref)]
        self.files.released.update(() if any(item.also for item in found) else names)
        return names

    def due(self, names: Iterable[str]) -> None:
        """Have the addresses asserted or freed now, whichever it is."""
        self._wanted.set()
        for name in names:
            self._queue.add_after(name, 0)

    def _changed(self, name: str) -> None:
        """Called by the store about a reservation that is new, changes, or is deleted."""
        mine = self.files.held.get(name)
        if mine is not None and (name in self.problems or self._known(self.store(), name) != mine.uid):
            self._queue.add(name)

    def _connected(self) -> None:
        self._is_news = True

    async def _compare(self, store: Store) -> None:
        """Compare what the cluster has of this node with the files: at start, while and after the watch is cut."""
        await store.listed()
        due = -1.0
        while True:
            now = asyncio.get_running_loop().time()
            if (is_due := now >= due) or self._is_news or store.problem:
                self._is_news = False
                try:
                    own = {item.name: item.uid for item in await store.of_node(self.node)}
                    held = {name: item.uid for name, item in self.files.held.items()}
                    # What another node has created for the same claim has that node's label.
                    lent = {name for name, item in self.files.held.items() if item.claim} - own.keys()
                    differs = [name for name in {*own, *held} - lent if own.get(name) != held.get(name)]
                    self._missing = held.keys() - own.keys() - lent
                    if any((known := self._known(store, name)) and known != own.get(name) for name in differs):
                        # After a restore of etcd the watch may go on as if nothing had happened.
                        store.relist()
                    for name in [*own, *held, *self.files.foreign] if is_due else [*differs, *self._queue.problems]:
                        self._queue.add(name)
                    due = now + deadlines.ADDRESSES_COMPARED_SECONDS if is_due else due
                except StoreUnavailableError as error:
                    log.debug("%s", error)
                    self._is_news = True
            await asyncio.sleep(deadlines.ADDRESSES_LOOK_SECONDS)

    def _known(self, store: Store, name: str) -> str:
        """Return the UID of a reservation that this node has, as the watch says; empty if there is none."""
        mine = self.files.held.get(name)
        found = store.find(mine.address, mine.scope) if mine else None
        return found.uid if found else ""

    async def _settle(self, name: str) -> None:
        """Assert the reservation of this name, or free it. Raises StoreUnavailableError, OSError."""
        if name.startswith(FOREIGN):
            await self._free_foreign(name)
            return
        async with self._names.hold(name):
            await self._settle_held(name)

    async def _settle_held(self, name: str) -> None:
        """See `_settle`; the caller has the lock of the name."""
        store, mine = self.store(), self.files.held.get(name)
        subject = mine or await store.read(name)
        if subject is None or subject.node != self.node:
            return
        is_released = name in self.files.released
        on_record = [await self._in_thread(self.holders.has, owner) for owner in subject.owners]
        has = None if None in on_record else any(on_record)
        if has is None or (has and is_released):
            self._queue.add_after(name, deadlines.ADDRESS_WAITS_SECONDS)
        elif has or await self._is_in_use(subject, is_released=is_released):
            await self._assert(store, subject, is_kept=mine is not None)
            if not has:
                # No DEL will come.
                self._queue.add_after(name, deadlines.ADDRESS_UNRECORDED_SECONDS)
        else:
            await self._free(store, subject)

    async def _is_in_use(self, subject: Reservation, *, is_released: bool) -> bool:
        """Ask the kernel, unless a DEL has removed the interface."""
        if is_released and not await self._in_thread(self.holders.is_set_aside, subject.owner):
            return False
        return bool(await self._in_thread(self.holders.has_address, subject.address))

    async def _assert(self, store: Store, mine: Reservation, *, is_kept: bool) -> None:
        """Have the reservation exist; report it if another pod has the address."""
        name, present = mine.name, store.find(mine.address, mine.scope)
        if not is_kept:
            await self._in_thread(self.files.keep, mine)
        elif not mine.uid:
            # Its ADD has not ended, or has failed: the record will say.
            self._queue.add_after(name, deadlines.ADDRESS_WAITS_SECONDS)
            return
        elif present is None or present.uid != mine.uid or name in self._missing:
            try:
                made = await _created(store, mine)
            except AddressHeldError as error:
                there = error.holder
                if there and there.node == self.node and await self._in_thread(self.holders.has, there.owner) is False:
                    # A restored etcd has it of a container that has ended.
                    await store.delete(there)
                    self._queue.add_after(name, 0)
                else:
                    await self._is_taken(mine, error)
                return
            self._missing.discard(name)
            if made.uid != mine.uid:
                log.warning("the reservation of %s of pod %s was missing: it is back", mine.address, mine.podref)
                await self._in_thread(self.files.keep, made)
        self._is_well(name)
        if name in self._to_enter:
            await store.announce(mine, [item for item in self.files.held.values() if item.claim == mine.claim])
            self._to_enter.discard(name)

    async def _is_taken(self, mine: Reservation, error: AddressHeldError) -> None:
        """Note that another pod has the address. Report it if that is still so at the second look."""
        before, self.problems[mine.name] = self.problems.get(mine.name), str(error)
        self._queue.add_after(mine.name, deadlines.ADDRESS_TAKEN_SECONDS)
        if before == str(error) and mine.name not in self.reported and error.holder is not None:
            self.reported.add(mine.name)
            log.error("pod %s has %s, but %s", mine.podref, mine.address, error)
            await self._in_thread(self.holders.report, mine, error.holder)

    def _is_well(self, name: str) -> None:
        self.problems.pop(name, None)
        self.reported.discard(name)

    async def _free(self, store: Store, mine: Reservation) -> None:
        there: Reservation | None = None
        if not (mine.claim and await store.has_claim(mine.claim)):
            if mine.uid:
                self.cooling[mine.name] = True
                self.lasts[mine.podref, mine.owner.ifname, mine.scope] = mine.address
            # What a claim holds may have been created for another container.
            there = mine if mine.uid and not mine.claim else await store.read(mine.name)
            for _ in range(2):
                if there is not None and mine.is_same(there):
                    there = None if await store.delete(there) else await store.read(mine.name)
        await self._in_thread(self.files.forget, mine.name)
        self.asked.get((mine.scope, mine.address.version), set[int]()).discard(int(mine.address))
        self._is_well(mine.name)
        self._to_enter.discard(mine.name)
        if there is not None:
            # A restored etcd has it of another container, maybe of this node.
            self._queue.add_after(mine.name, 0)

    async def _free_foreign(self, name: str) -> None:
        """Remove what whereabouts' binary gave to a container whose DEL came to this daemon."""
        store, podref = self.store(), self.files.foreign.get(name)
        if podref is None:
            return
        _, container_id, ifname = name.split(FOREIGN, 2)
        if await self._in_thread(self.holders.has, Owner(container_id, ifname, "")) is not False:
            self._queue.add_after(name, deadlines.ADDRESS_WAITS_SECONDS)
            return
        await store.free_entries(container_id, ifname, podref)
        await self._in_thread(self.files.forget, name)


async def _created(store: Store, wish: Reservation) -> Reservation:
    """Create the reservation; an earlier attempt may have done so. Raises as `create` of the store."""
    try:
        return await store.create(wish)
    except AddressHeldError as error:
        if (holder := error.holder) is None or not wish.is_same(holder):
            raise
        return replace(wish, uid=holder.uid)


def _failed(name: str, error: Exception, seconds: float) -> None:
    expected = isinstance(error, StoreUnavailableError | OSError)
    log.warning("address %s: %s; tried again in %.0f s", name, error, seconds, exc_info=None if expected else error)
