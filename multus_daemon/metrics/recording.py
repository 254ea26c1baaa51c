"""The metrics as callers record them, and the text of a scrape."""

from __future__ import annotations

import logging
import operator
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from multus_daemon.metrics import exposition
from multus_daemon.metrics.declared import GROUPS, REVIEWED, Outcome
from multus_daemon.metrics.library import CONTENT_TYPE_LATEST, CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector
from multus_daemon.metrics.measured import NETWORK_TRAFFIC
from multus_daemon.metrics.series import Labels, Registry

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)

_TEXTS_AT_ONCE: Final = 1000
"""Number of series that are written in one go. Other threads wait for it: about 1 ms, longer at the first scrape."""
_PAUSE_SECONDS: Final = 0.0001

Asked = Callable[[], Mapping[Labels, Sequence[float]]]
"""Returns values by label values, one for each metric that it was asked for; the same object only if none changed."""


class _Answered(NamedTuple):
    """An answer, the texts of its labels, and its values by these texts."""

    found: Mapping[Labels, Sequence[float]]
    texts: Mapping[Labels, str]
    rows: Mapping[str, Sequence[float]]


class Metrics:
    """Metrics of requests, and of the daemon's parts."""

    def __init__(self, *, version: str = "") -> None:
        self.registry = Registry([item for group in GROUPS.values() for item in group])
        self._numbers, self._histograms = self.registry.numbers, self.registry.histograms
        self._asked: list[tuple[Sequence[str], Asked]] = []
        self._problems: dict[str, str] = {}
        self._answered: dict[str, _Answered] = {}
        """The last answer to each question, by the name of its first metric."""
        self._process = ProcessCollector(registry=None)
        self._numbers["multus_build_info"].labels(version, platform.python_version()).set(1)
        self.cluster = ClusterMetrics(self)
        self.processes = ProcessMetrics(self.registry)
        self.deletes = DeleteMetrics(self.registry)
        self.primary = PrimaryMetrics(self.registry)

    def request(self, handler: str, code: int, method: str) -> None:
        """Count an answered HTTP request; `handler` is its path."""
        known = handler in ("/cni", "/delegate", "/healthz", "/readyz", "/admin")
        shown = handler if known else "NotFound"
        self._numbers["multus_server_request_total"].labels(shown, str(code), method.lower()).inc()

    def verb(
        self,
        verb: str,
        outcome: Outcome,
        seconds: float,
        stages: Mapping[str, float] | None = None,
        exemplar: Mapping[str, str] | None = None,
    ) -> None:
        """Measure a finished verb and its stages, in seconds; `exemplar`: see `Histogram.observe`."""
        self._histograms["multus_cni_request_duration_seconds"].labels(verb, outcome).observe(seconds, exemplar)
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
        family = self._numbers["multus_webhook_reviews_total"]
        for series in product((*REVIEWED, "other"), family.declared.labels[1].values):
            family.labels(*series)

    def review(self, kind: str, outcome: Outcome) -> None:
        """Count an answer of the webhook."""
        self._numbers["multus_webhook_reviews_total"].labels(kind, outcome).inc()

    def in_flight(self, verb: str) -> AbstractContextManager[None]:
        """Count the block as work on `verb`."""
        return self._numbers["multus_cni_requests_in_flight"].labels(verb)

    def queued(self, verb: str) -> AbstractContextManager[None]:
        """Count the block as a wait for `verb` to begin."""
        return self._numbers["multus_cni_requests_waiting"].labels(verb)

    def refused_peer(self) -> None:
        """Count a call by another user's process."""
        self._numbers["multus_refused_peers_total"].labels().inc()

    def unmet_request(self, request: str) -> None:
        """Count a pod's unmet request; `request` is one of `declared.REQUESTS`."""
        self._numbers["multus_requests_unmet_total"].labels(request).inc()

    def check_failed(self) -> None:
        """Count a plugin's CHECK that failed although nothing that ADD left is missing."""
        self._numbers["multus_check_failures_total"].labels().inc()

    def collected(self, outcome: Outcome, attachments: int) -> None:
        """Count stale attachments that a GC handled."""
        self._numbers["multus_gc_attachments_total"].labels(outcome).inc(attachments)

    def ask(self, names: Sequence[str], work: Asked) -> None:
        """Call `work` at each scrape, in a thread, for the values of the metrics called `names`, in their order.

        It takes milliseconds at most. Of label values that are shown as one, the values are added up, and the largest
        ratio counts.
        """
        self._asked.append((names, work))

    def ask_one(self, name: str, work: Callable[[], Mapping[str, float]]) -> None:
        """Do the work of `ask` for one metric with one label."""
        self.ask([name], lambda: {(label,): (value,) for label, value in work().items()})

    def ask_dropped_lines(self, dropped: Callable[[], Mapping[str, int]]) -> None:
        """Ask for the number of lost log lines by destination."""
        self.ask_one("multus_log_lines_dropped_total", dropped)

    def ask_ready(self, conditions: Callable[[], Mapping[str, bool]]) -> None:
        """Ask for the conditions of readiness, and whether each holds."""
        self.ask_one("multus_ready", conditions)

    def ask_degraded(self, reasons: Callable[[], Mapping[str, bool]]) -> None:
        """Ask for what the daemon promises, and whether it can't do it."""
        self.ask_one("multus_degraded", reasons)

    def ask_attachments(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Ask for the number of attachments on record, by network."""
        self.ask_one("multus_attachments", counts)

    def ask_broken(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Ask for the number of attachments that differ from their record, by network."""
        self.ask_one("multus_attachments_broken", counts)

    def repair(self, outcome: Literal["success", "error"]) -> None:
        """Count a repair of an attachment."""
        self._numbers["multus_repairs_total"].labels(outcome).inc()

    def hotplug(self, verb: Literal["ADD", "DEL"], outcome: Literal["success", "error"], networks: int) -> None:
        """Count networks that a running pod's annotation added or removed."""
        self._numbers["multus_hotplug_total"].labels(verb, outcome).inc(networks)

    def ask_addresses(self, ratios: Callable[[], Mapping[str, float]]) -> None:
        """Ask for the share of addresses that are given, by network."""
        self.ask_one("multus_ipam_used_ratio", ratios)

    def ask_traffic(self, figures: Asked) -> None:
        """Ask for the traffic of pods by network; the figures are in the order of `TRAFFIC`."""
        self.ask([item.name for item in NETWORK_TRAFFIC], figures)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its Content-Type, for a client with this Accept header.

        Takes a few milliseconds, and lets other threads work meanwhile: call it in a thread.
        """
        openmetrics = exposition.wants_openmetrics(accept)
        answers = self._ask_all()
        texts: list[str] = []
        paused = 0
        for name, family in self.registry.families.items():
            texts += family.texts(answers.get(name, {}), openmetrics=openmetrics)
            if len(texts) - paused >= _TEXTS_AT_ONCE:
                time.sleep(_PAUSE_SECONDS)
                paused = len(texts)
        if openmetrics:
            texts.append("# EOF\n")
        return "".join(texts).encode(), CONTENT_TYPE_LATEST if openmetrics else CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """Yield the families, for a `CollectorRegistry` of prometheus_client. Takes longer than `render`."""
        from prometheus_client.openmetrics.parser import text_string_to_metric_families

        text, _ = self.render(exposition.OPENMETRICS)
        yield from text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]

    def _ask_all(self) -> dict[str, dict[str, float]]:
        """Return what is asked for at a scrape, by metric and text of the labels."""
        answers: dict[str, dict[str, float]] = {}
        for names, work in self._asked:
            try:
                found = work()
            except Exception as error:
                # The other metrics say what is wrong. Once, not with each scrape.
                problem = f"{type(error).__name__}: {error}"
                if self._problems.get(names[0]) != problem:
                    log.error("%s cannot be determined: %s", names[0], problem)
                self._problems[names[0]] = problem
                continue
            self._problems.pop(names[0], None)
            answered = self._answered.get(names[0])
            if answered is None or answered.found is not found:
                answered = self._answered[names[0]] = self._written(names[0], found, answered.texts if answered else {})
            for place, name in enumerate(names):
                answers.setdefault(name, {}).update(
                    {labels: numbers[place] for labels, numbers in answered.rows.items()}
                )
        for metric in self._process.collect():
            answers |= {sample.name: {"": sample.value} for sample in metric.samples}
        return answers

    def _written(self, name: str, found: Mapping[Labels, Sequence[float]], known: Mapping[Labels, str]) -> _Answered:
        """Return an answer with its labels as they are shown for the metric `name`; `known`: texts of the last one."""
        merge = max if name.endswith("_ratio") else operator.add
        family = self.registry.families[name]
        rows: dict[str, Sequence[float]] = {}
        texts: dict[Labels, str] = {}
        for values, numbers in found.items():
            if (labels := known.get(values)) is None:
                labels = exposition.braced(family.declared.label_names, family.bounded(values))
            texts[values] = labels
            rows[labels] = tuple(map(merge, rows[labels], numbers)) if labels in rows else numbers
        return _Answered(found, texts, rows)


class ClusterMetrics:
    """Metrics of the Kubernetes adapter. The label `resource` is `pods`, `networks` or `slices`."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        """`metrics`: those that are served; None: none are."""
        self._metrics = metrics or Metrics()
        numbers = self._metrics.registry.numbers
        self.errors = numbers["multus_informer_errors_total"]
        self.events_dropped = numbers["multus_events_dropped_total"].labels()
        self._requests = numbers["multus_api_requests_total"]

    def request(self, verb: str, code: str) -> None:
        """Count a request to the API server; `code`: the HTTP status of its answer, or `error`."""
        self._requests.labels(verb, code).inc()

    def ask_staleness(self, resource: str, seconds: Callable[[], float]) -> None:
        """Ask for the time since changes were last received."""
        self._metrics.ask_one("multus_informer_stale_seconds", lambda: {resource: seconds()})

    def ask_statuses(self, pending: Callable[[], int]) -> None:
        """Ask for the number of network-statuses that are not yet written."""
        self._metrics.ask(["multus_network_statuses_pending"], lambda: {(): (pending(),)})

    def ask_certificate(self, expires: Callable[[], float | None]) -> None:
        """Ask for the Unix time at which the node's own certificate ends.

        None means no certificate and gives no sample, as 0 would be a certificate that expired long ago.
        """

        def end() -> dict[Labels, tuple[float]]:
            return {} if (moment := expires()) is None else {(): (moment,)}

        self._metrics.ask(["multus_client_certificate_expiration_timestamp_seconds"], end)


class ProcessMetrics:
    """Metrics of plugin processes and the wait for them, by CNI_COMMAND."""

    def __init__(self, registry: Registry | None = None) -> None:
        registry = registry or Registry(GROUPS["Plugins"])
        self.allowed = registry.numbers["multus_plugin_processes_limit"].labels()
        self.running = registry.numbers["multus_plugin_processes_running"]
        self.waiting = registry.numbers["multus_plugin_processes_waiting"]
        self.waits = registry.histograms["multus_plugin_process_wait_seconds"]
        self.given_up = registry.numbers["multus_plugin_process_waits_given_up_total"]


class DeleteMetrics:
    """Metrics of late DELs and of leftovers of containers."""

    def __init__(self, registry: Registry | None = None) -> None:
        registry = registry or Registry([*GROUPS["Networks"], *GROUPS["Node"]])
        numbers = registry.numbers
        self.spooled = numbers["multus_spool_entries"].labels()
        self.replays = numbers["multus_spool_replays_total"]
        self.given_up = numbers["multus_deletes_given_up_total"].labels()
        self.never_attached = numbers["multus_networks_never_attached_total"].labels()
        self.set_aside = numbers["multus_containers_set_aside_total"].labels()
        self.replaced_namespaces = numbers["multus_replaced_namespaces_total"].labels()
        self.orphans = numbers["multus_orphan_attachments_total"]
        self.leftovers = numbers["multus_leftover_containers"]
        self.lacking = numbers["multus_pods_lacking_networks"].labels()


class PrimaryMetrics:
    """Metrics of the node's CNI configuration."""

    def __init__(self, registry: Registry | None = None) -> None:
        self.restored = (registry or Registry(GROUPS["Node"])).numbers["multus_cni_config_restored_total"].labels()
