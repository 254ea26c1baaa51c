"""The webhook as a program: the port, the watched networks, the certificate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Set
from pathlib import Path
from typing import Any, Final

from multus_daemon import __version__
from multus_daemon.api.certificate import Certificate
from multus_daemon.api.metrics_port import serve_metrics
from multus_daemon.cluster.kube import client, connect, informer, lookup, objects
from multus_daemon.metrics import Metrics
from multus_daemon.runtime import portal
from multus_daemon.runtime.gates import Gates
from multus_daemon.runtime.tasks import StartError, end, until_signal
from multus_daemon.settings import Settings
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError
from multus_tools.webhook import admission, injection
from multus_tools.webhook.server import Answer, WebhookServer

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
