"""Run a command in a container through the API server: `pods/exec` over a websocket.

Protocol: kubernetes `k8s.io/apimachinery/pkg/util/remotecommand`, versions 5 and 4. The first byte of a message is its
channel. The last message is on the error channel: a meta/v1 Status with the exit status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from multus_daemon.cluster.kube import objects
from multus_daemon.cluster.kube.client import ApiClient, abort, as_unavailable, read_error
from multus_daemon.cluster.kube.errors import ApiUnavailableError, decode_status
from multus_daemon.deadlines import API_REQUEST_SECONDS

PROTOCOLS: Final = ("v5.channel.k8s.io", "v4.channel.k8s.io")
MESSAGE_MAX_BYTES: Final = 2 * 1024 * 1024  # the API server and the runtime copy in pieces of about 32 KiB
STDERR_MAX_BYTES: Final = 64 * 1024
CLOSE_SECONDS: Final = 1.0  # for the peer's close message


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
    async with _opened(client, path, query) as websocket:
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


@contextlib.asynccontextmanager
async def _opened(client: ApiClient, path: str, query: Sequence[tuple[str, str]]) -> AsyncIterator[Any]:
    """Open the websocket for the block. Raises KubeError."""
    with as_unavailable(f"GET {path}", API_REQUEST_SECONDS):
        transport = await client.load()
        authorization = transport.access.header()
        session = aiohttp.ClientSession(
            headers={"Authorization": authorization} if authorization else {},
            # `ws_connect` drops the body of a refusal, which gives the reason.
            raise_for_status=_refuse,
            timeout=aiohttp.ClientTimeout(),
        )
        async with session:
            opened = await session.ws_connect(
                transport.host + path,
                params=query,
                protocols=PROTOCOLS,
                max_msg_size=MESSAGE_MAX_BYTES,
                **transport.options,
            )
            patience = 0.0
            try:
                yield opened
                patience = CLOSE_SECONDS
            finally:
                # aiohttp waits for the close message of a peer that may send for ever. Cancelled, it hangs up.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience):
                        await opened.close()


async def _refuse(response: aiohttp.ClientResponse) -> None:
    """Raise the error in an HTTP answer that refuses the websocket."""
    if response.status != 101:
        try:
            raise await read_error(response, f"{response.method} {response.url.path}")
        finally:
            abort(response)


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
