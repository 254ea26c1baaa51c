"""What is known of a network's directory: the names in it, and what each lease says; pure.

A book answers what an ADD or a DEL asks without a look at each lease. `store` fills it, `index` keeps it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, KeysView
from typing import Final

from multus_daemon.plugins.builtin.host_local.config import text_of
from multus_daemon.plugins.builtin.host_local.runs import Runs

LOCK_NAME: Final = "lock"
LAST_RESERVED_PREFIX: Final = "last_reserved_ip."
BESIDE: Final = ".new"
"""One name is enough: only the holder of the lock writes it. Nothing in the directory matters with a name like this."""


def is_lease(name: str) -> bool:
    """False for the files of the directory that never name an owner."""
    return name not in (LOCK_NAME, BESIDE) and not name.startswith(LAST_RESERVED_PREFIX)


class Book:
    """The names and the leases of one directory. Used by one thread at a time."""

    def __init__(self) -> None:
        """A book that knows nothing: it has to be listed first."""
        self.listed = False
        """True once the directory's names are in it."""
        self.unread: set[str] = set()
        """Leases whose content, or whose very existence, is to be looked up before it counts."""
        self._contents: dict[str, bytes | None] = {}
        self._names: dict[bytes, list[str]] = {}
        # By IP version. Made when an address is wanted that is taken, which most never are.
        self._runs: dict[int, Runs] = {}

    def __len__(self) -> int:
        """How many names it holds."""
        return len(self._contents)

    @property
    def taken(self) -> KeysView[str]:
        """Every name: an address that is a file is taken, whatever is in the file."""
        return self._contents.keys()

    def relist(self, names: Iterable[str]) -> None:
        """`names` are all there are. What is known of those that stay is kept."""
        present = set(names)
        for name in self._contents.keys() - present:
            self.drop(name)
        for name in present - self._contents.keys():
            self.put(name, None)
            if is_lease(name):
                self.unread.add(name)
        self.listed = True

    def put(self, name: str, content: bytes | None) -> None:
        """`name` is there and holds `content`, white space around it removed; None: nobody can read it."""
        if name in self._contents:
            self._disown(name)
        elif self._runs and (number := _number(name)) and number[0] in self._runs:
            self._runs[number[0]].add(number[1])
        self._contents[name] = content
        if content is not None:
            self._names.setdefault(content, []).append(name)

    def drop(self, name: str) -> None:
        """`name` is not there; absent is done."""
        self.unread.discard(name)
        if name not in self._contents:
            return
        self._disown(name)
        del self._contents[name]
        if self._runs and (number := _number(name)) and number[0] in self._runs:
            self._runs[number[0]].discard(number[1])

    def holding(self, content: bytes) -> list[str]:
        """The names of the leases with this content, in no order."""
        return list(self._names.get(content, ()))

    def next_free(self, value: int, version: int) -> int:
        """The first address from `value` on, both as numbers, that is not taken. It may lie outside any range."""
        if text_of(value, version) not in self._contents:
            return value
        runs = self._runs.get(version)
        if runs is None:
            numbers = (_number(name) for name in self._contents)
            runs = self._runs[version] = Runs(number[1] for number in numbers if number and number[0] == version)
        return runs.next_free(value)

    def _disown(self, name: str) -> None:
        content = self._contents[name]
        if content is None:
            return
        names = self._names[content]
        names.remove(name)
        if not names:
            del self._names[content]


def _number(name: str) -> tuple[int, int] | None:
    """Version and number of the address that `name` is; None for anything else.

    Only an address as `text_of` writes it: whoever calls a file `fd00::02` has not taken `fd00::2`.
    """
    try:
        if ":" in name:
            version, value = 6, int(ipaddress.IPv6Address(name))
        else:
            version, value = 4, int.from_bytes(socket.inet_pton(socket.AF_INET, name), "big")
    except (OSError, ValueError):
        return None
    return (version, value) if text_of(value, version) == name else None
