"""All metrics of the daemon, on an injected registry. Only this module uses prometheus_client.

Label values are bounded, whatever callers pass. Recording neither raises nor blocks. `render` reads /proc, so call it
in a thread.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

VERBS: Final = frozenset({"ADD", "DEL", "CHECK", "STATUS", "GC"})
OUTCOMES: Final = frozenset({"success", "error", "deadline"})
# A plugin's call ends with success, with a well-known CNI error code, or in one of two ways without a code.
DELEGATE_OUTCOMES: Final = frozenset(
    ("success", "cancelled", "crash", "1", "2", "3", "4", "5", "6", "7", "8", "11", "50", "51", "999")
)
REQUESTS: Final = frozenset({"ips", "mac", "infiniband-guid", "bandwidth", "portMappings"})
COLLECTED: Final = frozenset({"collected", "left", "failed"})
REPLAYS: Final = frozenset({"served", "failed", "rejected"})
REVIEWS: Final = frozenset({"allowed", "warned", "refused", "failed"})
REVIEWED: Final = frozenset(
    {"NetworkAttachmentDefinition", "Pod", "Deployment", "DaemonSet", "StatefulSet", "ReplicaSet", "Job", "CronJob"}
)
ORPHANS: Final = frozenset({"deleted", "failed"})
HANDLERS: Final = frozenset({"/cni", "/delegate", "/healthz", "/readyz", "/admin"})
_METHODS: Final = frozenset({"get", "put", "head", "post", "delete", "connect", "options", "notify", "trace", "patch"})
TRAFFIC: Final = MappingProxyType(
    {
        "receive_packets": "Packets that pods received on additional interfaces",
        "transmit_packets": "Packets that pods sent on additional interfaces",
        "receive_bytes": "Bytes that pods received on additional interfaces",
        "transmit_bytes": "Bytes that pods sent on additional interfaces",
        "receive_errors": "Packets with errors that pods received on additional interfaces",
        "transmit_errors": "Packets that pods could not send on additional interfaces because of errors",
        "receive_drops": "Received packets that were dropped on additional interfaces of pods",
        "transmit_drops": "Packets to send that were dropped on additional interfaces of pods",
    }
)
"""Meaning of each figure of traffic, from the pod's point of view, by its part of the metric's name."""
# Seconds. A built-in plugin takes milliseconds, a plugin's deadline is two minutes.
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_MAX_PLUGIN_TYPES: Final = 64
_MAX_TYPE_LENGTH: Final = 64

Registry = CollectorRegistry | None
"""The registry of a part; None: its metrics are not served."""


class Metrics:
    """Metrics of requests, and of the daemon's parts."""

    def __init__(self, registry: Registry = None, *, version: str = "") -> None:
        """Register the metrics on `registry`, or on a new one; never on the library's global registry."""
        self._registry = registry or CollectorRegistry()
        self._plugin_types: set[str] = set()
        counter = functools.partial(Counter, registry=self._registry)
        gauge = functools.partial(Gauge, registry=self._registry)
        histogram = functools.partial(Histogram, registry=self._registry, buckets=_BUCKETS)
        # The labelled metrics are cached: a look-up by the library takes 3 us, and a request makes five.
        # Name, labels and help of the first are upstream's, so that dashboards keep working.
        self._requests = functools.cache(
            counter("multus_server_request_total", "Counter of HTTP requests", ["handler", "code", "method"]).labels
        )
        what = "Time from a decoded CNI request to its answer"
        self._verbs = functools.cache(
            histogram("multus_cni_request_duration_seconds", what, ["verb", "outcome"]).labels
        )
        what = "Time of one call of one plugin"
        self._delegates = functools.cache(
            histogram("multus_delegate_duration_seconds", what, ["type", "verb", "outcome"]).labels
        )
        self._in_flight = functools.cache(
            gauge("multus_cni_requests_in_flight", "CNI requests in progress", ["verb"]).labels
        )
        self._queued = functools.cache(
            gauge("multus_cni_requests_waiting", "CNI requests that wait because of connectionLimit", ["verb"]).labels
        )
        self._refused_peers = counter("multus_refused_peers_total", "Requests on the socket from users without access")
        what = "Requests of pods (ips, mac, ...) that no plugin supports or that the result does not show"
        self._unmet = counter("multus_requests_unmet_total", what, ["request"])
        what = "CHECKs of plugins that failed although nothing that ADD left is missing; the pod's CHECK succeeded"
        self._checks_failed = counter("multus_check_failures_total", what)
        what = "Stale attachments that a GC handled: collected, left because processes run there, failed"
        self._collected = counter("multus_gc_attachments_total", what, ["outcome"])
        what = "Objects that the admission webhook reviewed: allowed, warned, refused, failed to review"
        self._reviews = counter("multus_webhook_reviews_total", what, ["kind", "outcome"])
        self.cluster = ClusterMetrics(self._registry)
        self.processes = ProcessMetrics(self._registry)
        self.deletes = DeleteMetrics(self._registry)
        self.primary = PrimaryMetrics(self._registry)
        gauge("multus_build_info", "Always 1", ["version", "python"]).labels(version, platform.python_version()).set(1)
        # A series that exists from the start lets a rate include the first event.
        for verb in VERBS:
            self._in_flight(verb)
            self._queued(verb)
        for request in REQUESTS:
            self._unmet.labels(request)
        for outcome in COLLECTED:
            self._collected.labels(outcome)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def request(self, handler: str, code: int, method: str) -> None:
        """Count an answered HTTP request; `handler` is its path."""
        method = method.lower()
        self._requests(
            handler if handler in HANDLERS else "NotFound", str(code), method if method in _METHODS else "unknown"
        ).inc()

    def verb(self, verb: str, outcome: str, seconds: float) -> None:
        """Measure a finished verb; `outcome` is one of `OUTCOMES`."""
        self._verbs(_known(verb, VERBS), _known(outcome, OUTCOMES)).observe(seconds)

    def delegate(self, plugin_type: str, verb: str, outcome: str, seconds: float) -> None:
        """Measure one call of one plugin; `outcome` is one of `DELEGATE_OUTCOMES`."""
        labels = (self._known_type(plugin_type), _known(verb, VERBS), _known(outcome, DELEGATE_OUTCOMES))
        self._delegates(*labels).observe(seconds)

    def expect_reviews(self) -> None:
        """Create the series of the webhook, which only its own program shows."""
        for kind in (*REVIEWED, "other"):
            for outcome in REVIEWS:
                self._reviews.labels(kind, outcome)

    def review(self, kind: str, outcome: str) -> None:
        """Count an answer of the webhook; `outcome` is one of `REVIEWS`."""
        self._reviews.labels(_known(kind, REVIEWED), _known(outcome, REVIEWS)).inc()

    def in_flight(self, verb: str) -> contextlib.AbstractContextManager[object]:
        """Count the block as work on `verb`."""
        return self._in_flight(_known(verb, VERBS)).track_inprogress()

    def queued(self, verb: str) -> contextlib.AbstractContextManager[object]:
        """Count the block as a wait for `verb` to begin."""
        return self._queued(_known(verb, VERBS)).track_inprogress()

    def refused_peer(self) -> None:
        """Count a call by another user's process."""
        self._refused_peers.inc()

    def unmet_request(self, request: str) -> None:
        """Count a pod's unmet request; `request` is one of `REQUESTS`."""
        self._unmet.labels(_known(request, REQUESTS)).inc()

    def check_failed(self) -> None:
        """Count a plugin's CHECK that failed although nothing that ADD left is missing."""
        self._checks_failed.inc()

    def collected(self, outcome: str, attachments: int) -> None:
        """Count stale attachments that a GC handled; `outcome` is one of `COLLECTED`."""
        self._collected.labels(_known(outcome, COLLECTED)).inc(attachments)

    def ask_dropped_lines(self, dropped: Callable[[], Mapping[str, int]]) -> None:
        """Call `dropped` at each scrape, in a thread, for the number of lost log lines by destination."""

        def family() -> Metric:
            what = "Log lines that could not be written: no reader, or the disk failed"
            lost = CounterMetricFamily("multus_log_lines_dropped", what, labels=["to"])
            for way, lines in dropped().items():
                lost.add_metric([way], lines)
            return lost

        self._registry.register(_Asked(family))

    def ask_traffic(
        self, labels: Sequence[str], figures: Callable[[], Mapping[tuple[str, ...], Sequence[int]]]
    ) -> None:
        """Call `figures` at each scrape, in a thread, for the traffic of pods by the values of `labels`.

        The figures are in the order of `TRAFFIC`.
        """
        subject = "pod_network" if "pod" in labels else "network"

        def families() -> Iterator[Metric]:
            found = figures()
            for position, (name, what) in enumerate(TRAFFIC.items()):
                family = CounterMetricFamily(f"multus_{subject}_{name}", what, labels=labels)
                for values, counts in found.items():
                    family.add_metric(values, counts[position])
                yield family

        self._registry.register(_AskedTogether(families))

    def render(self) -> tuple[bytes, str]:
        """Return the exposition and its Content-Type. Reads /proc: call it in a thread."""
        return generate_latest(_WithoutCreated(self._registry)), CONTENT_TYPE_PLAIN_0_0_4

    def _known_type(self, plugin_type: str) -> str:
        """Return `plugin_type`, or "other" after `_MAX_PLUGIN_TYPES`: configurations of users name the types."""
        cut = plugin_type[:_MAX_TYPE_LENGTH].encode("utf-8", "replace").decode()
        if cut in self._plugin_types:
            return cut
        if not cut or len(self._plugin_types) >= _MAX_PLUGIN_TYPES:
            return "other"
        self._plugin_types.add(cut)
        return cut


