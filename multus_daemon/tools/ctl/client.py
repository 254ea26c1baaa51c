"""Asking the daemon of this node, over its socket."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.spec.cni import errors

ANSWER_MAX: Final = 64 * 1024 * 1024
"""Bytes of an answer: 250 pods with 16 networks each take some 5 MB."""


class NoDaemonError(Exception):
    """Nobody answers on the socket; the message says where, why, and what to do."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("multus", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Client:
    """The daemon's admin paths."""

    def __init__(self, path: Path) -> None:
        """`path`: of the socket."""
        self._path = path

    def ask(
        self, question: str, query: Mapping[str, str] | None = None, *, timeout: float = deadlines.CTL_SECONDS
    ) -> dict[str, Any]:
        """The answer, a JSON object. `timeout`: seconds without a byte. Raises NoDaemonError, CniError."""
        return self._call("GET", question, query or {}, b"", timeout)

    def order(
        self, name: str, query: Mapping[str, str], body: bytes = b"", *, timeout: float = deadlines.ADMIN_SECONDS
    ) -> dict[str, Any]:
        """As `ask`, of what changes something, or takes a body."""
        return self._call("POST", name, query, body, timeout)

    def _call(self, method: str, name: str, query: Mapping[str, str], body: bytes, timeout: float) -> dict[str, Any]:
        connection = _Connection(self._path, timeout)
        try:
            # A path of the HTTP edge: see `api.admin`, which is not imported for its name, for aiohttp takes
            # longer to load than all the rest.
            connection.request(method, f"/admin/v1/{name}?{urllib.parse.urlencode(query)}", body or None)
            response = connection.getresponse()
            answer = response.read(ANSWER_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise NoDaemonError(_no_answer(self._path, error)) from error
        finally:
            connection.close()
        try:
            found = json.loads(answer)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoDaemonError(
                f"{self._path} answers with status {response.status} and no JSON: is it an older daemon, or another's?"
            )
        if response.status != 200:
            raise errors.from_object(found)
        return found


def _no_answer(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"no daemon: there is no socket {path}; start `multus-daemon run`, or name its directory with --socket-dir"
        )
    if isinstance(error, ConnectionRefusedError):
        return f"no daemon: nobody listens on {path}; start `multus-daemon run`"
    if isinstance(error, PermissionError):
        return f"{path} may not be used: {error.strerror}; the daemon answers to root only"
    if isinstance(error, TimeoutError):
        return f"the daemon on {path} does not answer in time; its log says what it is doing"
    return f"no answer from {path}: {error or type(error).__name__}"
