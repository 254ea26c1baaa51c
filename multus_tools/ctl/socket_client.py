"""HTTP requests to the daemon of this node, over its socket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from multus_tools import deadlines
from multus_tools.command_line import NO_DAEMON, CommandError

ANSWER_MAX: Final = 64 * 1024 * 1024
"""Maximum size of an answer in bytes: 250 pods with 16 networks each take about 5 MB."""


class NoDaemonError(CommandError):
    """No daemon answers on the socket; the message names socket and reason, and says what to do."""

    status = NO_DAEMON


class Client(NamedTuple):
    """Client for the daemon's paths `/admin/v1` (`api.admin`)."""

    path: Path
    """Path of the daemon's socket."""

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
        # `--help` does without them; http.client takes longer to load than an empty interpreter.
        import json
        import socket
        from urllib.parse import urlencode

        asked = (
            f"{method} /admin/v1/{question}?{urlencode(query or {})} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as reader:
                connection.settimeout(timeout)
                connection.connect(str(self.path))
                connection.sendall(asked.encode() + body)
                head, _, data = reader.read(ANSWER_MAX).partition(b"\r\n\r\n")
        except OSError as error:
            raise NoDaemonError(_reason(self.path, error)) from error
        if not head:
            raise NoDaemonError(f"{self.path} closed the connection without an answer: see the daemon's log")
        status = head[9:12].decode("ascii", "replace") if head.startswith(b"HTTP/1.") else "none"
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            reason = f"answers with status {status} and without JSON"
            raise NoDaemonError(f"{self.path} {reason}: is it an older daemon, or another program?")
        if status != "200":
            from multus_daemon.spec.cni import errors

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
