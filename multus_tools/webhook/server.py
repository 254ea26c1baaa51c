"""`multus-daemon webhook`: the admission webhooks over TLS (Kubernetes documentation, "Dynamic Admission Control")."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
from collections.abc import Callable, Coroutine, Mapping, Set
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from multus_daemon import __version__, deadlines
from multus_daemon.api.app import healthz, hide_server, http_runner, readyz
from multus_daemon.api.metrics_port import serve_metrics
from multus_daemon.api.tcp import TcpListener
from multus_daemon.api.tls import Certificate
from multus_daemon.cluster.kube import client, connect, informer, lookup, objects
from multus_daemon.metrics import Metrics
from multus_daemon.metrics.declared import Outcome
from multus_daemon.runtime import portal
from multus_daemon.runtime.aio import StartError, end, until_signal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings import Settings
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError
from multus_tools.webhook import admission, injection

BODY_LIMIT: Final = 8 * 1024 * 1024
"""Maximum bytes of a review: an update has the object twice, and the API server accepts objects of 3 MiB."""
AT_ONCE: Final = 4
"""Maximum number of concurrent small reviews, each in a thread, and of large ones in memory."""
SMALL_BYTES: Final = 64 * 1024
"""Larger reviews are judged one at a time: each takes tens of megabytes, and small ones do not wait for them."""
CONNECTIONS: Final = 64
"""Maximum number of concurrent connections."""
PER_SECOND: Final = 200
"""Maximum number of new ones in a second. Each has one review; a handshake takes about a millisecond."""

Answer = tuple[bytes, str, Outcome]
"""The answer, the kind of the object and the outcome (`metrics.declared.Outcome`)."""

log = logging.getLogger(__name__)


class WebhookServer(TcpListener):
    """Answers reviews on a port."""

    def __init__(
        self,
        answers: Mapping[str, Callable[[bytes], Answer]],
        metrics: Metrics,
        gates: Gates,
        tls: Callable[[], ssl.SSLContext],
        port: int,
        address: str = "",
        *,
        unread: Callable[[bytes, str], Answer | None] = lambda beginning, problem: None,
        seconds: float = deadlines.WEBHOOK_REVIEW_SECONDS,
    ) -> None:
        """`answers`: by path, a function that answers a review; blocks, raises ValueError. `gates`: for `/readyz`.

        `tls`: returns the context of a connection.
        `unread`: answers a review by its beginning and the problem why it is not read; None if that is not possible.
        `seconds`: limit for one review, with the wait for its turn.
        """
        super().__init__(
            "webhook",
            port,
            address,
            connections=CONNECTIONS,
            per_second=PER_SECOND,
            methods={"GET": False, "HEAD": False, "POST": True},
            seconds=deadlines.WEBHOOK_SECONDS,
            handshake_seconds=deadlines.WEBHOOK_HANDSHAKE_SECONDS,
            tls=tls,
        )
        self._answers = answers
        self._gates = gates
        self._unread = unread
        self._metrics = metrics
        metrics.expect_reviews()
        self._review_seconds = seconds
        # Reviews in memory, and those that a thread judges.
        self._small = asyncio.Semaphore(CONNECTIONS), asyncio.Semaphore(AT_ONCE)
        self._large = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(1)

    async def run(self) -> None:
        """Serve until cancelled."""
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_one_request])
        for path, answer in self._answers.items():
            app.router.add_post(path, functools.partial(self._handle, answer))
        app.router.add_get("/healthz", healthz)
        app.router.add_get("/readyz", functools.partial(readyz, self._gates))
        app.on_response_prepare.append(hide_server)
        runner = http_runner(app, head_timeout=self.seconds)
        await runner.setup()
        try:
            assert runner.server is not None
            server = runner.server
            await self.serve(lambda _head: server())
        finally:
            await runner.cleanup()

    async def _handle(self, answer_review: Callable[[bytes], Answer], request: web.Request) -> web.Response:
        kind, body, size = "", bytearray(), request.content_length
        outcome: Outcome = "error"
        places, turns = self._small if size is not None and size <= SMALL_BYTES else self._large
        try:
            async with asyncio.timeout(self._review_seconds), places:
                async for part in request.content.iter_any():
                    body += part
                    if len(body) > BODY_LIMIT:
                        raise web.HTTPRequestEntityTooLarge(BODY_LIMIT, len(body))
                async with turns:
                    work = functools.partial(answer_review, bytes(body))
                    answer, kind, outcome = await portal.run(Deadline(self._review_seconds), work, name="review")
            response = web.Response(body=answer, content_type="application/json")
        except TimeoutError:
            log.error("a review was not answered within %g s", self._review_seconds)
            response = web.Response(status=504, text=f"no answer within {self._review_seconds:g} s\n")
        except web.HTTPRequestEntityTooLarge:
            problem = f"the review is larger than {BODY_LIMIT} bytes"
            log.error("%s", problem)
            response = web.Response(status=413, text=f"{problem}\n")
            if found := self._unread(bytes(body[:SMALL_BYTES]), problem):
                answer, kind, outcome = found
                response = web.Response(body=answer, content_type="application/json")
        except ValueError as error:
            log.error("the body is not an AdmissionReview: %s", error)
            response = web.Response(status=400, text=f"the body is not an AdmissionReview: {error}\n")
        except Exception:
            log.exception("a review failed")
            response = web.Response(status=500)
        self._metrics.review(kind, outcome)
        return response


@web.middleware
async def _one_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Close the connection after its request: its lifetime could end within a second review."""
    response: web.StreamResponse
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status)
    response.force_close()
    return response


