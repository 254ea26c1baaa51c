"""Run a command in a container through the API server: `pods/exec` over a websocket.

Protocol: kubernetes `k8s.io/apimachinery/pkg/util/remotecommand`, versions 5 and 4. The first byte of a message is its
channel. The last message is on the error channel: a meta/v1 Status with the exit status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp

from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient
from multus_daemon.cluster.kube.errors import ApiUnavailableError, decode_status

PROTOCOLS: Final = ("v5.channel.k8s.io", "v4.channel.k8s.io")
MESSAGE_MAX_BYTES: Final = 2 * 1024 * 1024  # the API server and the runtime copy in pieces of about 32 KiB
STDERR_MAX_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Ended:
    """The output and the end of a command."""

    stdout: bytes
    stderr: str
    status: int  # exit status; -1 if the command could not be run
    message: str = ""  # the API server's, about a failure


async def run(
    client: ApiClient, namespace: str, pod: str, container: str, words: Sequence[str], *, stdout_max: int
) -> Ended:
    """Run `words` in the container to its end. The caller sets a deadline.

    Raises KubeError; ApiUnavailableError also if the command writes more than `stdout_max` bytes, and if the connection
    ends before the command does.
    """
    path = f"{objects.pod_path(namespace, pod)}/exec"
    query = [("container", container), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in words)]
    stdout, stderr, status = bytearray(), bytearray(), bytearray()
    channels = {b"\1": stdout, b"\2": stderr, b"\3": status}
    opening = client.websocket(path, query, protocols=PROTOCOLS, message_max=MESSAGE_MAX_BYTES)
    async with opening as websocket:
        if websocket.protocol not in PROTOCOLS:
            raise ApiUnavailableError(f"GET {path}: the server speaks none of {', '.join(PROTOCOLS)}")
        async for message in websocket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                break
            channels.get(message.data[:1], bytearray()).extend(message.data[1:])
            if len(stdout) > stdout_max:
                raise ApiUnavailableError(f"the answer is longer than {stdout_max} bytes")
            del stderr[STDERR_MAX_BYTES:]
            if len(status) > MESSAGE_MAX_BYTES:
                break
    return _ended(bytes(stdout), stderr.decode("utf-8", "replace"), bytes(status))


def _ended(stdout: bytes, stderr: str, error: bytes) -> Ended:
    try:
        answer = decode_status(error)
    except objects.DECODE_ERRORS:
        raise ApiUnavailableError("the connection ended before the command did") from None
    if answer.status == "Success":
        return Ended(stdout, stderr, 0)
    codes = [cause.message for cause in answer.causes if cause.reason == "ExitCode"]
    status = int(codes[0]) if codes and codes[0].isascii() and codes[0].isdecimal() and len(codes[0]) < 4 else -1
    return Ended(stdout, stderr, status, answer.message)
