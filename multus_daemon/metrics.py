"""Every metric of the daemon, on an injected registry. The one module that knows prometheus_client.

Label values are bounded whatever callers pass. Recording never raises and never blocks; `render` reads /proc and
belongs in a thread.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

VERBS: Final = frozenset({"ADD", "DEL", "CHECK", "STATUS", "GC"})
OUTCOMES: Final = frozenset({"success", "error", "deadline"})
# A plugin's call ends well, with one of the well-known CNI error codes, or in one of two ways without a code.
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
# Seconds. A built-in plugin takes milliseconds, a plugin's deadline is two minutes.
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_MAX_PLUGIN_TYPES: Final = 64
_MAX_TYPE_LENGTH: Final = 64


class Metrics:
    """What is counted and measured."""

    def __init__(self, registry: CollectorRegistry | None = None, *, version: str = "") -> None:
        """`registry`: a new one where None; never the library's global one."""
        registry = registry or CollectorRegistry()
        self._registry = registry
        self._plugin_types: set[str] = set()
        # The children are kept, here as there: a look-up by the library is 3 us, and there are five for each request.
        # Name, labels and help text are upstream's: dashboards stay as they are.
        requests = Counter(
            "multus_server_request_total",
            "Counter of HTTP requests",
            ["handler", "code", "method"],
            registry=registry,
        )
        self._requests = functools.cache(requests.labels)
        verbs = Histogram(
            "multus_cni_request_duration_seconds",
            "Time from a decoded CNI request to its answer",
            ["verb", "outcome"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._verbs = functools.cache(verbs.labels)
        delegates = Histogram(
            "multus_delegate_duration_seconds",
            "Time of one call of one plugin",
            ["type", "verb", "outcome"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._delegates = functools.cache(delegates.labels)
        in_flight = Gauge("multus_cni_requests_in_flight", "CNI requests being worked on", ["verb"], registry=registry)
        self._in_flight = functools.cache(in_flight.labels)
        queued = Gauge(
            "multus_cni_requests_waiting", "CNI requests that wait, by connectionLimit", ["verb"], registry=registry
        )
        self._queued = functools.cache(queued.labels)
        self._refused_peers = Counter(
            "multus_refused_peers_total", "Requests on the socket from users that may not call", registry=registry
        )
        self._unmet = Counter(
            "multus_requests_unmet_total",
            "Requests of pods (ips, mac, ...) that no plugin could take or that the result did not show",
            ["request"],
            registry=registry,
        )
        for request in REQUESTS:
            self._unmet.labels(request)
        self._checks_failed = Counter(
            "multus_check_failures_total",
            "CHECKs of plugins that failed though nothing that ADD left was missing; the pod was told that all is well",
            registry=registry,
        )
        self._collected = Counter(
            "multus_gc_attachments_total",
            "Attachments of containers that the runtime has no more: collected, left since processes run there, failed",
            ["outcome"],
            registry=registry,
        )
        for outcome in COLLECTED:
            self._collected.labels(outcome)
        self._reviews = Counter(
            "multus_webhook_reviews_total",
            "Objects that the admission webhook was asked about: allowed, warned of, refused, failed to judge",
            ["kind", "outcome"],
            registry=registry,
        )
        self.cluster = ClusterMetrics(registry)
        self.processes = ProcessMetrics(registry)
        self.deletes = DeleteMetrics(registry)
        self.primary = PrimaryMetrics(registry)
        build = Gauge("multus_build_info", "Always 1", ["version", "python"], registry=registry)
        build.labels(version, platform.python_version()).set(1)
        for verb in VERBS:
            # A series that is there from the start lets a rate be taken of the first event.
            self._in_flight(verb)
            self._queued(verb)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    def request(self, handler: str, code: int, method: str) -> None:
        """An HTTP request was answered; `handler` is its path."""
        method = method.lower()
        self._requests(
            handler if handler in HANDLERS else "NotFound",
            str(code),
            method if method in _METHODS else "unknown",
        ).inc()

    def verb(self, verb: str, outcome: str, seconds: float) -> None:
        """A verb has ended; `outcome` is one of `OUTCOMES`."""
        self._verbs(_known(verb, VERBS), _known(outcome, OUTCOMES)).observe(seconds)

    def delegate(self, plugin_type: str, verb: str, outcome: str, seconds: float) -> None:
        """One plugin was called for one verb; `outcome` is one of `DELEGATE_OUTCOMES`."""
        self._delegates(self._known_type(plugin_type), _known(verb, VERBS), _known(outcome, DELEGATE_OUTCOMES)).observe(
            seconds
        )

    def expect_reviews(self) -> None:
        """This is the webhook's: the series of all kinds and outcomes are there from now on."""
        for kind in (*REVIEWED, "other"):
            for outcome in REVIEWS:
                self._reviews.labels(kind, outcome)

    def review(self, kind: str, outcome: str) -> None:
        """The webhook has answered for an object of `kind`; `outcome` is one of `REVIEWS`."""
        self._reviews.labels(kind if kind in REVIEWED else "other", _known(outcome, REVIEWS)).inc()

    def in_flight(self, verb: str) -> contextlib.AbstractContextManager[object]:
        """The block works on `verb`."""
        return self._in_flight(_known(verb, VERBS)).track_inprogress()

    def queued(self, verb: str) -> contextlib.AbstractContextManager[object]:
        """The block waits until `verb` may begin."""
        return self._queued(_known(verb, VERBS)).track_inprogress()

    def refused_peer(self) -> None:
        """A process of another user called."""
        self._refused_peers.inc()

    def unmet_request(self, request: str) -> None:
        """A pod's request was not met; `request` is one of `REQUESTS`."""
        self._unmet.labels(_known(request, REQUESTS)).inc()

    def check_failed(self) -> None:
        """The CHECK of a plugin failed, and nothing that ADD left is missing."""
        self._checks_failed.inc()

    def collected(self, outcome: str, attachments: int) -> None:
        """A GC has come upon so many attachments that are stale; `outcome` is one of `COLLECTED`."""
        self._collected.labels(_known(outcome, COLLECTED)).inc(attachments)

    def ask_dropped_lines(self, dropped: Callable[[], Mapping[str, int]]) -> None:
        """Ask `dropped` at each scrape how many lines of the log were lost, by where they were to go.

        It is called in a thread.
        """
        self._registry.register(_DroppedLines(dropped))

    def render(self) -> tuple[bytes, str]:
        """The exposition and its Content-Type. Reads /proc: for a thread, not for the event loop."""
        return generate_latest(_WithoutCreated(self._registry)), CONTENT_TYPE_PLAIN_0_0_4

    def _known_type(self, plugin_type: str) -> str:
        """`plugin_type`, or "other" once there have been too many: they come from configurations of users."""
        cut = plugin_type[:_MAX_TYPE_LENGTH].encode("utf-8", "replace").decode()
        if cut in self._plugin_types:
            return cut
        if not cut or len(self._plugin_types) >= _MAX_PLUGIN_TYPES:
            return "other"
        self._plugin_types.add(cut)
        return cut


class ClusterMetrics:
    """Metrics of the Kubernetes adapter. The label `resource` is `pods` or `networks`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: None for an adapter whose metrics are not served."""
        self.errors = Counter(
            "multus_informer_errors_total",
            "Lists and watches that ended with an error",
            ["resource"],
            registry=registry,
        )
        self.changes = Counter(
            "multus_informer_changes_total", "Changes that a watch told of", ["resource"], registry=registry
        )
        self._stale = Gauge(
            "multus_informer_stale_seconds",
            "For how long what is known may be outdated; 0 while it is watched, +Inf before the first answer",
            ["resource"],
            registry=registry,
        )
        self._registry = registry
        self.statuses_put = Counter(
            "multus_network_status_put_total",
            "network-status annotations written by PUT, since PATCH is forbidden",
            registry=registry,
        )
        self.statuses_dropped = Counter(
            "multus_network_status_dropped_total", "network-status annotations given up", registry=registry
        )
        self.events_dropped = Counter("multus_events_dropped_total", "Messages that are in no Event", registry=registry)

    def ask_staleness(self, resource: str, seconds: Callable[[], float]) -> None:
        """Ask `seconds` at each scrape how long ago changes were last heard of; it is called in a thread."""
        self._stale.labels(resource).set_function(seconds)

    def ask_certificate(self, expires: Callable[[], float | None]) -> None:
        """Ask `expires` at each scrape when the node's own certificate ends: Unix time, None where there is none.

        It is called in a thread.
        """
        if self._registry:
            self._registry.register(_CertificateExpiry(expires))


class ProcessMetrics:
    """Metrics of plugin processes and the wait for them, by CNI_COMMAND."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: None where the metrics are not served."""
        self.allowed = Gauge(
            "multus_delegate_processes_limit", "Plugin processes that may run at once", registry=registry
        )
        self.running = Gauge(
            "multus_delegate_processes_running", "Plugin processes that run", ["verb"], registry=registry
        )
        self.waiting = Gauge(
            "multus_delegate_processes_waiting", "Calls of plugins that wait to be run", ["verb"], registry=registry
        )
        self.waits = Histogram(
            "multus_delegate_wait_seconds",
            "Time that a call of a plugin waited until it was run, or was given up",
            ["verb"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self.given_up = Counter(
            "multus_delegate_waits_given_up_total",
            "Calls of plugins that failed since the node was busy",
            ["verb"],
            registry=registry,
        )
        for verb in VERBS:
            for metric in (self.running, self.waiting, self.given_up):
                metric.labels(verb)


class DeleteMetrics:
    """Metrics of DELs that were late, and of what is left of containers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: None where the metrics are not served."""
        self.spooled = Gauge(
            "multus_spool_entries", "DELs that wait in the spool, 10000 at most are counted", registry=registry
        )
        self.replays = Counter(
            "multus_spool_replays_total",
            "Spooled DELs: served, failed and tried again, rejected since they can't be served",
            ["outcome"],
            registry=registry,
        )
        self.given_up = Counter(
            "multus_deletes_given_up_total",
            "Containers whose DEL was answered as done though it failed (deleteTries)",
            registry=registry,
        )
        self.never_attached = Counter(
            "multus_networks_never_attached_total",
            "Networks whose failed DEL counts as done, as their ADD was refused and nothing of them is there",
            registry=registry,
        )
        self.set_aside = Counter(
            "multus_containers_set_aside_total",
            "Containers of which networks could not be detached for a day",
            registry=registry,
        )
        self.replaced_namespaces = Counter(
            "multus_replaced_namespaces_total",
            "Containers detached whose network namespace was not at its path any more, but something else",
            registry=registry,
        )
        self.orphans = Counter(
            "multus_orphan_attachments_total", "Attachments of orphans: deleted, failed", ["outcome"], registry=registry
        )
        self.leftovers = Gauge(
            "multus_leftover_containers",
            "Containers left after the last comparison with what lives: orphans, inhabited, unreadable, aside",
            ["kind"],
            registry=registry,
        )
        self.lacking = Gauge(
            "multus_pods_lacking_networks", "Pods that run without networks that they asked for", registry=registry
        )
        for outcome in REPLAYS:
            self.replays.labels(outcome)
        for outcome in ORPHANS:
            self.orphans.labels(outcome)


class PrimaryMetrics:
    """Metrics of the node's CNI configuration."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: None where the metrics are not served."""
        self.generated = Counter(
            "multus_cni_config_generated_total", "CNI configurations written with a new content", registry=registry
        )
        self.restored = Counter(
            "multus_cni_config_restored_total",
            "CNI configurations put back after another program changed them",
            registry=registry,
        )
        self.problems = Counter(
            "multus_primary_problems_total",
            "Problems with the primary network's configuration that came up",
            registry=registry,
        )


class _CertificateExpiry(Collector):
    """One gauge, and no sample where there is no certificate: 0 would be one that has long expired."""

    def __init__(self, expires: Callable[[], float | None]) -> None:
        self._expires = expires

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "multus_client_certificate_expiration_timestamp_seconds",
            "When the client certificate of this node's own (perNodeCertificate) ends, Unix time",
        )
        if (moment := self._expires()) is not None:
            family.add_metric([], moment)
        yield family


class _DroppedLines(Collector):
    """One counter, which the log keeps by itself: it lies beside the metrics, not on them."""

    def __init__(self, dropped: Callable[[], Mapping[str, int]]) -> None:
        self._dropped = dropped

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "multus_log_lines_dropped",
            "Lines of the log that could not be written: nobody reads, or the disk takes none",
            labels=["to"],
        )
        for way, lines in self._dropped().items():
            family.add_metric([way], lines)
        yield family


def _known(value: str, known: frozenset[str]) -> str:
    return value if value in known else "other"


class _WithoutCreated(Collector):
    """A registry less the `…_created` series, which double what is scraped and which upstream does not have."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
