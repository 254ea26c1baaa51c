"""The way of the API server, which runs beside the tests, to the kubelet in the machine: `kubectl exec` and `logs`.

It is an HTTP proxy as `--egress-selector-config-file` names one: for a node's address its connections begin inside of
the machine's network, for any other one outside.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from multus_daemon.kernel import netns

_HEAD_MAX = 4096
_CHUNK = 1 << 16
_SECONDS = 10


class WayIn:
    """A context manager: it serves inside of it."""

    def __init__(self, listen: Path, namespaces: Mapping[str, Callable[[], str]]) -> None:
        """`listen`: the socket to make. `namespaces`: path of a machine's network namespace now, by its address."""
        self._path = listen
        self._namespaces = namespaces
        self._server = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> WayIn:
        self._server.bind(str(self._path))
        self._server.listen()
        threading.Thread(target=self._accept, name="way in", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # Ends `accept`, which closing would not.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), name="way in, one", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """`CONNECT host:port`; in a thread of its own, for it may enter the machine's network."""
        with client, contextlib.suppress(OSError, ValueError):
            head = b""
            while b"\r\n\r\n" not in head and len(head) < _HEAD_MAX:
                head += client.recv(1)
            host, _, port = head.split()[1].decode().rpartition(":")
            if namespace := self._namespaces.get(host):
                inside = netns.open_path(namespace())
                try:
                    netns.enter(inside)
                finally:
                    os.close(inside)
            with socket.create_connection((host, int(port)), timeout=_SECONDS) as server:
                server.settimeout(None)
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
