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

from multus_daemon import __version__
from multus_daemon.api.metrics_port import health, serve_metrics
from multus_daemon.api.tcp import Head, Reply, TcpListener
from multus_daemon.api.tls import Certificate
from multus_daemon.cluster.kube import client, connect, informer, objects, store
from multus_daemon.metrics import Metrics
from multus_daemon.metrics.declared import Outcome
from multus_daemon.runtime import portal
from multus_daemon.runtime.aio import StartError, end, until_signal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.runtime.gates import Gates
from multus_daemon.settings import Settings
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError
from multus_tools import deadlines
from multus_tools.webhook import admission, injection
from multus_tools.webhook.admission import Answer

BODY_LIMIT: Final = 8 * 1024 * 1024
"""Maximum bytes of a review: an update has the object twice, and the API server accepts objects of 3 MiB."""
AT_ONCE: Final = 4
"""Maximum number of concurrent small reviews, each in a thread; also the maximum of large reviews in memory."""
SMALL_BYTES: Final = 64 * 1024
"""Maximum bytes of a small review. Larger ones run one at a time, as each takes tens of megabytes."""
CONNECTIONS: Final = 64
"""Maximum number of concurrent connections."""
PER_SECOND: Final = 200
"""Maximum number of new connections in a second. Each has one review; a handshake takes about a millisecond."""

log = logging.getLogger(__name__)


class WebhookServer(TcpListener):
    """Answers AdmissionReviews on a TCP port with TLS."""

    def __init__(
        self,
        answers: Mapping[str, Callable[[bytes], Answer]],
        metrics: Metrics,
        gates: Gates,
        tls: Callable[[], ssl.SSLContext],
        port: int,
        address: str = "",
        *,
        seconds: float = deadlines.WEBHOOK_REVIEW_SECONDS,
    ) -> None:
        """`answers`: by path, a function that answers a review; blocks, raises ValueError. `gates`: for `/readyz`.

        `tls`: returns the TLS context of a connection. `seconds`: limit for one review, with the wait for its turn.
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
        self._metrics = metrics
        metrics.expect_reviews()
        self._review_seconds = seconds
        # Reviews in memory, and those that a thread judges.
        self._small = asyncio.Semaphore(CONNECTIONS), asyncio.Semaphore(AT_ONCE)
        self._large = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(1)

    async def answer(self, head: Head, body: asyncio.StreamReader) -> Reply:
        """Answer a review, `/healthz` or `/readyz`."""
        review = self._answers.get(head.path) if head.method == "POST" else None
        return health(self._gates, head.path) if review is None else await self._review(review, head.length, body)

    async def _review(self, review: Callable[[bytes], Answer], size: int, body: asyncio.StreamReader) -> Reply:
        kind = ""
        outcome: Outcome = "error"
        places, turns = self._small if size <= SMALL_BYTES else self._large
        try:
            async with asyncio.timeout(self._review_seconds), places:
                if size > BODY_LIMIT:
                    problem = f"the review is larger than {BODY_LIMIT} bytes"
                    log.error("%s", problem)
                    found = admission.unread(await body.readexactly(min(size, SMALL_BYTES)), problem)
                    if found is None:
                        return Reply(413, f"{problem}\n".encode())
                    answer, kind, outcome = found
                else:
                    work = functools.partial(review, await body.readexactly(size))
                    async with turns:
                        answer, kind, outcome = await portal.run(Deadline(self._review_seconds), work, name="review")
            return Reply(200, answer, "application/json")
        except TimeoutError:
            log.error("a review was not answered within %g s", self._review_seconds)
            return Reply(504, f"no answer within {self._review_seconds:g} s\n".encode())
        except (ValueError, asyncio.IncompleteReadError) as error:
            log.error("the body is not an AdmissionReview: %s", error)
            return Reply(400, f"the body is not an AdmissionReview: {error}\n".encode())
        finally:
            self._metrics.reviews.labels(kind, outcome).inc()


LOOKUPS_MAX: Final = 16
"""Maximum networks of one pod that the API server is asked for, because the informer lacks them."""


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
            api.count = metrics.api_request
            networks = informer.Informer(api, objects.networks(), gates, metrics=metrics)

            def answer(review: bytes) -> Answer:
                # Until all networks are known, missing ones are not reported.
                known = networks.known() if networks.synced.is_set() else {}
                return admission.answer(review, settings, known)

            loop, look_up = portal.LoopPortal(), store.NetworkLookup(api, networks, patience=0).network

            def inject(review: bytes) -> Answer:
                return injection.answer(review, settings, lambda keys: loop.call(_find, networks, look_up, keys))

            answers = {"/validate": answer, "/inject": inject}
            tasks: dict[str, Coroutine[Any, Any, Any]] = {
                "webhook": WebhookServer(answers, metrics, gates, lambda: pair.context, port, address).run(),
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
    """Return the networks with these `keys` that exist. Raises StoreUnavailableError.

    A pod is often applied together with its network, which the informer may get a moment later.
    """
    found = {key: network for key in keys if (network := known.get(key))}
    for key in sorted(keys - found.keys())[:LOOKUPS_MAX]:
        with contextlib.suppress(NetworkNotFoundError):
            found[key] = await look_up(*key)
    return found