class ClusterMetrics:
    """Metrics of the Kubernetes adapter. The label `resource` is `pods` or `networks`."""

    def __init__(self, registry: Registry = None) -> None:
        self._registry = registry
        counter = functools.partial(Counter, registry=registry)
        what = "Lists and watches that ended with an error"
        self.errors = counter("multus_informer_errors_total", what, ["resource"])
        self.changes = counter("multus_informer_changes_total", "Changes that a watch reported", ["resource"])
        what = "Age of what is known, which may be outdated: 0 while a watch runs, +Inf before the first answer"
        self._stale = Gauge("multus_informer_stale_seconds", what, ["resource"], registry=registry)
        what = "network-status annotations written by PUT because PATCH is forbidden"
        self.statuses_put = counter("multus_network_status_put_total", what)
        what = "network-status annotations that were given up"
        self.statuses_dropped = counter("multus_network_status_dropped_total", what)
        self.events_dropped = counter("multus_events_dropped_total", "Messages that became no Event")

    def ask_staleness(self, resource: str, seconds: Callable[[], float]) -> None:
        """Call `seconds` at each scrape, in a thread, for the time since changes were last received."""
        self._stale.labels(resource).set_function(seconds)

    def ask_certificate(self, expires: Callable[[], float | None]) -> None:
        """Call `expires` at each scrape, in a thread, for the Unix time at which the node's own certificate ends.

        None means no certificate and gives no sample, as 0 would be a certificate that expired long ago.
        """

        def family() -> Metric:
            name = "multus_client_certificate_expiration_timestamp_seconds"
            made = GaugeMetricFamily(name, "Unix time at which the node's own client certificate ends")
            if (moment := expires()) is not None:
                made.add_metric([], moment)
            return made

        if self._registry:
            self._registry.register(_Asked(family))


