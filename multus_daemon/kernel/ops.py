"""Work in a pod's network namespace, by the thread of a request: the pod's side and the host's side of the kernel."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from multus_daemon.kernel import netns as namespaces
from multus_daemon.kernel.inet import IpInterface
from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.spec.cni.names import IfName
from multus_daemon.spec.cni.result import Result, Route

if TYPE_CHECKING:
    from multus_daemon.kernel.rtnl import Rtnl


class Session:
    """A pod's namespace for one thread, opened when it is first entered; `session` makes one.

    `sysctl` reads and writes the values of where the thread is: `inside`, else on the host.
    """

    def __init__(self, path: str, leaving: Collection[str] = ()) -> None:
        self.path = path
        """Of the namespace; empty where the container has none any more."""
        self.leaving = frozenset(leaving)
        """Names of the links that this request will remove, so that they can go together."""
        self.removed: dict[str, tuple[IpInterface, ...]] = {}
        """Those that have gone with others, by name, with the addresses that they had."""
        self.absent: set[IfName] = set()
        """Names that were looked for before the first plugin ran, and that no link had."""
        self.forwarded: set[bool] = set()
        """True: a plugin of this request has seen to it that the host forwards IPv4; False: IPv6."""
        self._opened = contextlib.ExitStack()
        self._is_inside = False

    @functools.cached_property
    def _netns(self) -> tuple[int, int]:
        """Descriptors of the host's namespace and of the pod's. Raises NamespaceError."""
        host = namespaces.open_own()
        self._opened.callback(os.close, host)
        pod = namespaces.open_path(self.path)
        self._opened.callback(os.close, pod)
        if namespaces.is_same(pod, host) and not namespaces.own_is_allowed():
            raise NamespaceError(errno.EINVAL, "the host's own network namespace, not a container's", self.path)
        return host, pod

    @property
    def host_netns(self) -> int:
        """Descriptor of the host's namespace, for links that are made there. Raises NamespaceError."""
        return self._netns[0]

    @property
    def pod_netns(self) -> int:
        """Descriptor of the pod's namespace, for links that are made on the host. Raises NamespaceError."""
        return self._netns[1]

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

    def identity(self, *, with_cookie: bool = True) -> str:
        """Return what distinguishes the pod's namespace from every other of this boot. Raises NamespaceError."""
        cookie = ""
        if with_cookie:
            # Without a socket in the namespace, device and inode are what is left to compare.
            with contextlib.suppress(OSError):
                cookie = self.pod.netns_cookie
        return namespaces.identity(self.pod_netns, cookie)

    def _socket(self) -> Rtnl:
        # Not at the top: plugins that have nothing to do with the kernel are not to wait for it.
        from multus_daemon.kernel.rtnl import Rtnl

        kernel = Rtnl()
        self._opened.callback(kernel.close)
        return kernel

    def require(self) -> None:
        """Have the namespace open.

        Raises NamespaceError where it can't be opened, is the daemon's own (errno EINVAL; but see `netns.allow_own`),
        or is not at its path any more.
        """
        if self._is_inside:
            return
        if "_netns" in self.__dict__:
            namespaces.require_at(self.path, self.pod_netns)
        else:
            _ = self._netns

    def inside(self) -> _At:
        """The thread is in the pod's namespace for the duration of the block. Raises as `require` does."""
        self.require()
        return _At(self, True)

    def on_host(self) -> _At:
        """The thread is in the host's namespace for the duration of the block. Raises NamespaceError."""
        return _At(self, False)

    def move(self, inside: bool) -> bool:
        """Move the thread; whether it was inside before. Raises NamespaceError."""
        before = self._is_inside
        if inside is not before:
            try:
                namespaces.enter(self._netns[inside])
            except NamespaceError:
                raise
            except OSError as error:
                raise NamespaceError(error.errno, error.strerror, self.path) from error
            self._is_inside = inside
        return before

    def close(self) -> None:
        """Give descriptors and sockets back."""
        self._opened.close()


class _At:
    """The thread is inside for the duration of the block, or on the host."""

    __slots__ = ("_before", "_inside", "_session")

    def __init__(self, session: Session, inside: bool) -> None:
        self._session = session
        self._inside = inside

    def __enter__(self) -> None:
        self._before = self._session.move(self._inside)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._session.move(self._before)


class _Thread(threading.local):
    sessions: dict[str, Session] | None = None
    """By path, while the thread keeps them."""
    leaving: Collection[str] = ()


_thread = _Thread()


