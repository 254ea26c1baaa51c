"""The metrics of prometheus_client by their declarations, and what is measured at a scrape.

Label values are bounded: a value that is not known, or beyond the number that may become known, is shown as `other`.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

from prometheus_client import Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Labels: TypeAlias = tuple[str, ...]
"""The values of a metric's labels, in the order of their declaration."""
Measured: TypeAlias = Callable[[], Mapping[Labels, Sequence[float]]]
"""Returns values by label values, one for each metric that it measures."""
S = TypeVar("S", Counter, Gauge, Histogram)

OTHER: Final = "other"
_NAME_MAX: Final = 128
"""Maximum characters of a label's value that comes from outside."""

_SAMPLES_AT_ONCE: Final = 100
"""Number of samples between two pauses. Requests wait for a scrape in Python code: 0.5 ms, more for a large metric."""
_PAUSE_SECONDS: Final = 0.0001

log = logging.getLogger(__name__)

# The series `…_created` double a scrape, and upstream has none.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Label:
    """A label and the values that it may have; any other value is shown as `other`."""

    name: str
    values: frozenset[str] = frozenset()
    """The known values."""
    most: int = 0
    """Number of values that come from outside and become known, the first ones. All metrics share them by the label's
    name."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric."""

    name: str
    kind: Kind
    help: str
    question: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without +Inf."""
    only_successes: bool = False
    """Show these buckets with the outcome `success` only; others have +Inf, `_count` and `_sum`, to save series."""
    from_start: bool = False
    """Show the series of all known label values from the start: so a rate includes the first event."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, in their order."""
        return tuple(label.name for label in self.labels)


PROCESS: Final = (
    Declared(
        "process_cpu_seconds_total",
        "counter",
        "Total user and system CPU time spent in seconds.",
        "How much processor time does the daemon take?",
    ),
    Declared(
        "process_resident_memory_bytes",
        "gauge",
        "Resident memory size in bytes.",
        "Does the daemon come near its memory limit?",
    ),
    Declared(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
        "When did the daemon start, and does it restart?",
    ),
    Declared("process_open_fds", "gauge", "Number of open file descriptors.", "Are descriptors scarce?"),
    Declared(
        "process_max_fds",
        "gauge",
        "Maximum number of open file descriptors.",
        "How many descriptors may the daemon have?",
    ),
)
"""Metrics of the process, which the library measures."""


class _Names:
    """The first values of a label that come from outside; the others are `OTHER`. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def known(self, name: str) -> str:
        """Return `name`, cut, or `OTHER`."""
        if name in self._known:
            return name
        cut = name[:_NAME_MAX].encode("utf-8", "replace").decode()
        with self._lock:
            if not cut or (cut not in self._known and len(self._known) >= self._most):
                return OTHER
            self._known.add(cut)
        return cut


class Family(Generic[S]):
    """One metric: its declaration and its series."""

    def __init__(self, declared: Declared, metric: S, names: Mapping[str, _Names]) -> None:
        """`names`: the values of the labels that come from outside, by label."""
        self.declared = declared
        self._metric: S = metric
        self._names = names
        # The library's look-up takes 3 us, and a request makes a dozen.
        self._series: dict[Labels, S] = {}
        if declared.from_start:
            for values in product(*(sorted(label.values) for label in declared.labels)):
                self.labels(*values)

    def labels(self, *values: str) -> S:
        """Return the series with these values of the labels; unknown ones are `OTHER`."""
        series = self._series.get(values)
        if series is None:
            known = self.bounded(values)
            # Under `values` only if they are known: what comes from outside must not fill the dictionary.
            series = self._series[known] = self._metric.labels(*known) if known else self._metric
        return series

    def bounded(self, values: Labels) -> Labels:
        """Return the values as they are shown."""
        return tuple(self._shown(label, value) for label, value in zip(self.declared.labels, values, strict=True))

    def _shown(self, label: Label, value: str) -> str:
        if label.most:
            return self._names[label.name].known(value)
        return value if value in label.values else OTHER

    def collect(self, measured: Mapping[Labels, float]) -> Iterator[Metric]:
        """Yield the metric with the `measured` values, else with those of its series; nothing without any."""
        if measured:
            kind = CounterMetricFamily if self.declared.kind == "counter" else GaugeMetricFamily
            metric: Metric = kind(self.declared.name, self.declared.help, labels=self.declared.label_names)
            for values, value in measured.items():
                metric.add_metric(values, value)  # type: ignore[attr-defined]
            yield metric
        elif self._series:
            [metric] = self._metric.collect()
            if self.declared.only_successes:
                metric.samples = [
                    sample
                    for sample in metric.samples
                    if sample.labels["outcome"] == "success" or sample.labels.get("le", "+Inf") == "+Inf"
                ]
            yield metric


class Registry:
    """All metrics by name: a collector for prometheus_client's text formats. Thread-safe."""

    def __init__(self, declared: Sequence[Declared]) -> None:
        names = {label.name: _Names(label.most) for item in declared for label in item.labels if label.most}
        self.counters: dict[str, Family[Counter]] = {}
        self.gauges: dict[str, Family[Gauge]] = {}
        self.histograms: dict[str, Family[Histogram]] = {}
        for item in declared:
            what = item.name, item.help, item.label_names
            if item.kind == "counter":
                self.counters[item.name] = Family(item, Counter(*what, registry=None), names)
            elif item.kind == "gauge":
                self.gauges[item.name] = Family(item, Gauge(*what, registry=None), names)
            else:
                histogram = Histogram(*what, buckets=item.buckets, registry=None)
                self.histograms[item.name] = Family(item, histogram, names)
        families: dict[str, Family[Any]] = {**self.counters, **self.gauges, **self.histograms}
        self.families = {item.name: families[item.name] for item in declared}
        self._process = ProcessCollector(registry=None)
        self._measured: list[tuple[Sequence[str], Measured]] = []
        self._problems: dict[str, str] = {}

    def measure(self, names: Sequence[str], work: Measured) -> None:
        """Call `work` at each scrape for the values of the metrics called `names`, in their order.

        It takes milliseconds at most. Of label values that are shown as one, the values are added up, and the largest
        ratio counts. Raises KeyError for an unknown name.
        """
        self._measured.append(([self.families[name].declared.name for name in names], work))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have values, in the order of their declaration."""
        values: dict[str, dict[Labels, float]] = {
            sample.name: {(): sample.value} for metric in self._process.collect() for sample in metric.samples
        }
        for names, work in self._measured:
            for labels, numbers in self._found(names[0], work).items():
                shown = self.families[names[0]].bounded(labels)
                for name, number in zip(names, numbers, strict=True):
                    of_metric = values.setdefault(name, {})
                    merge = max if name.endswith("_ratio") else operator.add
                    of_metric[shown] = merge(of_metric.get(shown, 0.0), number)
        written = 0
        for name, family in self.families.items():
            for metric in family.collect(values.get(name, {})):
                yield metric
                written += len(metric.samples)
            if written >= _SAMPLES_AT_ONCE:
                time.sleep(_PAUSE_SECONDS)
                written = 0

    def _found(self, name: str, work: Measured) -> Mapping[Labels, Sequence[float]]:
        """Return what `work` returns; nothing if it fails: the other metrics say what is wrong."""
        try:
            found = work()
        except Exception as error:
            # Once, not with each scrape.
            problem = f"{type(error).__name__}: {error}"
            if self._problems.get(name) != problem:
                log.error("%s cannot be determined: %s", name, problem)
            self._problems[name] = problem
            return {}
        self._problems.pop(name, None)
        return found
