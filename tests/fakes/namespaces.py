"""Namespaces without a kernel."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

from multus_daemon.kernel.pod_netns import NodeNamespaces, PodNetns
from multus_daemon.kernel.routes import DefaultRoutes
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Result, Route


class FakeNamespaces(NodeNamespaces):
    """`namespaces`: path of a network namespace to the names of its links; other paths are none.

    Processes run in each that is not in `unused`. Of a path in `unseen` it can't be told whether it is gone.
    `fail_at`: the number of a call, from 1, to what it raises.
    `ids`: by path, what tells its namespace from others; of others it can't be told. `files`: paths of something else.
    `observed`: by interface name, what `observe` returns; else the interfaces of the result that are there.
    `leaving`: the links that each DEL is to remove together.
    `held`: the namespaces that were used and whose block has not ended.
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
        self.held: list[FakePodNetns] = []
        self.default_routes: dict[tuple[str, bool], list[tuple[IfName, Route]]] = {}
        self._guard = threading.Lock()

    def call(self, method: str, netns: str, ifnames: Sequence[str] = ()) -> None:
        with self._guard:
            self.calls.append((method, netns, tuple(ifnames)))
            number = len(self.calls)
        if error := self.fail_at.get(number):
            raise error

    def open(self, path: str, *, may_be_own: bool = False) -> FakePodNetns:
        return FakePodNetns(self, path, may_be_own=may_be_own)

    def is_netns(self, path: str) -> bool:
        self.call("is_netns", path)
        return path in self.namespaces

    def vanished(self, paths: Collection[str]) -> set[str]:
        self.call("vanished", ",".join(sorted(paths)))
        return {path for path in paths if path not in self.namespaces and path not in self.unseen | self.files}

    def netns_in_use(self, paths: Collection[str]) -> set[str]:
        self.call("netns_in_use", ",".join(sorted(paths)))
        return {path for path in paths if path in self.namespaces and path not in self.unused}


class FakePodNetns(PodNetns):
    """One of the namespaces of `links`."""

    def __init__(
        self, links: FakeNamespaces, path: str, *, may_be_own: bool = False, leaving: Collection[str] = ()
    ) -> None:
        super().__init__(path, may_be_own=may_be_own, leaving=leaving)
        self._links = links
        self._has_ended = False

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        self._has_ended = True
        if self in self._links.held:
            self._links.held.remove(self)

    def _use(self) -> None:
        assert not self._has_ended, "used after its block"
        if self not in self._links.held:
            self._links.held.append(self)

    def at(self, path: str, leaving: Collection[str] = ()) -> FakePodNetns:
        if leaving:
            self._links.leaving.append(tuple(IfName(name) for name in leaving))
        return FakePodNetns(self._links, path, may_be_own=self.may_be_own, leaving=leaving)

    def _entered(self, method: str, ifnames: Sequence[str]) -> set[str]:
        self._use()
        self._links.call(method, self.path, ifnames)
        if self.path not in self._links.namespaces:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return self._links.namespaces[self.path]

    @property
    def exists(self) -> bool:
        return self._links.is_netns(self.path)

    @property
    def problem(self) -> str:
        self._links.call("netns_problem", self.path)
        return "" if self.path in self._links.namespaces else "is no network namespace"

    def identity(self, *, with_cookie: bool = True) -> str:
        self._use()
        return self._links.ids.get(self.path, "")

    def is_elsewhere(self, netns_id: str) -> bool:
        self._use()
        if self.path not in self._links.namespaces:
            return self.path in self._links.files
        return bool(netns_id) and self._links.ids.get(self.path, netns_id) != netns_id

    def existing(self, ifnames: Sequence[IfName]) -> list[IfName]:
        links = self._entered("existing_links", ifnames)
        return [name for name in ifnames if name in links]

    def observe(self, attached: Sequence[tuple[IfName, Result]]) -> list[Result]:
        links = self._entered("observe", [ifname for ifname, _ in attached])
        return [self._links.observed.get(ifname) or _there(links, result) for ifname, result in attached]

    def missing(self, ifname: IfName, result: Result) -> Iterator[Difference]:
        links = self._entered("missing", [ifname])
        names = [item.name for item in result.interfaces if item.sandbox]
        yield from (Difference(f'interface "{name}" is not there') for name in names if name not in links)

    @property
    def default_routes(self) -> DefaultRoutes:
        return FakeDefaultRoutes(self)


def _there(links: set[str], result: Result) -> Result:
    return Result(tuple(item for item in result.interfaces if item.sandbox and item.name in links))


class FakeDefaultRoutes(DefaultRoutes):
    """The default routes of a fake namespace."""

    def __init__(self, pod: FakePodNetns) -> None:
        self._pod = pod

    def replace(self, ifname: IfName, wanted: Sequence[Route]) -> Mapping[str, Sequence[Route]]:
        routes = self._routes("move_default_routes", [ifname])
        replaced: dict[str, list[Route]] = {}
        for ipv4 in (True, False):
            if own := [(ifname, route) for route in wanted if route.is_ipv4 is ipv4]:
                for name, route in routes.get((self._pod.path, ipv4), ()):
                    replaced.setdefault(name, []).append(route)
                routes[self._pod.path, ipv4] = own
        return replaced

    def replaced_by(self, wanted: Sequence[Route]) -> Mapping[str, Sequence[Route]]:
        routes = self._routes("default_routes", [])
        found: dict[str, list[Route]] = {}
        for ipv4 in {route.is_ipv4 for route in wanted}:
            for name, route in routes.get((self._pod.path, ipv4), ()):
                found.setdefault(name, []).append(route)
        return found

    def add(self, ifname: IfName, wanted: Sequence[Route]) -> None:
        routes = self._routes("add_default_routes", [ifname])
        for route in wanted:
            present = routes.setdefault((self._pod.path, route.is_ipv4), [])
            if (ifname, route) not in present:
                present.append((ifname, route))

    def _routes(self, method: str, ifnames: list[IfName]) -> dict[tuple[str, bool], list[tuple[IfName, Route]]]:
        self._pod._entered(method, ifnames)
        return self._pod._links.default_routes
