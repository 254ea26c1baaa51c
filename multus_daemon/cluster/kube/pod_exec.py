"""A command in a container, by the API server: `pods/exec` over a websocket.

Protocol: kubernetes `k8s.io/apimachinery/pkg/util/remotecommand`, `v5.channel.k8s.io` and the one before. The first
byte of a message is its channel; the last message is on the channel of errors, a meta/v1 Status with the exit status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiUnavailableError
from multus_daemon.cluster.kube.library import aiohttp

PROTOCOLS: Final = ("v5.channel.k8s.io", "v4.channel.k8s.io")
MESSAGE_MAX_BYTES: Final = 2 * 1024 * 1024
"""API server and runtime copy in pieces of some 32 KiB."""
STDERR_MAX_BYTES: Final = 64 * 1024
_STDOUT: Final = 1
_STDERR: Final = 2
_ERROR: Final = 3


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command has written, and how it ended."""

    stdout: bytes
    stderr: str
    """Its first STDERR_MAX_BYTES."""
    status: int
    """Its exit status; -1 where it could not be run."""
    message: str = ""
    """Why it could not be run, or what the API server says of its end; empty: it ended with 0."""


class _Cause(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] | None = None


class _Status(msgspec.Struct):
    status: str = ""
    message: str = ""
    details: _Details | None = None


_decode_status: Final = msgspec.json.Decoder(_Status).decode


async def run(
    client: ApiClient, namespace: str, pod: str, container: str, words: Sequence[str], *, stdout_max: int
) -> Ended:
    """Run `words` in the container, to its end. Deadlines are the caller's.

    Raises ApiError where the API server refuses it, ApiUnavailableError where it is not to be had, where the command
    writes more than `stdout_max` bytes, and where the connection ends before the command does; ConfigurationError.
    """
    path = f"{objects.pod_path(namespace, pod)}/exec"
    query = [("container", container), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in words)]
    written = {_STDOUT: bytearray(), _STDERR: bytearray(), _ERROR: bytearray()}
    opening = client.websocket(path, query, protocols=PROTOCOLS, message_max=MESSAGE_MAX_BYTES)
    async with opening as websocket:
        if websocket.protocol not in PROTOCOLS:
            raise ApiUnavailableError(f"GET {path}: the server speaks none of {', '.join(PROTOCOLS)}")
        async for message in websocket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                break
            channel, data = message.data[:1], message.data[1:]
            part = written.get(channel[0]) if channel else None
            if part is None:
                continue
            part += data
            if len(written[_STDOUT]) > stdout_max:
                raise ApiUnavailableError(f"the answer is longer than {stdout_max} bytes")
            del written[_STDERR][STDERR_MAX_BYTES:]
            if len(written[_ERROR]) > MESSAGE_MAX_BYTES:
                break
    return _ended(bytes(written[_STDOUT]), written[_STDERR].decode("utf-8", "replace"), bytes(written[_ERROR]))


def _ended(stdout: bytes, stderr: str, error: bytes) -> Ended:
    try:
        found = _decode_status(error)
    except objects.DECODE_ERRORS:
        raise ApiUnavailableError("the connection ended before the command did") from None
    if found.status == "Success":
        return Ended(stdout, stderr, 0)
    causes = (found.details.causes if found.details else None) or []
    codes = [cause.message for cause in causes if cause.reason == "ExitCode"]
    status = int(codes[0]) if codes and codes[0].isascii() and codes[0].isdecimal() and len(codes[0]) < 4 else -1
    return Ended(stdout, stderr, status, found.message)
