"""A loopback port inside another network namespace that leads to the test server.

A test's daemon lives in a namespace of its own, where 127.0.0.1 is another one. The relay's listening socket is made
there, by a throw-away thread; its bytes go to the same port outside. The URL and the certificate's names stay true.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading

from multus_daemon.kernel import netns

_CHUNK = 1 << 16


class Relay:
    """Runs from `start` to `close` on a thread with an event loop of its own."""

    def __init__(self, namespace: str, port: int, *, at: tuple[str, int] | None = None) -> None:
        """`namespace` is a path, such as one below `/run/netns`; `port` is that of the server.

        `at`: the relay's address and port inside, where they are not loopback and the server's.
        """
        self._at = at or ("127.0.0.1", port)
        self._port = port
        self._namespace = netns.open_path(namespace)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"relay-{port}", daemon=True)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread.start()

    def start(self) -> None:
        """Take connections. The namespace's loopback device must be up."""
        if self._server is None:
            self._run(self._start(self._listening_socket()))

    def stop(self) -> None:
        """Refuse connections, and end those that there are."""
        if self._server is not None:
            self._run(self._stop())

    def close(self) -> None:
        """Stop for good."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        os.close(self._namespace)

    def _listening_socket(self) -> socket.socket:
        made: list[socket.socket | OSError] = []

        def make() -> None:
            try:
                netns.enter(self._namespace)
                made.append(socket.create_server(self._at))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    def _run(self, step: object) -> None:
        assert asyncio.iscoroutine(step)
        asyncio.run_coroutine_threadsafe(step, self._loop).result(timeout=60)

    async def _start(self, listening: socket.socket) -> None:
        self._server = await asyncio.start_server(self._serve, sock=listening)

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                pumps = [
                    asyncio.create_task(_pump(reader, there_writer)),
                    asyncio.create_task(_pump(there_reader, writer)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                there_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # The server is away, or the relay is stopped: the client sees its connection end.
        finally:
            self._tasks.discard(task)
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
