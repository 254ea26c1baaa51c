"""The clients of the socket: who may call, and whether a plugin of this daemon calls."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from aiohttp import web

from multus_daemon import logs
from multus_daemon.plugins import child, strays
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError

log = logging.getLogger(__name__)

_CREDENTIALS: Final = struct.Struct("iII")
_ANCESTORS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Client:
    """The client that waits for the answer; by default none, as for the requests of the spool."""

    stdout: bool = False
    """True for the native shim, which prints the body unchanged."""
    is_gone: Callable[[], bool] = lambda: False
    plugin_pid: int = 0
    """Process id, if the client is a plugin that this daemon runs."""


NO_CLIENT: Final = Client()


def client_of(request: web.Request, *, stdout: bool) -> Client:
    """Return the client that sent `request`."""
    caller = peer(request)
    plugin_pid = caller.pid if caller and is_plugin(caller.pid) else 0
    return Client(stdout, lambda: request.transport is None or request.transport.is_closing(), plugin_pid)


class Peer(NamedTuple):
    """The process at the other end of the socket (SO_PEERCRED, unix(7)).

    The ids are those of the daemon's user namespace; users without a mapping have the overflow id, 65534.
    """

    pid: int
    uid: int
    gid: int


def peer(request: web.Request) -> Peer | None:
    """Return the process that sent `request`; None after it hung up."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    if connection is None:
        return None
    return Peer(*_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def is_plugin(pid: int) -> bool:
    """Return True if the process is a plugin that this daemon runs, or one of its descendants.

    Parents and sessions identify it while the plugin runs, the daemon's mark in the environment also afterwards.
    Unreadable processes are not plugins.
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
    """Return, and log, the error of a plugin of this daemon, which would wait for itself in the slots of other pods."""
    error = InvalidNetworkConfigError(
        "the request comes from a plugin that this daemon runs",
        f"process {pid}; a network's plugin must not call Multus: correct the network's configuration",
    )
    with logs.fields(outcome="refused", code=error.code):
        log.error("%s", error)
    return error