LOOKUPS_MAX: Final = 16
"""Networks of one pod that the injector asks the API server for, because the watch does not have them."""


def run(settings: Settings, certificate: Path, key: Path, port: int, address: str) -> None:
    """Answer the API server's reviews until SIGTERM or SIGINT. Raises StartError."""
    try:
        pair = Certificate(certificate, key)
    except OSError as error:
        raise StartError(f"certificate {certificate}, key {key}: {error.strerror or error}") from error

    async def work() -> None:
        metrics, gates = Metrics(version=__version__), Gates("networks")
        async with client.ApiClient(connect.source_of(settings.kubernetes)) as api:
            await api.load()
            api.count = metrics.cluster.request
            networks = informer.Informer(api, objects.networks(), gates, metrics=metrics.cluster)

            def answer(review: bytes) -> Answer:
                # Until all networks are known, missing ones are not reported.
                known = networks.known() if networks.synced.is_set() else {}
                return admission.answer(review, settings, known)

            loop, look_up = portal.LoopPortal(), lookup.NetworkLookup(api, networks, patience=0).network

            def inject(review: bytes) -> Answer:
                return injection.answer(review, settings, lambda keys: loop.call(_find, networks, look_up, keys))

            answers = {"/validate": answer, "/inject": inject}
            tasks: dict[str, Coroutine[Any, Any, Any]] = {
                "webhook": WebhookServer(
                    answers, metrics, gates, lambda: pair.context, port, address, unread=admission.unread
                ).run(),
                "certificate": pair.run(),
                "networks": networks.run(),
            }
            if settings.metrics.port is not None:
                tasks["metrics"] = serve_metrics(metrics, gates, settings.metrics, [settings.metrics.address])
            await end(await until_signal(tasks))

    asyncio.run(work())


async def _find(
    known: informer.Informer[NetworkAttachmentDefinition],
    look_up: Callable[[str, str], Coroutine[Any, Any, NetworkAttachmentDefinition]],
    keys: Set[objects.Key],
) -> dict[objects.Key, NetworkAttachmentDefinition]:
    """Return those of the networks that exist. Raises StoreUnavailableError.

    A pod is often applied with its network: the watch may have it a moment later.
    """
    found = {key: network for key in keys if (network := known.get(key))}
    for key in sorted(keys - found.keys())[:LOOKUPS_MAX]:
        with contextlib.suppress(NetworkNotFoundError):
            found[key] = await look_up(*key)
    return found
