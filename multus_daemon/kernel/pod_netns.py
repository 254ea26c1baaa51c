"""A pod's network namespace and the host's, for the thread of a request.

A request opens its `PodNetns` at most once and passes it as an argument.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.spec.attachment import Difference
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Result

if TYPE_CHECKING:
    from multus_daemon.kernel.links import Rtnl
    from multus_daemon.kernel.routes import DefaultRoutes


class PodNetns:
    """A pod's network namespace for one thread, opened at its first use, and closed at the end of a `with` block.

    Only for a thread that ends with its request (`runtime.portal`): if leaving fails, the thread stays in the wrong
    namespace. The sysctls of `kernel.netns` are those of the thread's namespace: the pod's `inside`, else the host's.
    """

    def __init__(self, path: str, *, may_be_own: bool = False, leaving: Collection[str] = ()) -> None:
        self.path = path
        """Empty if the container has no namespace any more."""
        self.may_be_own = may_be_own
        """True if the path may be the daemon's own namespace (CNI_NETNS_OVERRIDE)."""
        self.leaving = frozenset(leaving)
        """Names of the links that this request removes, so that they can go together."""
        self.removed: dict[str, tuple[IpInterface, ...]] = {}
        """The links that were removed together with another one, by name, with the addresses that they had."""
        self.absent: frozenset[IfName] = frozenset()
        """The names of the last `existing` that no link had."""
        self.forwarded: set[bool] = set()
        """The address families that a plugin of this request made the host forward: True for IPv4, False for IPv6."""
        self._thread = threading.get_ident()
        self._opened = contextlib.ExitStack()
        self._is_inside = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._opened.close()

    def at(self, path: str, leaving: Collection[str] = ()) -> PodNetns:
        """Return the object for the namespace at `path` in the same request; it may be the same namespace."""
        return PodNetns(path, may_be_own=self.may_be_own, leaving=leaving)

    @contextlib.contextmanager
    def of_thread(self) -> Iterator[PodNetns]:
        """Yield the object for the calling thread: this object in its own thread, a new one in any other."""
        if threading.get_ident() == self._thread:
            yield self
            return
        with self.at(self.path) as other:
            yield other

    @functools.cached_property
    def _descriptors(self) -> tuple[int, int]:
        """Descriptors of the host's namespace and of the pod's. Raises NamespaceError."""
        host = namespaces.open_path(namespaces.OWN)
        self._opened.callback(os.close, host)
        pod = namespaces.open_path(self.path)
        self._opened.callback(os.close, pod)
        if os.path.sameopenfile(pod, host) and not self.may_be_own:
            raise NamespaceError(errno.EINVAL, "the host's own network namespace, not a container's", self.path)
        return host, pod

    @property
    def host_netns(self) -> int:
        """Descriptor of the host's namespace, to make links there. Raises NamespaceError."""
        return self._descriptors[0]

    @property
    def pod_netns(self) -> int:
        """Descriptor of the pod's namespace, to make links there. Raises NamespaceError."""
        return self._descriptors[1]

    @functools.cached_property
    def pod(self) -> Rtnl:
        """An rtnetlink socket in the pod's network namespace. Raises OSError."""
        with self.inside():
            return self._socket()

    @functools.cached_property
    def host(self) -> Rtnl:
        """An rtnetlink socket in the host's network namespace. Raises OSError."""
        with self.on_host():
            return self._socket()

    def _socket(self) -> Rtnl:
        # Not at the top: plugins that do not use netlink must not wait for the import.
        from multus_daemon.kernel.links import Rtnl

        kernel = Rtnl()
        self._opened.callback(kernel.close)
        return kernel

    def require(self) -> None:
        """Open the namespace.

        Raises NamespaceError if it cannot be opened, if it is the daemon's own although that is not allowed (errno
        EINVAL), or if it is no longer at its path.
        """
        if self._is_inside:
            return
        if "_descriptors" in self.__dict__:
            namespaces.require_at(self.path, self.pod_netns)
        else:
            _ = self._descriptors

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Run the block in the pod's namespace. Raises as `require` does."""
        self.require()
        before = self._move(inside=True)
        try:
            yield
        finally:
            self._move(before)

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Run the block in the host's namespace. Raises NamespaceError."""
        before = self._move(inside=False)
        try:
            yield
        finally:
            self._move(before)

    def _move(self, inside: bool) -> bool:
        """Move the thread to the pod's or the host's namespace; return whether it was in the pod's. Raises OSError"""
        before = self._is_inside
        if inside is not before:
            try:
                namespaces.enter(self._descriptors[inside])
            except NamespaceError:
                raise
            except OSError as error:
                raise NamespaceError(error.errno, error.strerror, self.path) from error
            self._is_inside = inside
        return before

    @property
    def exists(self) -> bool:
        """True if a network namespace is at the path, even if it is another one than the one that was opened."""
        return namespaces.is_netns(self.path)

    @property
    def problem(self) -> str:
        """Why the path cannot be used as a network namespace, to follow the path in a message; empty if it can."""
        return namespaces.problem(self.path)

    def identity(self, *, with_cookie: bool = True) -> str:
        """Return the identity of the namespace (`netns.identity`). Raises NamespaceError."""
        cookie = ""
        if with_cookie:
            # Without a socket in the namespace, device and inode must do.
            with contextlib.suppress(OSError):
                cookie = self.pod.netns_cookie
        return namespaces.identity(self.pod_netns, cookie)

    def is_elsewhere(self, netns_id: str) -> bool:
        """Return True if the namespace with the identity `netns_id` is certainly another one.

        For an empty identity, True only if the path is not a namespace, or is that of the host. False if the path is
        absent or may not be opened.
        """
        try:
            self.require()
            if not netns_id:
                return False
            return namespaces.differ(netns_id, self.identity(with_cookie=bool(namespaces.cookie_of(netns_id))))
        except NamespaceError as error:
            return error.errno in namespaces.SOMETHING_ELSE

    def existing(self, ifnames: Sequence[IfName]) -> list[IfName]:
        """Return those of `ifnames` that the namespace has, in the same order. Raises OSError."""
        self.require()
        found = self.pod.existing(ifnames)
        self.absent = frozenset(ifnames).difference(found)
        return found

    def addresses(self, ifname: str) -> list[IpInterface] | None:
        """Return the addresses of a link, None if there is no such link. Raises OSError."""
        with self.inside():
            link = self.pod.find_link(ifname)
            return None if link is None else [item.address for item in self.pod.addresses(link.index)]

    def observe(self, attached: Sequence[tuple[IfName, Result]]) -> list[Result]:
        """Return the part of each result that the namespace has (`expected.observe`). Raises OSError."""
        from multus_daemon.kernel import expected

        self.require()
        return [expected.observe(self.pod, ifname, result) for ifname, result in attached]

    def missing(self, ifname: IfName, result: Result) -> Iterator[Difference]:
        """Yield each interface, address and route of `result` that the namespace lacks (`expected.missing`)."""
        from multus_daemon.kernel import expected

        self.require()
        yield from expected.missing(self.pod, ifname, result)

    def has_renamed(self, observed: Result | None) -> bool:
        """Return True if an interface in a result of `observe` has another name now. Raises OSError."""
        from multus_daemon.kernel import expected

        indexes = {item.name: item.index for item in observed.interfaces} if observed else {}
        self.require()
        return any(expected.renamed(self.pod, at, self.pod.find_link(name)) for name, at in indexes.items())

    @property
    def default_routes(self) -> DefaultRoutes:
        """The default routes of the namespace. Raises OSError."""
        from multus_daemon.kernel.routes import DefaultRoutes

        self.require()
        return DefaultRoutes(self.pod)


class NodeNamespaces:
    """The network namespaces of this node."""

    def open(self, path: str, *, may_be_own: bool = False) -> PodNetns:
        """Return the namespace at `path`, which is opened at its first use. `may_be_own`: allow the daemon's own."""
        return PodNetns(path, may_be_own=may_be_own)

    is_netns = staticmethod(namespaces.is_netns)
    vanished = staticmethod(namespaces.vanished)
    netns_in_use = staticmethod(namespaces.inhabited)
