"""LinkOps without a kernel."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Collection, Mapping, Sequence

from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Result, Route


class FakeLinks:
    """`namespaces`: path of a network namespace to the names of its links; other paths are none.

    Processes run in each that is not in `unused`. Of a path in `unseen` it can't be told whether it is gone.
    `fail_at`: the number of a call, from 1, to what it raises.
    `ids`: by path, what tells its namespace from others; of others it can't be told. `files`: paths of something else.
    `observed`: by interface name, what `observe` returns; else the interfaces of the result that are there.
    `leaving`: what each `kept_open` was given.
    `default_routes`: by path, and whether it is of IPv4, the interface and the route of each that was put there.
    """

    def __init__(self, namespaces: Mapping[str, Sequence[str]] | None = None) -> None:
        self.namespaces: dict[str, set[str]] = {path: set(links) for path, links in (namespaces or {}).items()}
        self.calls: list[tuple[str, str, tuple[str, ...]]] = []
        self.fail_at: dict[int, BaseException] = {}
        self.unused: set[str] = set()
        self.unseen: set[str] = set()
        self.ids: dict[str, str] = {}
        self.files: set[str] = set()
        self.observed: dict[str, Result] = {}
        self.leaving: list[tuple[IfName, ...]] = []
        self.default_routes: dict[tuple[str, bool], list[tuple[IfName, Route]]] = {}
        self._guard = threading.Lock()

    def _call(self, method: str, netns: str, ifnames: Sequence[str] = ()) -> None:
        with self._guard:
            self.calls.append((method, netns, tuple(ifnames)))
            number = len(self.calls)
        if error := self.fail_at.get(number):
            raise error

    def kept_open(self, leaving: Collection[IfName] = ()) -> contextlib.AbstractContextManager[None]:
        self.leaving.append(tuple(leaving))
        return contextlib.nullcontext()

    def allow_own_netns(self, allowed: bool) -> None:
        pass

    def is_netns(self, path: str) -> bool:
        self._call("is_netns", path)
        return path in self.namespaces

    def netns_problem(self, path: str) -> str:
        self._call("netns_problem", path)
        return "" if path in self.namespaces else "is no network namespace"

    def netns_id(self, path: str) -> str:
        return self.ids.get(path, "")

    def is_elsewhere(self, path: str, netns_id: str) -> bool:
        if path not in self.namespaces:
            return path in self.files
        return bool(netns_id) and self.ids.get(path, netns_id) != netns_id

    def vanished(self, paths: Collection[str]) -> set[str]:
        self._call("vanished", ",".join(sorted(paths)))
        return {path for path in paths if path not in self.namespaces and path not in self.unseen | self.files}

    def netns_in_use(self, paths: Collection[str]) -> set[str]:
        self._call("netns_in_use", ",".join(sorted(paths)))
        return {path for path in paths if path in self.namespaces and path not in self.unused}

    def existing_links(self, netns: str, ifnames: Sequence[IfName]) -> list[IfName]:
        self._call("existing_links", netns, ifnames)
        if netns not in self.namespaces:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), netns)
        return [name for name in ifnames if name in self.namespaces[netns]]

    def observe(self, netns: str, attached: Sequence[tuple[IfName, Result]]) -> list[Result]:
        self._call("observe", netns, [ifname for ifname, _ in attached])
        if netns not in self.namespaces:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), netns)
        return [self.observed.get(ifname) or self._there(netns, result) for ifname, result in attached]

    def _there(self, netns: str, result: Result) -> Result:
        links = self.namespaces[netns]
        return Result(tuple(item for item in result.interfaces if item.sandbox and item.name in links))

    def first_missing(self, netns: str, ifname: IfName, result: Result, *, observed: bool) -> str:
        self._call("first_missing", netns, [ifname])
        if netns not in self.namespaces:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), netns)
        names = [item.name for item in result.interfaces if item.sandbox]
        return next((f'interface "{name}" is not there' for name in names if name not in self.namespaces[netns]), "")

    def move_default_routes(self, netns: str, ifname: IfName, routes: Sequence[Route]) -> None:
        self._call("move_default_routes", netns, [ifname])
        if netns not in self.namespaces:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), netns)
        for ipv4 in (True, False):
            if own := [(ifname, route) for route in routes if route.is_ipv4 is ipv4]:
                self.default_routes[netns, ipv4] = own
