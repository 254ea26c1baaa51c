"""Work in a pod's network namespace: one throw-away thread, in it the pod's side and the host's side of the kernel.

A piece of work is a plain function that is given a `Session`; it blocks, and it is done when the call returns. Between
two pieces thread, descriptors and sockets wait for the next.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import TypeVar

from multus_daemon.base.aio import in_thread
from multus_daemon.cni.names import IfName
from multus_daemon.cni.result import Route
from multus_daemon.netlink import netns as namespaces
from multus_daemon.netlink import thread
from multus_daemon.netlink.netns import NamespaceError
from multus_daemon.netlink.routes import DefaultRoutes
from multus_daemon.netlink.rtnl import Rtnl

T = TypeVar("T")


class Session:
    """A thread inside a pod's namespace. `sysctl` reads and writes the pod's values there, the host's in `on_host`."""

    def __init__(self, pod_netns: int, host_netns: int, abandoned: threading.Event, sockets: contextlib.ExitStack):
        self.host_netns = host_netns
        """Descriptor of the host's namespace, for links that are made there."""
        self.pod_netns = pod_netns
        """Descriptor of the pod's namespace, for links that are made on the host."""
        self.abandoned = abandoned
        """Set as soon as nobody waits for the work any more."""
        self._sockets = sockets

    @functools.cached_property
    def pod(self) -> Rtnl:
        """The kernel as the pod sees it. Raises OSError."""
        return self._open()

    @functools.cached_property
    def host(self) -> Rtnl:
        """The kernel as the host sees it. Raises OSError."""
        with self.on_host():
            return self._open()

    def _open(self) -> Rtnl:
        kernel = Rtnl()
        self._sockets.callback(kernel.close)
        return kernel

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """The thread is in the host's namespace for the duration of the block. Raises OSError."""
        namespaces.enter(self.host_netns)
        try:
            yield
        finally:
            namespaces.enter(self.pod_netns)

    def pause(self, seconds: float) -> None:
        """Wait. Raises thread.AbandonedError as soon as nobody waits for the work any more."""
        if self.abandoned.wait(seconds):
            raise thread.AbandonedError


class Pod:
    """A pod's namespace for the pieces of work of one attachment: entered once, by one thread; `entered` makes one."""

    def __init__(self, path: str, worker: thread.Worker) -> None:
        self._path = path
        self._worker = worker
        self._session: Session | None = None
        self._opened = contextlib.ExitStack()

    async def run(self, work: Callable[[Session], T]) -> T:
        """Run `work` in the namespace; what it returns, or raises.

        Raises NamespaceError where the namespace can't be entered, is the daemon's own (errno EINVAL), or is not at its
        path any more. A cancelled call raises CancelledError after the work has ended.
        """
        return await self._worker.run(lambda abandoned: work(self._in_thread(abandoned)))

    def _in_thread(self, abandoned: threading.Event) -> Session:
        if self._session is None:
            self._session = self._enter(abandoned)
        else:
            namespaces.require_at(self._path, self._session.pod_netns)
            self._session.abandoned = abandoned
        return self._session

    def _enter(self, abandoned: threading.Event) -> Session:
        host = self._opened.enter_context(namespaces.own())
        pod = self._opened.enter_context(namespaces.opened(self._path))
        if namespaces.is_same(pod, host):
            raise NamespaceError(errno.EINVAL, "the host's own network namespace, not a container's", self._path)
        try:
            namespaces.enter(pod)
        except OSError as error:
            raise NamespaceError(error.errno, error.strerror, self._path) from error
        return Session(pod, host, abandoned, self._opened)

    def close(self) -> None:
        """Give descriptors and sockets back. Does not wait."""
        self._opened.close()


@contextlib.asynccontextmanager
async def entered(path: str) -> AsyncIterator[Pod]:
    """The namespace at `path` for the duration of the block. Raises nothing: the first `Pod.run` enters."""
    async with thread.worker(f"netns {path}") as worker:
        with contextlib.closing(Pod(path, worker)) as pod:
            yield pod


async def in_pod(path: str, work: Callable[[Session], T]) -> T:
    """Run one piece of work in the namespace at `path`. As `Pod.run`."""
    async with entered(path) as pod:
        return await pod.run(work)


async def on_host(work: Callable[[Rtnl], T]) -> T:
    """Run `work` on the host's side, in a thread that ends with it; what it returns, or raises. Cancelled as above."""

    def body(_abandoned: threading.Event) -> T:
        with contextlib.closing(Rtnl()) as kernel:
            return work(kernel)

    return await thread.run(body, name="netlink on the host")


class KernelLinks:
    """`ports.LinkOps` by asking the kernel."""

    def is_netns(self, path: str) -> bool:
        """True where `path` is a network namespace that exists; two system calls that do not wait."""
        return namespaces.is_netns(path)

    def netns_problem(self, path: str) -> str:
        """See `ports.LinkOps`. As quick as `is_netns`."""
        return namespaces.problem(path)

    async def vanished(self, paths: Collection[str]) -> set[str]:
        """See `ports.LinkOps`. In a thread, since a path may lie on any file system."""
        return await in_thread(namespaces.vanished, paths)

    async def inhabited(self, paths: Collection[str]) -> set[str]:
        """See `ports.LinkOps`. In a thread: it takes some microseconds for each process of the node."""
        return await in_thread(namespaces.inhabited, paths)

    async def existing_links(self, netns: str, ifnames: Sequence[IfName]) -> list[IfName]:
        """Those of `ifnames` that the namespace has. Raises OSError if the namespace can't be entered."""
        return await in_pod(netns, lambda session: [name for name in ifnames if session.pod.find_link(name)])

    async def move_default_routes(self, netns: str, ifname: IfName, routes: Sequence[Route]) -> None:
        """Make `routes` the only default routes of their families; one entry into the namespace. Raises OSError."""

        def work(_session: Session) -> None:
            with contextlib.closing(DefaultRoutes()) as kernel:
                kernel.replace(ifname, routes)

        await in_pod(netns, work)
