"""A pod's network namespace and the host's, for the thread of a request.

`PodNetns` is opened at most once per request and passed as an argument to whatever works there.
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
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Result, Route

if TYPE_CHECKING:
    from multus_daemon.kernel.rtnl import Rtnl


class PodNetns:
    """A pod's network namespace for one thread, opened when it is first entered, and closed with the block.

    Only for a thread that ends with its request (`runtime.portal`): if the way back out fails, later work of the thread
    would be done in the wrong namespace. `kernel.sysctl` works where the thread is: `inside`, or on the host.
    """

    def __init__(self, path: str, *, may_be_own: bool = False, leaving: Collection[str] = ()) -> None:
        self.path = path
        """Empty if the container has no namespace any more."""
        self.may_be_own = may_be_own
        """True if the path may be the daemon's own namespace (CNI_NETNS_OVERRIDE)."""
        self.leaving = frozenset(leaving)
        """Names of the links that this request removes, so that they can go together."""
        self.removed: dict[str, tuple[IpInterface, ...]] = {}
        """The links that went with another one, by name, with the addresses that they had."""
        self.absent: frozenset[IfName] = frozenset()
        """Names that `existing` looked for last and that no link had."""
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
        """Return the namespace at another path, or this one opened anew, for the same request."""
        return PodNetns(path, may_be_own=self.may_be_own, leaving=leaving)

    @contextlib.contextmanager
    def of_thread(self) -> Iterator[PodNetns]:
        """Yield the object for the calling thread: this one in its own thread, and another one elsewhere."""
        if threading.get_ident() == self._thread:
            yield self
            return
        with self.at(self.path) as other:
            yield other

    @functools.cached_property
    def _descriptors(self) -> tuple[int, int]:
        """Descriptors of the host's namespace and of the pod's. Raises NamespaceError."""
        host = namespaces.open_own()
        self._opened.callback(os.close, host)
        pod = namespaces.open_path(self.path)
        self._opened.callback(os.close, pod)
        if namespaces.is_same(pod, host) and not self.may_be_own:
            raise NamespaceError(errno.EINVAL, "the host's own network namespace, not a container's", self.path)
        return host, pod

    @property
    def host_netns(self) -> int:
        """Descriptor of the host's namespace, for links that are made there. Raises NamespaceError."""
        return self._descriptors[0]

    @property
    def pod_netns(self) -> int:
        """Descriptor of the pod's namespace, for links that are made on the host. Raises NamespaceError."""
        return self._descriptors[1]

    @functools.cached_property
    def pod(self) -> Rtnl:
        """The kernel as the pod sees it. Raises OSError."""
        with self.inside():
            return self._socket()

    @functools.cached_property
    def host(self) -> Rtnl:
        """The kernel as the host sees it. Raises OSError."""
        with self.on_host():
            return self._socket()

    def _socket(self) -> Rtnl:
        # Not at the top: plugins that do not use the kernel must not wait for the import.
        from multus_daemon.kernel.rtnl import Rtnl

        kernel = Rtnl()
        self._opened.callback(kernel.close)
        return kernel

    def require(self) -> None:
        """Open the namespace.

        Raises NamespaceError if it cannot be opened, if it is the daemon's own (errno EINVAL) and may not be, or if it
        is no longer at its path.
        """
        if self._is_inside:
            return
        if "_descriptors" in self.__dict__:
            namespaces.require_at(self.path, self.pod_netns)
        else:
            _ = self._descriptors

    def inside(self) -> _At:
        """Have the thread in the pod's namespace for the duration of the block. Raises as `require` does."""
        self.require()
        return _At(self, True)

    def on_host(self) -> _At:
        """Have the thread in the host's namespace for the duration of the block. Raises NamespaceError."""
        return _At(self, False)

    def move(self, inside: bool) -> bool:
        """Move the thread; return whether it was inside before. Raises NamespaceError."""
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
        """True if a network namespace is at the path; it need not be the one that was opened."""
        return namespaces.is_netns(self.path)

    def identity(self, *, with_cookie: bool = True) -> str:
        """Return what distinguishes the namespace from every other one (`netns.identity`). Raises NamespaceError."""
        cookie = ""
        if with_cookie:
            # Without a socket in the namespace, device and inode are what is left to compare.
            with contextlib.suppress(OSError):
                cookie = self.pod.netns_cookie
        return namespaces.identity(self.pod_netns, cookie)

    def is_elsewhere(self, netns_id: str) -> bool:
        """Report whether it is certain that the namespace of that identity is not this one.

        With an empty identity, only something that is no namespace, or the host's own, is certain. If nothing is at the
        path, or it may not be opened, nothing is certain.
        """
        try:
            self.require()
            if not netns_id:
                return False
            return namespaces.differ(netns_id, self.identity(with_cookie=bool(namespaces.cookie_of(netns_id))))
        except NamespaceError as error:
            return namespaces.is_something_else(error)

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
        """Return what the namespace has of each result, whose ADD was for that interface. Raises OSError."""
        from multus_daemon.kernel import expected

        self.require()
        return expected.observe(self.pod, attached)

    def first_missing(self, ifname: IfName, result: Result, *, observed: bool) -> str:
        """Return what the namespace lacks of the interfaces, addresses and routes of `result`, for a message.

        Empty if it lacks nothing. `ifname`: that of the ADD, for results that name no interface. `observed`: the result
        is one of `observe`, and its routes are compared exactly. Raises OSError.
        """
        from multus_daemon.kernel import expected

        self.require()
        return expected.first_missing(self.pod, ifname, result, observed=observed)

    def move_default_routes(self, ifname: IfName, routes: Sequence[Route]) -> None:
        """Make `routes` the only default routes of the main table, for each address family of which there is one.

        Each has a gateway and goes over `ifname`; a priority of 0 is the kernel's choice. On failure the routes are as
        they were. Raises OSError.
        """
        from multus_daemon.kernel.routes import DefaultRoutes

        with self.inside(), contextlib.closing(DefaultRoutes()) as kernel:
            kernel.replace(ifname, routes)


class _At:
    """The thread is inside for the duration of the block, or on the host."""

    __slots__ = ("_before", "_inside", "_netns")

    def __init__(self, netns: PodNetns, inside: bool) -> None:
        self._netns = netns
        self._inside = inside

    def __enter__(self) -> None:
        self._before = self._netns.move(self._inside)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._netns.move(self._before)


class KernelLinks:
    """The `LinkOps` of this node."""

    def open(self, path: str, *, may_be_own: bool = False) -> PodNetns:
        """Return the namespace at `path`, which is opened when it is first entered."""
        return PodNetns(path, may_be_own=may_be_own)

    is_netns = staticmethod(namespaces.is_netns)
    netns_problem = staticmethod(namespaces.problem)
    vanished = staticmethod(namespaces.vanished)
    netns_in_use = staticmethod(namespaces.inhabited)


Session = PodNetns
