"""LinkOps without a kernel."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

from multus_daemon.cni.names import IfName


class FakeLinks:
    """`namespaces`: path of a network namespace to the names of its links; other paths are none.

    `fail_at`: the number of a call, from 1, to what it raises.
    """

    def __init__(self, namespaces: Mapping[str, Sequence[str]] | None = None) -> None:
        self.namespaces: dict[str, set[str]] = {path: set(links) for path, links in (namespaces or {}).items()}
        self.calls: list[tuple[str, str, tuple[str, ...]]] = []
        self.fail_at: dict[int, BaseException] = {}

    def _call(self, method: str, netns: str, ifnames: Sequence[str] = ()) -> None:
        self.calls.append((method, netns, tuple(ifnames)))
        if error := self.fail_at.get(len(self.calls)):
            raise error

    def is_netns(self, path: str) -> bool:
        self._call("is_netns", path)
        return path in self.namespaces

    async def existing_links(self, netns: str, ifnames: Sequence[IfName]) -> list[IfName]:
        self._call("existing_links", netns, ifnames)
        if netns not in self.namespaces:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), netns)
        return [name for name in ifnames if name in self.namespaces[netns]]
