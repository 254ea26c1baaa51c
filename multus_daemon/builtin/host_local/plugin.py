"""The verbs of host-local. Files are touched in a worker thread, one hop for each call, under the network's lock."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from multus_daemon import deadlines
from multus_daemon.base import fs
from multus_daemon.base.aio import KeyedLock
from multus_daemon.builtin.contract import Call
from multus_daemon.builtin.host_local import allocator, book, config, store
from multus_daemon.builtin.host_local.index import Index
from multus_daemon.cni.errors import InternalError, IoFailureError
from multus_daemon.cni.result import Dns, Result

T = TypeVar("T")


class HostLocal:
    """The BuiltinPlugin `host-local`.

    The lock of a network is held for a whole verb. Inside the process calls for one network queue up in the event
    loop, so that a busy network does not fill the thread pool with threads that wait for each other.
    """

    def __init__(self, *, lock_timeout: float = deadlines.HOST_LOCAL_LOCK_SECONDS) -> None:
        """`lock_timeout` in seconds: how long a call waits for its turn before it fails with code 11."""
        self._lock_timeout = lock_timeout
        self._locks = KeyedLock()
        self._index = Index()

    def unsupported(self, call: Call) -> str:
        """As BuiltinPlugin; of the section `ipam`, the others are not for this plugin."""
        return config.unsupported(call.fields)

    async def add(self, call: Call) -> Result:
        """One address from each range set. Raises CniError; nothing is taken then.

        When cancelled, the file work that has begun is awaited first; what it took is left for DEL.
        """
        settings = _settings(call)
        resolv_conf = call.on_host(settings.resolv_conf) if settings.resolv_conf else None

        def work(leases: store.LeaseDirectory) -> Result:
            dns = Dns() if resolv_conf is None else read_resolv_conf(resolv_conf)
            ips = allocator.allocate(settings, leases, call.invocation.container_id)
            return Result(ips=ips, routes=settings.routes, dns=dns)

        return await self._locked(call, settings, work)

    async def delete(self, call: Call) -> None:
        """Release every address of the container's interface; none is done. Raises CniError."""

        def work(leases: store.LeaseDirectory) -> None:
            for name in leases.files():
                leases.release(name)

        await self._locked(call, _settings(call), work)

    async def check(self, call: Call) -> None:
        """Some address is the container's interface's. Raises CniError."""

        def work(leases: store.LeaseDirectory) -> bool:
            return bool(leases.files() or (leases.refresh() and leases.files()))

        if not await self._locked(call, _settings(call), work):
            raise InternalError(f"host-local: Failed to find address added by container {call.invocation.container_id}")

    async def status(self, call: Call) -> None:
        """Always well, as with the reference plugin."""

    async def _locked(
        self, call: Call, settings: config.HostLocalConfig, work: Callable[[store.LeaseDirectory], T]
    ) -> T:
        directory = call.on_host(settings.data_dir) / settings.name
        owner = store.Owner(call.invocation.container_id, call.invocation.ifname)
        given_up = threading.Event()
        deadline = time.monotonic() + self._lock_timeout

        def in_thread() -> T:
            try:
                with store.locked(directory, owner, deadline=deadline, given_up=given_up, index=self._index) as leases:
                    return work(leases)
            except OSError as error:
                reason = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
                raise IoFailureError(f"host-local: {reason}", f"data directory {directory}") from error

        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._lock_timeout):
                    await stack.enter_async_context(self._locks.hold(str(directory)))
            except TimeoutError as error:
                raise store.busy(directory / book.LOCK_NAME) from error
            return await _finish(asyncio.create_task(asyncio.to_thread(in_thread)), given_up)


async def _finish(task: asyncio.Task[T], given_up: threading.Event) -> T:
    """The outcome of work in a thread. When cancelled, waits for its end (a thread can't be stopped) and then obeys."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        given_up.set()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            # Retrieved, or asyncio would report it.
            task.exception()
        raise


def _settings(call: Call) -> config.HostLocalConfig:
    return config.read(call.fields, name=call.name, cni_version=call.cni_version, args=call.invocation.args)


def read_resolv_conf(path: Path) -> Dns:
    """The settings in a resolv.conf(5) file: `search` and `options` add up, the last `domain` counts.

    Raises IoFailureError. Blocks.
    """
    try:
        text = fs.read_limited(path).decode("utf-8", "replace")
    except OSError as error:
        raise IoFailureError(f"open {path}: {error.strerror}", "ipam.resolvConf") from error
    nameservers: list[str] = []
    search: list[str] = []
    options: list[str] = []
    domain = ""
    for line in text.split("\n"):
        match line.split():
            case ["nameserver", first, *_]:
                nameservers.append(first)
            case ["domain", first, *_]:
                domain = first
            case ["search", _, *_] as words:
                search += words[1:]
            case ["options", _, *_] as words:
                options += words[1:]
            case _:
                # Comments (`#`, `;`) come here as well: their first word is none of the above.
                pass
    return Dns(tuple(nameservers), domain, tuple(search), tuple(options))
