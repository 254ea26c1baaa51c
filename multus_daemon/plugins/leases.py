"""The DHCP leases of this node: a client for each, in one thread with an event loop, and a file for each.

The thread begins with the first lease, as pyroute2's client takes memory. At the daemon's start each client asks again
for the lease of its file (INIT-REBOOT), and the pod keeps its address. A client ends with its namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import logging
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from multus_daemon.kernel.netns import NamespaceError
from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.runtime import fs, threads
from multus_daemon.runtime.portal import LoopPortal
from multus_daemon.spec.cni.errors import IoFailureError, Origin, TryAgainLaterError

if TYPE_CHECKING:
    from multus_daemon.kernel.dhcp import Client, Lease

log = logging.getLogger(__name__)

CLIENTS_MAX: Final = 1024
_START_PAUSE: Final = 0.02
"""Seconds between the first messages of two leases at the daemon's start."""
# Not EINVAL: a namespace whose mount is not visible here looks like that.
_GONE: Final = (errno.ENOENT, errno.ESTALE)


class NoLeaseError(Exception):
    """No server gave a lease in time; the message is the last thing that went wrong."""


class Owner(msgspec.Struct, frozen=True):
    """The interface that has a lease."""

    container_id: str
    network: str
    ifname: str

    @property
    def file(self) -> str:
        """The name of its file, as long as that of libcni's cached result."""
        return f"{self.network}-{self.container_id}-{self.ifname}"


class Order(msgspec.Struct, frozen=True):
    """What a client asks for, and where."""

    owner: Owner
    netns: str
    netns_id: str
    requested: tuple[int, ...]
    provided: dict[int, bytes]
    ip: str = ""
    """The address that the pod has; empty before the first lease."""

    def __str__(self) -> str:
        who = self.owner
        return f"{self.ip} (network {who.network}, interface {who.ifname} of container {who.container_id})"


class _Stored(msgspec.Struct):
    """The content of a file."""

    order: Order
    lease: dict[str, Any]


_DECODER: Final = msgspec.json.Decoder(_Stored)


