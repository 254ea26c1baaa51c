"""The metrics as callers record them, and the text of a scrape."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import product
from typing import Final, Literal

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.exposition import generate_latest as text
from prometheus_client.openmetrics.exposition import ALLOWUTF8, CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from multus_daemon.metrics.declared import GROUPS, NETWORK_TRAFFIC, REVIEWED, Outcome
from multus_daemon.metrics.registry import Measured, Registry

_ALL: Final = [item for group in GROUPS.values() for item in group]


class Metrics:
    """Metrics of requests, and of the daemon's parts."""

    def __init__(self, *, version: str = "") -> None:
        self.registry = Registry(_ALL)
        self._counters, self._gauges = self.registry.counters, self.registry.gauges
        self._histograms = self.registry.histograms
        self._gauges["multus_build_info"].labels(version, platform.python_version()).set(1)
        self.cluster = ClusterMetrics(self.registry)
        self.processes = ProcessMetrics(self.registry)
        self.deletes = DeleteMetrics(self.registry)
        self.primary = PrimaryMetrics(self.registry)

    def request(self, handler: str, code: int, method: str) -> None:
        """Count an answered HTTP request; `handler` is its path."""
        known = handler in ("/cni", "/delegate", "/healthz", "/readyz", "/admin")
        shown = handler if known else "NotFound"
        self._counters["multus_server_request_total"].labels(shown, str(code), method.lower()).inc()

    def verb(
        self,
        verb: str,
        outcome: Outcome,
        seconds: float,
        stages: Mapping[str, float] | None = None,
        exemplar: Mapping[str, str] | None = None,
    ) -> None:
        """Measure a finished verb and its stages, in seconds; `exemplar`: labels that name it, 128 characters."""
        series = self._histograms["multus_cni_request_duration_seconds"].labels(verb, outcome)
        series.observe(seconds, dict(exemplar) if exemplar else None)
        # The stages of GC run side by side, so their seconds say nothing about its duration.
        if verb in ("ADD", "DEL", "CHECK"):
            for stage, spent in tuple((stages or {}).items()):
                self._histograms["multus_cni_stage_duration_seconds"].labels(verb, stage).observe(spent)

    def network(self, network: str, outcome: Outcome, seconds: float) -> None:
        """Measure the ADD of one network, called as `Attachment.name`."""
        self._histograms["multus_network_add_duration_seconds"].labels(network, outcome).observe(seconds)

    def plugin(self, plugin_type: str, verb: str, outcome: Outcome, seconds: float) -> None:
        """Measure one call of one plugin."""
        self._histograms["multus_plugin_duration_seconds"].labels(plugin_type, verb, outcome).observe(seconds)

    def expect_reviews(self) -> None:
        """Create the series of the webhook, which only its own program shows."""
        family = self._counters["multus_webhook_reviews_total"]
        for series in product((*REVIEWED, "other"), family.declared.labels[1].values):
            family.labels(*series)

    def review(self, kind: str, outcome: Outcome) -> None:
        """Count an answer of the webhook."""
        self._counters["multus_webhook_reviews_total"].labels(kind, outcome).inc()

    def in_flight(self, verb: str) -> AbstractContextManager[None]:
        """Count the block as work on `verb`."""
        return self._gauges["multus_cni_requests_in_flight"].labels(verb).track_inprogress()

    def queued(self, verb: str) -> AbstractContextManager[None]:
        """Count the block as a wait for `verb` to begin."""
        return self._gauges["multus_cni_requests_waiting"].labels(verb).track_inprogress()

    def refused_peer(self) -> None:
        """Count a call by another user's process."""
        self._counters["multus_refused_peers_total"].labels().inc()

    def unmet_request(self, request: str) -> None:
        """Count a pod's unmet request; `request` is one of `declared.REQUESTS`."""
        self._counters["multus_requests_unmet_total"].labels(request).inc()

    def check_failed(self) -> None:
        """Count a plugin's CHECK that failed although the kernel has what the ADD made."""
        self._counters["multus_check_failures_total"].labels().inc()

    def collected(self, outcome: Outcome, attachments: int) -> None:
        """Count stale attachments that a GC handled."""
        self._counters["multus_gc_attachments_total"].labels(outcome).inc(attachments)

    def repair(self, outcome: Literal["success", "error"]) -> None:
        """Count a repair of an attachment."""
        self._counters["multus_repairs_total"].labels(outcome).inc()

    def hotplug(self, verb: Literal["ADD", "DEL"], outcome: Literal["success", "error"], networks: int) -> None:
        """Count networks that a running pod's annotation added or removed."""
        self._counters["multus_hotplug_total"].labels(verb, outcome).inc(networks)

    def measure(self, name: str, values: Callable[[], Mapping[str, float]]) -> None:
        """Call `values` at each scrape, in a thread, for the values of a metric with one label, by its value.

        Takes milliseconds at most. See `Registry.measure`.
        """
        self.registry.measure([name], lambda: {(label,): (value,) for label, value in values().items()})

    def measure_one(self, name: str, value: Callable[[], float | None]) -> None:
        """Call `value` at each scrape, in a thread, for the value of a metric without labels; None: no sample."""
        self.registry.measure([name], lambda: {} if (now := value()) is None else {(): (now,)})

    def measure_traffic(self, figures: Measured) -> None:
        """Call `figures` at each scrape, in a thread, for the pods' traffic by network, in the order of `TRAFFIC`."""
        self.registry.measure([item.name for item in NETWORK_TRAFFIC], figures)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its Content-Type, for a client with this Accept header.

        Takes 15 ms for 2,700 series: call it in a thread.
        """
        # ALLOWUTF8 leaves names as they are, which have ASCII letters only: the same text, in two thirds of the time.
        if wants_openmetrics(accept):
            return openmetrics(self.registry, ALLOWUTF8), CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
        return text(self.registry, ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


def wants_openmetrics(accept: str) -> bool:
    """Report whether a client with this Accept header gets OpenMetrics."""
    try:
        return choose_encoder(accept)[1].startswith("application/openmetrics-text")
    except (TypeError, ValueError):
        # A version that is no number.
        return False


class ClusterMetrics:
    """Metrics of the Kubernetes adapter. The label `resource` is `pods`, `networks` or `slices`."""

    def __init__(self, registry: Registry | None = None) -> None:
        counters = (registry or Registry(_ALL)).counters
        self.errors = counters["multus_informer_errors_total"]
        self.events_dropped = counters["multus_events_dropped_total"].labels()
        self._requests = counters["multus_api_requests_total"]

    def request(self, verb: str, code: str) -> None:
        """Count a request to the API server; `code`: the HTTP status of its answer, or `error`."""
        self._requests.labels(verb, code).inc()


class ProcessMetrics:
    """Metrics of plugin processes and the wait for them, by CNI_COMMAND."""

    def __init__(self, registry: Registry | None = None) -> None:
        registry = registry or Registry(_ALL)
        self.allowed = registry.gauges["multus_plugin_processes_limit"].labels()
        self.running = registry.gauges["multus_plugin_processes_running"]
        self.waiting = registry.gauges["multus_plugin_processes_waiting"]
        self.waits = registry.histograms["multus_plugin_process_wait_seconds"]
        self.given_up = registry.counters["multus_plugin_process_waits_given_up_total"]


class DeleteMetrics:
    """Metrics of late DELs and of leftovers of containers."""

    def __init__(self, registry: Registry | None = None) -> None:
        registry = registry or Registry(_ALL)
        counters, gauges = registry.counters, registry.gauges
        self.spooled = gauges["multus_spool_entries"].labels()
        self.replays = counters["multus_spool_replays_total"]
        self.given_up = counters["multus_deletes_given_up_total"].labels()
        self.never_attached = counters["multus_networks_never_attached_total"].labels()
        self.set_aside = counters["multus_containers_set_aside_total"].labels()
        self.replaced_namespaces = counters["multus_replaced_namespaces_total"].labels()
        self.orphans = counters["multus_orphan_attachments_total"]
        self.leftovers = gauges["multus_leftover_containers"]
        self.lacking = gauges["multus_pods_lacking_networks"].labels()


class PrimaryMetrics:
    """Metrics of the node's CNI configuration."""

    def __init__(self, registry: Registry | None = None) -> None:
        self.restored = (registry or Registry(_ALL)).counters["multus_cni_config_restored_total"].labels()
