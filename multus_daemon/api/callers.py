"""Who sent a request: the process at the other end of the socket, and whether one of our plugins started it."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final, NamedTuple

from aiohttp import web

from multus_daemon.plugins import child, strays

_CREDENTIALS: Final = struct.Struct("iII")
_ANCESTORS_MAX: Final = 64


class Peer(NamedTuple):
    """The process at the other end, as the kernel knows it (SO_PEERCRED, unix(7)).

    Ids are those of the daemon's user namespace: a user that it does not map appears as the overflow id, 65534.
    """

    pid: int
    uid: int
    gid: int


def peer(request: web.Request) -> Peer | None:
    """Return the process that sent `request`; None once it has hung up."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    if connection is None:
        return None
    return Peer(*_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def is_plugin(pid: int) -> bool:
    """Report whether a plugin that this daemon runs, or a process that it started, is the process of that number.

    Parents and sessions tell while the plugin runs, the daemon's mark in the environment also afterwards. A process
    that cannot be looked at is none.
    """
    if pid == os.getpid():
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
