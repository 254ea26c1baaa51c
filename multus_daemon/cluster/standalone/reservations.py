"""The reservations of addresses without a cluster: files of a directory that the daemons of several nodes share.

A file is made complete under another name, and gets its own by link(2), which fails if another one has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from multus_daemon.runtime import fs, inotify
from multus_daemon.spec import addresses
from multus_daemon.spec.addresses import Address, Reservation
from multus_daemon.spec.ports import AddressHeldError, StoreUnavailableError

_LOCK = ".lock"


class DirectoryReservations:
    """The reservations in a directory, for the event loop; `find` and `taken` are for any thread."""

    def __init__(self, directory: Path) -> None:
        self.changed: Callable[[str], None] = lambda name: None
        """Called with the name of each reservation that is new, changes or is removed; it must not block."""
        self.connected: Callable[[], None] = lambda: None
        self.problem = "not read yet"
        self._directory = directory
        self._held: Mapping[str, tuple[int, Reservation]] = {}
        """The inode and the content of each file."""
        self._read = asyncio.Event()

    async def run(self) -> None:
        """Follow changes of the directory for ever; poll it while it can't be watched."""

        async def changed(_: Collection[Path]) -> None:
            try:
                before, self._held = self._held, await asyncio.to_thread(self._scan)
                self.problem = ""
            except (OSError, StoreUnavailableError) as error:
                self.problem = str(error)
                raise OSError(self.problem) from error
            self._read.set()
            for name in before.keys() | self._held.keys():
                if before.get(name) != self._held.get(name):
                    self.changed(name)

        here = {self._directory: 0}
        await inotify.follow(lambda: here, lambda _, name: name[:1] != ".", changed, name=str(self._directory))

    def relist(self) -> None:
        """Do nothing: the directory is read again after each change."""

    async def listed(self) -> None:
        """Return after the first reading."""
        await self._read.wait()

    def find(self, address: Address, scope: str) -> Reservation | None:
        """Return the reservation of the address; None if there is none."""
        found = self._held.get(addresses.object_name(address, scope))
        return found and found[1]

    def taken(self, scope: str, pool: str, version: int) -> Container[int]:
        """Return the numbers of the addresses that are held."""
        held = (item for _, item in self._held.values())
        return {int(item.address) for item in held if (item.scope, item.address.version) == (scope, version)}

    def of_claim(self, claim: str, scope: str) -> list[Reservation]:
        """Return what a claim holds of the scope."""
        return [item for _, item in self._held.values() if (item.claim, item.scope) == (claim, scope)]

    async def create(self, reservation: Reservation) -> Reservation:
        """Create the file; return the reservation with its UID. Raises AddressHeldError, StoreUnavailableError."""
        made = replace(reservation, uid=os.urandom(8).hex())
        if await asyncio.to_thread(self._write, made):
            return made
        holder = await self.read(made.name)
        raise AddressHeldError(f"{made.address} is held by pod {holder.podref if holder else '?'}", holder)

    async def read(self, name: str) -> Reservation | None:
        """Return the reservation of this name as it is now; None if there is none. Raises StoreUnavailableError."""
        return await asyncio.to_thread(self._content, name)

    async def delete(self, reservation: Reservation) -> bool:
        """Remove the file if it has this UID; False if there is none. Raises StoreUnavailableError."""
        return await asyncio.to_thread(self._remove, reservation)

    async def of_node(self, node: str) -> list[Reservation]:
        """Return what the node holds, as it is now. Raises StoreUnavailableError."""
        with _as_port_errors(self._directory):
            return [item for _, item in (await asyncio.to_thread(self._scan)).values() if item.node == node]

    # --- what only a cluster has: pools of whereabouts' binary; nodes and claims that are gone -----------------------

    def pools(self) -> Container[str]:
        """Return nothing."""
        return ()

    async def announce(self, reservation: Reservation, of_claim: Iterable[Reservation]) -> None:
        """Do nothing."""

    async def free_entries(self, container_id: str, ifname: str, podref: str) -> None:
        """Do nothing."""

    async def why_gone(self, node: str) -> str:
        """Return nothing: a person removes the files of such a node."""
        return ""

    async def has_claim(self, claim: str) -> bool:
        """Return True: a person removes the files of a claim."""
        return True

    # --- files; all of it blocks -------------------------------------------------------------------------------------

    def _scan(self) -> dict[str, tuple[int, Reservation]]:
        found: dict[str, tuple[int, Reservation]] = {}
        fs.ensure_directory(self._directory)
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                known, inode = self._held.get(entry.name), entry.inode()
                if known is not None and known[0] == inode:
                    found[entry.name] = known
                elif (content := self._content(entry.name)) is not None:
                    found[entry.name] = inode, content
        return found

    def _content(self, name: str) -> Reservation | None:
        try:
            with _as_port_errors(self._directory):
                return addresses.decode(fs.read_limited(self._directory / name, follow=False))
        except (FileNotFoundError, ValueError):
            return None

    def _write(self, made: Reservation) -> bool:
        temporary = self._directory / f".{made.name}.{made.uid}"
        with _as_port_errors(self._directory):
            fs.ensure_directory(self._directory)
            fs.write_atomic(temporary, addresses.encode(made))
            try:
                os.link(temporary, self._directory / made.name)
            except FileExistsError:
                return False
            finally:
                fs.remove(temporary)
        return True

    def _remove(self, reservation: Reservation) -> bool:
        with _as_port_errors(self._directory), open(self._directory / _LOCK, "w") as lock:
            # Two that remove it must not remove what another one has created between them.
            fcntl.flock(lock, fcntl.LOCK_EX)
            there = self._content(reservation.name)
            return there is not None and there.uid == reservation.uid and fs.remove(self._directory / there.name)


@contextlib.contextmanager
def _as_port_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreUnavailableError(f"addresses in {directory}: {error}") from error
