"""HTTP requests to the daemon of this node, over its socket."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from multus_daemon import deadlines
from multus_daemon.spec.cni import errors
from multus_tools.command_line import NO_DAEMON, CommandError

ANSWER_MAX: Final = 64 * 1024 * 1024
"""Maximum size of an answer in bytes: 250 pods with 16 networks each take about 5 MB."""


class NoDaemonError(CommandError):
    """No daemon answers on the socket; the message says where, why, and what to do."""

    status = NO_DAEMON


@dataclass(frozen=True, slots=True)
class Client:
    """Client of the daemon's admin paths (`api.admin`)."""

    path: Path
    """The socket."""

    def ask(
        self,
        question: str,
        query: Mapping[str, str] | None = None,
        *,
        method: str = "GET",
        body: bytes = b"",
        timeout: float = deadlines.CTL_SECONDS,
    ) -> dict[str, Any]:
        """Return the answer, a JSON object. `timeout`: seconds without a byte. Raises NoDaemonError, CniError."""
        connection = http.client.HTTPConnection("multus", timeout=timeout)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(timeout)
            connection.sock.connect(str(self.path))
            connection.request(method, f"/admin/v1/{question}?{urllib.parse.urlencode(query or {})}", body or None)
            response = connection.getresponse()
            data = response.read(ANSWER_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise NoDaemonError(_reason(self.path, error)) from error
        finally:
            connection.close()
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            reason = f"answers with status {response.status} and without JSON"
            raise NoDaemonError(f"{self.path} {reason}: is it an older daemon, or another program?")
        if response.status != 200:
            raise errors.from_object(answer)
        return answer


def _reason(path: Path, error: Exception) -> str:
    match error:
        case FileNotFoundError():
            return f"no daemon: no socket {path}; start `multus-daemon run`, or name its directory with --socket-dir"
        case ConnectionRefusedError():
            return f"no daemon listens on {path}; start `multus-daemon run`"
        case PermissionError():
            return f"{path} may not be used: {error.strerror}; the daemon answers to root only"
        case TimeoutError():
            return f"the daemon on {path} does not answer in time; see its log"
        case _:
            return f"no answer from {path}: {error or type(error).__name__}"
