"""All metrics of the daemon as callers record them: what they are (`declared`), and their values (`registry`).

Label values are bounded, whatever callers pass. Recording neither raises nor blocks. Only this package uses
prometheus_client.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from itertools import product
from typing import Final

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.exposition import generate_latest as text
from prometheus_client.openmetrics.exposition import ALLOWUTF8, CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from multus_daemon.metrics.declared import GROUPS, NETWORK_TRAFFIC, PROCESS, REVIEWED, Outcome
from multus_daemon.metrics.registry import Measured, Registry

_OWN: Final = [item for group in GROUPS.values() for item in group if item not in PROCESS]


class Metrics:
    """The metrics of a program: an attribute or a method to record each one, and `render` for a scrape."""

    def __init__(self, *, version: str = "") -> None:
        self.registry = Registry(_OWN, PROCESS)
        counters, gauges, histograms = self.registry.counters, self.registry.gauges, self.registry.histograms
        gauges["multus_build_info"].labels(version, platform.python_version()).set(1)
        # Requests, by verb.
        self._answers = counters["multus_server_request_total"]
        self._verbs = histograms["multus_cni_request_duration_seconds"]
        self._stages = histograms["multus_cni_stage_duration_seconds"]
        self.in_flight = gauges["multus_cni_requests_in_flight"]
        self.waiting = gauges["multus_cni_requests_waiting"]
        self.refused_peers = counters["multus_refused_peers_total"].labels()
        self.reviews = counters["multus_webhook_reviews_total"]
        # Networks.
        self._networks = histograms["multus_network_add_duration_seconds"]
        self.repairs = counters["multus_repairs_total"]
        self.hotplugged = counters["multus_hotplug_total"]
        self.unmet_requests = counters["multus_requests_unmet_total"]
        self.check_failures = counters["multus_check_failures_total"].labels()
        self.lacking = gauges["multus_pods_lacking_networks"].labels()
        # Plugins, and the wait for a process, by verb.
        self._plugins = histograms["multus_plugin_duration_seconds"]
        self.processes_limit = gauges["multus_plugin_processes_limit"].labels()
        self.processes_running = gauges["multus_plugin_processes_running"]
        self.processes_waiting = gauges["multus_plugin_processes_waiting"]
        self.process_waits = histograms["multus_plugin_process_wait_seconds"]
        self.process_waits_given_up = counters["multus_plugin_process_waits_given_up_total"]
        # Late DELs, leftovers of containers, the node's CNI configuration.
        self.spooled = gauges["multus_spool_entries"].labels()
        self.replays = counters["multus_spool_replays_total"]
        self.leftovers = gauges["multus_leftover_containers"]
        self.orphans = counters["multus_orphan_attachments_total"]
        self.collected = counters["multus_gc_attachments_total"]
        self.set_aside = counters["multus_containers_set_aside_total"].labels()
        self.deletes_given_up = counters["multus_deletes_given_up_total"].labels()
        self.never_attached = counters["multus_networks_never_attached_total"].labels()
        self.replaced_namespaces = counters["multus_replaced_namespaces_total"].labels()
        self.configurations_restored = counters["multus_cni_config_restored_total"].labels()
        # The API server. The label is `pods` or `networks`.
        self.informer_errors = counters["multus_informer_errors_total"]
        self.events_dropped = counters["multus_events_dropped_total"].labels()
        self._api_requests = counters["multus_api_requests_total"]

    def request(self, handler: str, code: int, method: str) -> None:
        """Count an answered HTTP request; `handler` is its path."""
        known = handler in ("/cni", "/delegate", "/healthz", "/readyz", "/admin")
        shown = handler if known else "NotFound"
        self._answers.labels(shown, str(code), method.lower()).inc()

    def verb(
        self,
        verb: str,
        outcome: Outcome,
        seconds: float,
        stages: Mapping[str, float] | None = None,
        exemplar: Mapping[str, str] | None = None,
    ) -> None:
        """Measure a finished verb and its stages, in seconds; `exemplar`: labels of the request, 128 characters."""
        series = self._verbs.labels(verb, outcome)
        series.observe(seconds, dict(exemplar) if exemplar else None)
        # The stages of GC run side by side, so their seconds say nothing about its duration.
        if verb in ("ADD", "DEL", "CHECK"):
            for stage, spent in tuple((stages or {}).items()):
                self._stages.labels(verb, stage).observe(spent)

    def network(self, network: str, outcome: Outcome, seconds: float) -> None:
        """Measure the ADD of one network, called as `Attachment.name`."""
        self._networks.labels(network, outcome).observe(seconds)

    def plugin(self, plugin_type: str, verb: str, outcome: Outcome, seconds: float) -> None:
        """Measure one call of one plugin."""
        self._plugins.labels(plugin_type, verb, outcome).observe(seconds)

    def api_request(self, verb: str, code: str) -> None:
        """Count a request to the API server; `code`: the HTTP status of its answer, or `error`."""
        self._api_requests.labels(verb, code).inc()

    def expect_reviews(self) -> None:
        """Create the series of the admission webhook, which only the webhook's program shows."""
        for series in product((*REVIEWED, "other"), self.reviews.declared.labels[1].values):
            self.reviews.labels(*series)

    def measure(self, name: str, values: Callable[[], Mapping[str, float]]) -> None:
        """Call `values` at each scrape, in a thread: it returns the values of metric `name`, by its only label.

        `values` must return within milliseconds. See `Registry.measure`.
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
