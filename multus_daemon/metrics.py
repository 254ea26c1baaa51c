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
        """What the Kubernetes adapter counts."""
        self.processes = ProcessMetrics(registry)
        """What is counted about plugin processes."""
        self.deletes = DeleteMetrics(registry)
        """What is counted about DELs that were late, and about orphans."""
        self.primary = PrimaryMetrics(registry)
        """What is counted about the node's CNI configuration."""
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
    """What is counted about the API server, the `Observer` of the Kubernetes adapter. `resource`: pods, networks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._lists = counter("multus_informer_lists_total", "Complete lists from the API server", "resource")
        self._errors = counter("multus_informer_errors_total", "Lists and watches that ended with an error", "resource")
        self._changes = counter("multus_informer_changes_total", "Changes that a watch told of", "resource")
        self._malformed = counter("multus_informer_malformed_total", "Objects that were passed over", "resource")
        self._objects = Gauge(
            "multus_informer_objects", "Objects at the last complete list", ["resource"], registry=registry
        )
        self._stale = Gauge(
            "multus_informer_stale_seconds",
            "For how long what is known may be outdated; 0 while it is watched, +Inf before the first answer",
            ["resource"],
            registry=registry,
        )
        self._registry = registry
        self._written = counter("multus_network_status_written_total", "network-status annotations written")
        self._put = counter(
            "multus_network_status_put_total", "network-status annotations written by PUT, since PATCH is forbidden"
        )
        self._retried = counter("multus_network_status_retried_total", "network-status annotations put off")
        self._dropped = counter("multus_network_status_dropped_total", "network-status annotations given up")
        self._pending = Gauge(
            "multus_network_status_pending", "network-status annotations that wait to be written", registry=registry
        )
        self._events = counter("multus_events_written_total", "Events made or counted up")
        self._lost_events = counter("multus_events_dropped_total", "Messages that are in no Event")

    def ask_staleness(self, resource: str, seconds: Callable[[], float]) -> None:
        """Ask `seconds` at each scrape how long ago changes were last heard of; it is called in a thread."""
        self._stale.labels(resource).set_function(seconds)

    def ask_certificate(self, expires: Callable[[], float | None]) -> None:
        """Ask `expires` at each scrape when the node's own certificate ends: Unix time, None where there is none.

        It is called in a thread.
        """
        self._registry.register(_CertificateExpiry(expires))

    def listed(self, resource: str, objects: int) -> None:
        """Everything was listed; so many objects are known."""
        self._lists.labels(resource).inc()
        self._objects.labels(resource).set(objects)

    def watch_failed(self, resource: str) -> None:
        """A list or watch ended with an error."""
        self._errors.labels(resource).inc()

    def received(self, resource: str) -> None:
        """A watch told of one change."""
        self._changes.labels(resource).inc()

    def malformed(self, resource: str) -> None:
        """An object was passed over."""
        self._malformed.labels(resource).inc()

    def status_written(self) -> None:
        """A network-status was written."""
        self._written.inc()

    def status_put(self) -> None:
        """A network-status was written by PUT."""
        self._put.inc()

    def status_retried(self) -> None:
        """A network-status was put off."""
        self._retried.inc()

    def status_dropped(self) -> None:
        """A network-status will not be written."""
        self._dropped.inc()

    def status_pending(self, number: int) -> None:
        """So many wait."""
        self._pending.set(number)

    def event_written(self) -> None:
        """One Event was made or counted up."""
        self._events.inc()

    def events_dropped(self, number: int) -> None:
        """So many messages will be in no Event."""
        self._lost_events.inc(number)


class ProcessMetrics:
    """What is counted about plugin processes and the wait for them, the `Observer` of `plugins.limit`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._allowed = Gauge(
            "multus_delegate_processes_limit", "Plugin processes that may run at once", registry=registry
        )
        self._running = Gauge(
            "multus_delegate_processes_running", "Plugin processes that run", ["verb"], registry=registry
        )
        self._waiting = Gauge(
            "multus_delegate_processes_waiting", "Calls of plugins that wait to be run", ["verb"], registry=registry
        )
        self._waits = Histogram(
            "multus_delegate_wait_seconds",
            "Time that a call of a plugin waited until it was run, or was given up",
            ["verb"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._given_up = Counter(
            "multus_delegate_waits_given_up_total",
            "Calls of plugins that failed since the node was busy",
            ["verb"],
            registry=registry,
        )
        for verb in VERBS:
            for metric in (self._running, self._waiting, self._given_up):
                metric.labels(verb)

    def allowed(self, processes: int) -> None:
        """So many may run at once."""
        self._allowed.set(processes)

    def running(self, verb: str, change: int) -> None:
        """One more, or one less, runs."""
        self._running.labels(_known(verb, VERBS)).inc(change)

    def waiting(self, verb: str, change: int) -> None:
        """One more, or one less, waits."""
        self._waiting.labels(_known(verb, VERBS)).inc(change)

    def waited(self, verb: str, seconds: float, *, in_vain: bool) -> None:
        """A wait is over."""
        self._waits.labels(_known(verb, VERBS)).observe(seconds)
        if in_vain:
            self._given_up.labels(_known(verb, VERBS)).inc()


class DeleteMetrics:
    """What is counted about DELs that were late: the `Observer` of `node.spool` and `node.reconcile`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._spooled = Gauge(
            "multus_spool_entries", "DELs that wait in the spool, 10000 at most are counted", registry=registry
        )
        self._entries = Counter(
            "multus_spool_replays_total",
            "Spooled DELs: served, failed and tried again, rejected since they can't be served",
            ["outcome"],
            registry=registry,
        )
        self._given_up = Counter(
            "multus_deletes_given_up_total",
            "Containers whose DEL was answered as done though it failed (deleteTries)",
            registry=registry,
        )
        self._never_attached = Counter(
            "multus_networks_never_attached_total",
            "Networks whose failed DEL counts as done, as their ADD was refused and nothing of them is there",
            registry=registry,
        )
        self._set_aside = Counter(
            "multus_containers_set_aside_total",
            "Containers of which networks could not be detached for a day",
            registry=registry,
        )
        self._replaced = Counter(
            "multus_replaced_namespaces_total",
            "Containers detached whose network namespace was not at its path any more, but something else",
            registry=registry,
        )
        self._orphans = Counter(
            "multus_orphan_attachments_total", "Attachments of orphans: deleted, failed", ["outcome"], registry=registry
        )
        self._left = Gauge(
            "multus_leftover_containers",
            "Containers left after the last comparison with what lives: orphans, inhabited, unreadable, aside",
            ["kind"],
            registry=registry,
        )
        self._unattached = Gauge(
            "multus_pods_lacking_networks", "Pods that run without networks that they asked for", registry=registry
        )
        for outcome in REPLAYS:
            self._entries.labels(outcome)
        for outcome in ORPHANS:
            self._orphans.labels(outcome)

    def spooled(self, number: int) -> None:
        """So many entries wait."""
        self._spooled.set(number)

    def entry(self, outcome: str) -> None:
        """An entry was replayed; `outcome` is one of `REPLAYS`."""
        self._entries.labels(_known(outcome, REPLAYS)).inc()

    def replaced_namespace(self) -> None:
        """A container was detached at the path of whose namespace is something else."""
        self._replaced.inc()

    def given_up(self) -> None:
        """A container's DEL was answered as done though it failed."""
        self._given_up.inc()

    def orphan(self, outcome: str, attachments: int) -> None:
        """Deleting an orphan with so many attachments has ended; `outcome` is one of `ORPHANS`."""
        self._orphans.labels(_known(outcome, ORPHANS)).inc(attachments)

    def never_attached(self) -> None:
        """A network left the record though its DEL failed: it was never attached."""
        self._never_attached.inc()

    def set_aside(self) -> None:
        """What was left of a container was set aside."""
        self._set_aside.inc()

    def left_over(self, orphans: int, inhabited: int, unreadable: int, aside: int) -> None:
        """So many containers are left."""
        self._left.labels("orphans").set(orphans)
        self._left.labels("inhabited").set(inhabited)
        self._left.labels("unreadable").set(unreadable)
        self._left.labels("aside").set(aside)

    def unattached(self, pods: int) -> None:
        """So many pods run without networks that they asked for."""
        self._unattached.set(pods)


class PrimaryMetrics:
    """What is counted about the node's CNI configuration, the `Observer` of `node.primary.config`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, registry=registry)

        self._generated = counter("multus_cni_config_generated_total", "CNI configurations written with a new content")
        self._restored = counter(
            "multus_cni_config_restored_total", "CNI configurations put back after another program changed them"
        )
        self._problems = counter(
            "multus_primary_problems_total", "Problems with the primary network's configuration that came up"
        )

    def generated(self) -> None:
        """The configuration was written, new or with another content."""
        self._generated.inc()

    def restored(self) -> None:
        """The configuration was put back."""
        self._restored.inc()

    def primary_problem(self) -> None:
        """A problem has come up."""
        self._problems.inc()


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