class Leases:
    """Gets, keeps and releases leases, for any thread."""

    def __init__(self, directory: Path) -> None:
        """`directory` is made with the first lease."""
        self._directory = directory
        self._guard = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Changed in the loop's thread only.
        self._clients: dict[Owner, tuple[Client, Order]] = {}
        self._reading: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Keep the leases on disk, if there are any. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            fs.sweep(self._directory)
            if any(self._directory.iterdir()):
                self._begun()

    def stop(self) -> None:
        """End the clients, and keep the leases. The daemon's end does without."""
        if self._loop is not None:
            self._begun().call(self._end)
            self._loop.call_soon_threadsafe(self._loop.stop)

    def acquire(self, order: Order, seconds: float) -> Lease:
        """Wait `seconds` for a lease at most; return it when it is on disk.

        Raises NoLeaseError, CniError, Interrupted.
        """
        return self._begun().call(self._acquire, order, seconds)

    def release(self, owner: Owner) -> None:
        """Give a lease back if there is one. Raises IoFailureError, Interrupted."""
        if self.has(owner):
            self._begun().call(self._forget, owner, release=True)

    def has(self, owner: Owner) -> bool:
        """Report whether there is, or may be, a lease."""
        return owner in self._clients or (self._directory / owner.file).exists()

    def problem(self, owner: Owner) -> str:
        """Return why the pod's address may be another's; empty if its lease is valid."""
        client, order = self._clients.get(owner, (None, None))
        if client is None or order is None:
            # A file that has not been read yet.
            return "" if self.has(owner) else "the daemon has no DHCP lease of its address"
        lease = client.lease
        if lease is None:
            return f"the DHCP lease of {order.ip} is lost: the server may give it to another, delete the pod"
        if lease.ip != order.ip:
            return f"the DHCP server gave {lease.ip} in place of {order.ip}, which the pod has: delete the pod"
        return ""

    # --- the thread with the loop ------------------------------------------------------------------------------------

    def _begun(self) -> LoopPortal:
        with self._guard:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threads.start(functools.partial(self._run, self._loop), name="dhcp-leases")
            return LoopPortal(self._loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.closing(loop):
            self._reading = loop.create_task(self._keep_stored())
            loop.run_forever()
            self._reading.cancel()
            loop.run_until_complete(asyncio.gather(self._reading, return_exceptions=True))

    async def _keep_stored(self) -> None:
        for order, lease in await asyncio.to_thread(self._stored):
            if order.owner not in self._clients:
                if lease.expired:
                    _log_lost(order, "it expired while no daemon ran")
                await self._client(order, None if lease.expired else lease).start()
                await asyncio.sleep(_START_PAUSE)

    def _stored(self) -> list[tuple[Order, Lease]]:
        from multus_daemon.kernel.dhcp import Lease

        found = []
        for path in sorted(self._directory.iterdir()) if self._directory.is_dir() else ():
            try:
                stored = _DECODER.decode(fs.read_limited(path))
                found.append((stored.order, Lease.read(stored.lease)))
            except (OSError, ValueError, LookupError, TypeError) as error:
                log.warning("a DHCP lease on disk cannot be read: %s: %s", path, error)
        return found

    async def _end(self) -> None:
        for owner in list(self._clients):
            await self._clients.pop(owner)[0].end(release=False)

    async def _acquire(self, order: Order, seconds: float) -> Lease:
        if len(self._clients) >= CLIENTS_MAX:
            raise TryAgainLaterError(f"the node has {CLIENTS_MAX} DHCP leases, which is the most", origin=Origin.NODE)
        await self._forget(order.owner, release=False)
        client = self._client(order, None)
        try:
            await client.start()
            lease = await client.granted(seconds)
            _, order = self._clients[order.owner] = client, replace(order, ip=lease.ip)
            await asyncio.to_thread(self._write, order, lease)
        except BaseException as error:
            problem = client.problem
            await self._forget(order.owner, release=True)
            if isinstance(error, TimeoutError):
                raise NoLeaseError(problem) from error
            raise
        return lease

    def _client(self, order: Order, known: Lease | None) -> Client:
        from multus_daemon.kernel import dhcp

        owner = order.owner
        opens, changed = functools.partial(self._opened, order), functools.partial(self._changed, owner)
        client_id = f"{owner.container_id}/{owner.network}/{owner.ifname}".encode()
        options = (client_id, order.requested, order.provided)
        made = dhcp.Client(owner.ifname, opens, changed, *options, ip=order.ip, known=known)
        self._clients[owner] = made, order
        return made

    def _opened(self, order: Order) -> socket.socket:
        """Open a socket in the pod's namespace, in a thread of its own. Raises OSError."""
        from multus_daemon.kernel import dhcp

        try:
            with PodNetns(order.netns) as netns:
                if netns.is_elsewhere(order.netns_id):
                    raise NamespaceError(errno.ESTALE, "another container's network namespace", order.netns)
                return dhcp.opened(netns, order.owner.ifname)
        except NamespaceError as error:
            _, known = self._clients.get(order.owner, (None, None))
            # An ADD waits for the first lease.
            if error.errno in _GONE and known and known.ip and self._loop:
                log.info("the network namespace is gone, and with it the DHCP lease of %s", known)
                asyncio.run_coroutine_threadsafe(self._forget(order.owner, release=False), self._loop)
            raise

    async def _forget(self, owner: Owner, *, release: bool) -> None:
        """End the client, and remove the file. Raises IoFailureError."""
        if release and self._reading:
            await asyncio.wait({self._reading})
        client, _ = self._clients.pop(owner, (None, None))
        if client is not None:
            await client.end(release=release)
        try:
            await asyncio.to_thread(fs.remove, self._directory / owner.file)
        except OSError as error:
            raise IoFailureError(f"the DHCP lease cannot be removed: {error}") from error

    async def _changed(self, owner: Owner, lost: str) -> None:
        client, order = self._clients.get(owner, (None, None))
        if client is None or order is None or not order.ip:
            return
        if lost:
            _log_lost(order, lost)
        elif client.lease.ip != order.ip:
            _log_lost(order, f"the server gave {client.lease.ip}")
        else:
            with contextlib.suppress(IoFailureError):
                await asyncio.to_thread(self._write, order, client.lease)

    def _write(self, order: Order, lease: Lease) -> None:
        """Raises IoFailureError."""
        try:
            fs.ensure_directory(self._directory)
            content = msgspec.json.encode(_Stored(order, dataclasses.asdict(lease)))
            fs.write_atomic(self._directory / order.owner.file, content, fsync=False)
        except OSError as error:
            log.error("the DHCP lease of %s cannot be written: %s", order, error)
            raise IoFailureError(f"the DHCP lease cannot be written: {error}") from error


def _log_lost(order: Order, reason: str) -> None:
    log.error("the DHCP lease of %s is lost: %s; the pod has the address, and another may get it", order, reason)