class kept_open:  # noqa: N801
    """Each namespace of which the thread asks for a session within the block is opened once, its sockets too.

    `leaving`: see `Session`.
    """

    __slots__ = ("_is_outermost", "_leaving")

    def __init__(self, leaving: Collection[str] = ()) -> None:
        self._leaving = leaving

    def __enter__(self) -> None:
        self._is_outermost = _thread.sessions is None
        if self._is_outermost:
            _thread.sessions = {}
            _thread.leaving = self._leaving

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._is_outermost:
            kept, _thread.sessions = _thread.sessions, None
            for opened in (kept or {}).values():
                opened.close()


class session:  # noqa: N801
    """The calling thread's session of the namespace at `path`, for the duration of the block. Opens nothing yet.

    For threads that end with their request (`runtime.portal`): in any other one a failing way back out of the namespace
    would have later work done in the wrong place.
    """

    __slots__ = ("_kept", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept = kept_open()

    def __enter__(self) -> Session:
        self._kept.__enter__()
        assert _thread.sessions is not None, "within kept_open"
        if self._path not in _thread.sessions:
            _thread.sessions[self._path] = Session(self._path, _thread.leaving)
        return _thread.sessions[self._path]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._kept.__exit__(kind, error, traceback)


class KernelLinks:
    """`ports.LinkOps` by asking the kernel."""

    def kept_open(self, leaving: Collection[IfName] = ()) -> contextlib.AbstractContextManager[None]:
        """See `ports.LinkOps`."""
        return kept_open(leaving)

    def allow_own_netns(self, allowed: bool) -> None:
        """See `ports.LinkOps`."""
        namespaces.allow_own(allowed)

    def is_netns(self, path: str) -> bool:
        """True where `path` is a network namespace that exists; two system calls that do not wait."""
        return namespaces.is_netns(path)

    def netns_problem(self, path: str) -> str:
        """See `ports.LinkOps`. As quick as `is_netns`."""
        return namespaces.problem(path)

    def netns_id(self, path: str) -> str:
        """See `ports.LinkOps`. It describes the namespace that the thread enters, whatever is at the path later."""
        with session(path) as opened:
            return opened.identity()

    def is_elsewhere(self, path: str, netns_id: str) -> bool:
        """See `ports.LinkOps`. Within `kept_open`, plugins then work in the namespace that was compared."""
        try:
            with session(path) as opened:
                opened.require()
                if not netns_id:
                    return False
                return namespaces.differ(netns_id, opened.identity(with_cookie=bool(namespaces.cookie_of(netns_id))))
        except NamespaceError as error:
            return namespaces.is_something_else(error)

    def vanished(self, paths: Collection[str]) -> set[str]:
        """See `ports.LinkOps`."""
        return namespaces.vanished(paths)

    def netns_in_use(self, paths: Collection[str]) -> set[str]:
        """See `ports.LinkOps`. It takes some microseconds for each process of the node."""
        return namespaces.inhabited(paths)

    def existing_links(self, netns: str, ifnames: Sequence[IfName]) -> list[IfName]:
        """Those of `ifnames` that the namespace has. Raises OSError if the namespace can't be entered."""
        with session(netns) as opened:
            opened.require()
            found = opened.pod.existing(ifnames)
            opened.absent.update(set(ifnames).difference(found))
            return found

    def addresses(self, netns: str, ifname: str) -> list[IpInterface] | None:
        """Those of a link; None where there is no such link. Raises OSError if the namespace can't be entered."""
        with session(netns) as opened, opened.inside():
            link = opened.pod.find_link(ifname)
            return None if link is None else [item.address for item in opened.pod.addresses(link.index)]

    def observe(self, netns: str, attached: Sequence[tuple[IfName, Result]]) -> list[Result]:
        """See `ports.LinkOps`."""
        from multus_daemon.kernel import expected

        with session(netns) as opened:
            opened.require()
            return expected.observe(opened.pod, attached)

    def first_missing(self, netns: str, ifname: IfName, result: Result, *, observed: bool) -> str:
        """See `ports.LinkOps`."""
        from multus_daemon.kernel import expected

        with session(netns) as opened:
            opened.require()
            return expected.first_missing(opened.pod, ifname, result, observed=observed)

    def move_default_routes(self, netns: str, ifname: IfName, routes: Sequence[Route]) -> None:
        """Make `routes` the only default routes of their families; one entry into the namespace. Raises OSError."""
        from multus_daemon.kernel.routes import DefaultRoutes

        with session(netns) as opened, opened.inside(), contextlib.closing(DefaultRoutes()) as kernel:
            kernel.replace(ifname, routes)
