"""Metrics of prometheus_client, made from their declarations, and values that are measured at a scrape.

The number of values of a label is bounded: an unknown value, or one too many, is shown as `other`.
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
"""A function that measures several metrics at once: it returns a value for each metric, by label values."""
S = TypeVar("S", Counter, Gauge, Histogram)

OTHER: Final = "other"
_NAME_MAX: Final = 128
"""Maximum characters of a label's value that comes from outside."""

_SAMPLES_AT_ONCE: Final = 100
"""Number of samples that a scrape writes between two pauses, in which requests get the interpreter: about 0.5 ms."""
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
    """Number of values from outside that become known, the first ones. Metrics share them by the label's name."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric."""

    name: str
    """The name of a counter ends with `_total`."""
    help: str
    question: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without +Inf."""
    only_successes: bool = False
    """Show `buckets` with the outcome `success` only. To save series, other outcomes have +Inf, `_count` and `_sum`."""
    from_start: bool = True
    """Show the series of all known label values from the start, so that a rate includes the first event. Not for a
    histogram. False for metrics that are measured at a scrape, or have too many series.
    """

    @property
    def kind(self) -> Kind:
        """The type of the metric in the format of Prometheus."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, in their order."""
        return tuple(label.name for label in self.labels)


class _Names:
    """The first values of a label that come from outside; the others are `OTHER`. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def known(self, name: str) -> str:
        """Return `name`, cut to the maximum length; `OTHER` if too many names are known."""
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
        """`names`: for each label with values from outside, the values that are known."""
        self.declared = declared
        self._metric: S = metric
        self._names = names
        # The library's look-up takes 3 us, and a request makes a dozen.
        self._series: dict[Labels, S] = {}
        if declared.from_start and not declared.buckets and all(label.values for label in declared.labels):
            for values in product(*(sorted(label.values) for label in declared.labels)):
                self.labels(*values)

    def labels(self, *values: str) -> S:
        """Return the series with these values of the labels; an unknown value becomes `OTHER`."""
        series = self._series.get(values)
        if series is None:
            known = self.bounded(values)
            # Under `values` only if they are known: what comes from outside must not fill the dictionary.
            series = self._series[known] = self._metric.labels(*known) if known else self._metric
        return series

    def bounded(self, values: Labels) -> Labels:
        """Return the label values as they are shown: an unknown value becomes `OTHER`."""
        return tuple(self._shown(label, value) for label, value in zip(self.declared.labels, values, strict=True))

    def _shown(self, label: Label, value: str) -> str:
        if label.most:
            return self._names[label.name].known(value)
        return value if value in label.values else OTHER

    def collect(self, measured: Mapping[Labels, float]) -> Iterator[Metric]:
        """Yield the metric with the `measured` values, else with those of its series; nothing if it has none."""
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

    def __init__(self, declared: Sequence[Declared], of_process: Sequence[Declared]) -> None:
        """`of_process`: the metrics of the process that a scrape shows."""
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
        self._of_process = {item.name.removesuffix("_total") for item in of_process}
        self._measured: list[tuple[Sequence[str], Measured]] = []
        self._problems: dict[str, str] = {}

    def measure(self, names: Sequence[str], work: Measured) -> None:
        """Call `work` at each scrape for the values of the metrics called `names`, in their order.

        `work` must return within milliseconds. Where several label values are shown as `other`, their values are added
        up; of ratios, the largest is shown. Raises KeyError for an unknown name.
        """
        self._measured.append(([self.families[name].declared.name for name in names], work))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that have values, in the order of their declaration."""
        values: dict[str, dict[Labels, float]] = {}
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
        yield from (metric for metric in self._process.collect() if metric.name in self._of_process)

    def _found(self, name: str, work: Measured) -> Mapping[Labels, Sequence[float]]:
        """Return the result of `work`; if it fails, log that and return nothing, so that other metrics are shown."""
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