class ProcessMetrics:
    """Metrics of plugin processes and the wait for them, by CNI_COMMAND."""

    def __init__(self, registry: Registry = None) -> None:
        gauge = functools.partial(Gauge, registry=registry)
        self.allowed = gauge("multus_delegate_processes_limit", "Maximum number of concurrent plugin processes")
        self.running = gauge("multus_delegate_processes_running", "Plugin processes that run", ["verb"])
        self.waiting = gauge("multus_delegate_processes_waiting", "Calls of plugins that wait for a process", ["verb"])
        what = "Time that a call of a plugin waited until it ran or was given up"
        self.waits = Histogram("multus_delegate_wait_seconds", what, ["verb"], buckets=_BUCKETS, registry=registry)
        what = "Calls of plugins that failed because the node was busy"
        self.given_up = Counter("multus_delegate_waits_given_up_total", what, ["verb"], registry=registry)
        for verb in VERBS:
            for metric in (self.running, self.waiting, self.given_up):
                metric.labels(verb)


class DeleteMetrics:
    """Metrics of late DELs and of leftovers of containers."""

    def __init__(self, registry: Registry = None) -> None:
        counter = functools.partial(Counter, registry=registry)
        gauge = functools.partial(Gauge, registry=registry)
        self.spooled = gauge("multus_spool_entries", "DELs that wait in the spool, counted up to 10000")
        what = "Spooled DELs: served, failed and to be retried, rejected as invalid"
        self.replays = counter("multus_spool_replays_total", what, ["outcome"])
        what = "Containers whose failed DEL was answered with success (deleteTries)"
        self.given_up = counter("multus_deletes_given_up_total", what)
        what = "Networks whose failed DEL is treated as success: their ADD was refused, and nothing of them exists"
        self.never_attached = counter("multus_networks_never_attached_total", what)
        what = "Containers with networks that could not be detached for a day"
        self.set_aside = counter("multus_containers_set_aside_total", what)
        what = "Containers detached whose path no longer led to their network namespace"
        self.replaced_namespaces = counter("multus_replaced_namespaces_total", what)
        what = "Attachments of orphans: deleted, failed"
        self.orphans = counter("multus_orphan_attachments_total", what, ["outcome"])
        what = "Containers left after the last comparison with running pods: orphans, inhabited, unreadable, aside"
        self.leftovers = gauge("multus_leftover_containers", what, ["kind"])
        self.lacking = gauge("multus_pods_lacking_networks", "Pods that run without networks that they asked for")
        for outcome in REPLAYS:
            self.replays.labels(outcome)
        for outcome in ORPHANS:
            self.orphans.labels(outcome)


class PrimaryMetrics:
    """Metrics of the node's CNI configuration."""

    def __init__(self, registry: Registry = None) -> None:
        counter = functools.partial(Counter, registry=registry)
        what = "CNI configurations written with a new content"
        self.generated = counter("multus_cni_config_generated_total", what)
        what = "CNI configurations restored after another program changed them"
        self.restored = counter("multus_cni_config_restored_total", what)
        what = "New problems with the primary network's configuration"
        self.problems = counter("multus_primary_problems_total", what)


def _known(value: str, known: frozenset[str]) -> str:
    return value if value in known else "other"


class _Asked(Collector):
    def __init__(self, family: Callable[[], Metric]) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        yield self._family()


class _AskedTogether(Collector):
    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


class _WithoutCreated(Collector):
    """A registry without its `…_created` series, which double a scrape and which upstream does not have."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
