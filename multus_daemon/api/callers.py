"""Find out which process sent a request to the socket, and whether it is a plugin that this daemon runs."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from multus_daemon.plugins import child, strays
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError

_CREDENTIALS: Final = struct.Struct("iII")
_ANCESTORS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Client:
    """The client that waits for the answer. The default stands for no client, as for a DEL from the spool."""

    stdout: bool = False
    """True for our shim, which prints the body unchanged."""
    is_gone: Callable[[], bool] = lambda: False
    plugin_pid: int = 0
    """Process id of the client if it is a plugin that this daemon runs; else 0."""


NO_CLIENT: Final = Client()


def client_of(request: web.Request, *, stdout: bool) -> Client:
    """Return the client that sent `request`."""
    caller = peer(request)
    plugin_pid = caller[0] if caller and is_plugin(caller[0]) else 0
    return Client(stdout, lambda: request.transport is None or request.transport.is_closing(), plugin_pid)


def peer(request: web.Request) -> tuple[int, int] | None:
    """Return process and user id of the sender (SO_PEERCRED, unix(7)); None if it has hung up.

    The user id is that of the daemon's user namespace; users without a mapping have the overflow id, 65534.
    """
    connection = request.transport.get_extra_info("socket") if request.transport else None
    if connection is None:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def is_plugin(pid: int) -> bool:
    """Return True if the process is a plugin that this daemon runs, or one of its descendants.

    While the plugin runs, parents and sessions tell; after that, the daemon's mark in the process's environment does. A
    process that can't be read is not a plugin.
    """
    if pid == os.getpid() or not child.has_started_any():
        return False
    if strays.is_marked(pid):
        return True
    plugins = child.running()
    if not plugins:
        return False
    for _ in range(_ANCESTORS_MAX):
        parent, session = strays.parent_and_session(pid)
        if pid in plugins or session in plugins:
            return True
        if parent <= 1:
            return False
        pid = parent
    return False


def plugin_refused(pid: int) -> CniError:
    """Return the error for a request from a plugin of this daemon: it would take slots while it waits for itself."""
    return InvalidNetworkConfigError(
        "the request comes from a plugin that this daemon runs",
        remedy=f"a network's plugin (process {pid}) must not call Multus: correct the network's configuration",
    )
