"""The files of the addresses of the cluster that this node holds, and of DELs that wait for the API server. Blocks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from multus_daemon.runtime import fs
from multus_daemon.spec import addresses
from multus_daemon.spec.addresses import Owner, Reservation

log = logging.getLogger(__name__)

FOREIGN: Final = "_"
"""Begins the name of a file for a DEL whose ADD was by whereabouts' binary. No reservation's name has it."""


class AddressFiles:
    """A directory with a file for each address; the directory is made with the first one."""

    def __init__(self, directory: Path) -> None:
        self.held: dict[str, Reservation] = {}
        """The addresses by the name of their reservation. Without a UID if the API server has not answered."""
        self.released: set[str] = set()
        """Names of those that a DEL has released."""
        self.foreign: dict[str, str] = {}
        """Pods of the DELs whose ADD was by whereabouts' binary, by the name of the file."""
        self._directory = directory

    def load(self) -> bool:
        """Read all files; return False if there is no directory. Raises OSError."""
        if not self._directory.is_dir():
            return False
        for path in self._directory.iterdir():
            try:
                if path.name.startswith(FOREIGN):
                    self.foreign[path.name] = fs.read_limited(path).decode()
                elif not path.name.startswith(".") and (found := addresses.decode(fs.read_limited(path))):
                    self.held[path.name] = found
            except (OSError, ValueError) as error:
                # The reservation's label says whose it is.
                log.warning("the address in %s cannot be read: %s", path, error)
        return True

    def keep(self, reservation: Reservation) -> None:
        """Write the file of an address. Raises OSError."""
        fs.ensure_directory(self._directory)
        # A power failure ends the container, too.
        fs.write_atomic(self._directory / reservation.name, addresses.encode(reservation), fsync=False)
        self.held[reservation.name] = reservation

    def keep_foreign(self, owner: Owner, podref: str) -> str:
        """Write the file of a DEL; return its name. Raises OSError."""
        name = FOREIGN.join(("", owner.container_id, owner.ifname))
        fs.ensure_directory(self._directory)
        fs.write_atomic(self._directory / name, podref.encode())
        self.foreign[name] = podref
        return name

    def forget(self, name: str) -> None:
        """Remove a file. Raises OSError."""
        fs.remove(self._directory / name)
        self.held.pop(name, None)
        self.foreign.pop(name, None)
        self.released.discard(name)

    def of(self, owner: Owner) -> list[Reservation]:
        """Return what the owner holds. Thread-safe."""
        return [item for item in tuple(self.held.values()) if owner in item.owners]

    def names_of(self, container_id: str) -> list[str]:
        """Return the names of what the container holds. Thread-safe."""
        held = tuple(self.held.items())
        return [name for name, item in held if container_id in {owner.container_id for owner in item.owners}]
