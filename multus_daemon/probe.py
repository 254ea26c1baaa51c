"""`multus-probe healthz|readyz [SOCKET]`: ask the daemon for its health; the probe of the manifests.

It imports little, as the kubelet starts it every few seconds: `multus-daemon` would take five times as long to start.
It uses the shim's socket, so the daemon needs no port of the node.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from multus_daemon import deadlines

DEFAULT_SOCKET = "/host/run/multus/multus.sock"
"""The socket in the manifests, as in upstream's."""
MAX_BYTES = 64 * 1024


def ask(path: str, question: str) -> tuple[int, str]:
    """Return status and body of `GET /<question>` at the unix socket `path`. Raises OSError."""
    # Without `?gates` a daemon is ready until it stops.
    target = "readyz?gates" if question == "readyz" else question
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(deadlines.PROBE_SECONDS)
        client.connect(path)
        client.sendall(f"GET /{target} HTTP/1.1\r\nHost: multus\r\nConnection: close\r\n\r\n".encode("ascii"))
        answer = b""
        while len(answer) < MAX_BYTES and (part := client.recv(MAX_BYTES)):
            answer += part
    head, _, body = answer.decode("utf-8", "replace").partition("\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise ConnectionError("the answer is not HTTP")
    return int(words[1]), body.strip()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program. Exit status: 0 for a 200, 1 for anything else, 2 usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not 1 <= len(arguments) <= 2 or arguments[0] not in ("healthz", "readyz"):
        sys.stderr.write("usage: multus-probe healthz|readyz [SOCKET]\n")
        sys.exit(2)
    path = (*arguments, DEFAULT_SOCKET)[1]
    try:
        status, body = ask(path, arguments[0])
    except OSError as error:
        sys.stderr.write(f"no answer from {path}: {error}\n")
        sys.exit(1)
    if status != 200:
        sys.stderr.write(f"{status} {body}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
