"""`POST /validate`: the API server asks whether an object may be stored (Kubernetes documentation, "Dynamic Admission
Control"), over TLS.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from multus_daemon import deadlines
from multus_daemon.api.app import hide_server, http_runner
from multus_daemon.api.health import healthz
from multus_daemon.api.tcp import TcpListener
from multus_daemon.metrics import Metrics
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline

BODY_LIMIT: Final = 8 * 1024 * 1024
"""Bytes of a review: it has the object twice where one is changed, and the API server takes 3 MiB of one."""
AT_ONCE: Final = 4
"""Reviews that are worked on side by side, each in a thread; others wait."""
CONNECTIONS: Final = 64
"""That are accepted at once."""
LOOK_SECONDS: Final = 10.0
"""Between two looks at the files of the certificate."""

Answer = Callable[[bytes], tuple[bytes, str, str]]
"""The answer to a review, the kind of its object, and how it went: see `metrics.Metrics.review`. Blocks.

Raises ValueError for what is no review.
"""

log = logging.getLogger(__name__)


class Certificate:
    """The server's certificate and key, from files that may be replaced at any time."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises OSError, ssl.SSLError where they can't be used."""
        self._files = (certificate, key)
        self._state = self._look()
        self._newest = self._load()
        # A context that is in use must not load another pair: between certificate and key a handshake fails.
        self.context = self._load()
        self.context.sni_callback = self._choose

    async def run(self, *, pause: float = LOOK_SECONDS) -> None:
        """Look for new ones, for ever. Those that can't be used are told of, and the present ones stay."""
        while True:
            await asyncio.sleep(pause)
            try:
                if await asyncio.to_thread(self._renew):
                    log.info("certificate %s: the new one is in use", self._files[0])
            except OSError as error:
                log.error("certificate %s: the new one can't be used, the old one stays: %s", self._files[0], error)

    def _renew(self) -> bool:
        """Raises OSError, which ssl.SSLError is."""
        state = self._look()
        if state == self._state:
            return False
        self._newest = self._load()
        self._state = state
        return True

    def _load(self) -> ssl.SSLContext:
        """Raises OSError, which ssl.SSLError is."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.load_cert_chain(*self._files)
        return made

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        # Called for every handshake, also where the client names no server.
        connection.context = self._newest

    def _look(self) -> list[tuple[int, int, int]]:
        # Links are followed: the kubelet replaces the directory that they lead to.
        found = [path.stat() for path in self._files]
        return [(status.st_ino, status.st_mtime_ns, status.st_size) for status in found]


class WebhookServer:
    """Answers reviews on a port, until cancelled."""

    def __init__(
        self,
        answer: Answer,
        metrics: Metrics,
        tls: ssl.SSLContext,
        port: int,
        address: str = "",
        *,
        seconds: float = deadlines.WEBHOOK_REVIEW_SECONDS,
    ) -> None:
        """`seconds`: for one review, the wait for its turn included."""
        self._answer = answer
        self._metrics = metrics
        metrics.expect_reviews()
        self._seconds = seconds
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._listener = TcpListener(
            "webhook", port, address, connections=CONNECTIONS, seconds=deadlines.WEBHOOK_SECONDS, tls=tls
        )

    @property
    def port(self) -> int | None:
        """The port that is listened on; None while there is none."""
        return self._listener.port

    async def run(self) -> None:
        """Serve until cancelled."""
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_one_request])
        app.router.add_post("/validate", self._handle)
        app.router.add_get("/healthz", healthz)
        app.on_response_prepare.append(hide_server)
        await self._listener.serve(http_runner(app, head_timeout=deadlines.WEBHOOK_SECONDS))

    async def _handle(self, request: web.Request) -> web.Response:
        kind, outcome = "", "failed"
        try:
            async with asyncio.timeout(self._seconds):
                body = await request.read()
                async with self._turns:
                    work = functools.partial(self._answer, body)
                    answer, kind, outcome = await portal.run(Deadline(self._seconds), work, name="review")
            response = web.Response(body=answer, content_type="application/json")
        except TimeoutError:
            log.error("a review was not answered within %g s", self._seconds)
            response = web.Response(status=504, text=f"no answer within {self._seconds:g} s\n")
        except web.HTTPRequestEntityTooLarge:
            log.error("a review is larger than %d bytes", BODY_LIMIT)
            response = web.Response(status=413, text=f"the review is larger than {BODY_LIMIT} bytes\n")
        except ValueError as error:
            log.error("that is no AdmissionReview: %s", error)
            response = web.Response(status=400, text=f"that is no AdmissionReview: {error}\n")
        except Exception:
            log.exception("a review failed")
            response = web.Response(status=500)
        self._metrics.review(kind, outcome)
        return response


@web.middleware
async def _one_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A connection has its time: one that is kept would be cut within a review."""
    response: web.StreamResponse
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status)
    response.force_close()
    return response
