"""The library's metrics by their declarations: label values are bounded, and series are cached."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Final, Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from multus_daemon.metrics.kinds import Declared, Label

OTHER: Final = "other"
_NAME_MAX: Final = 128
"""Maximum characters of a label's value that comes from outside."""

Labels = tuple[str, ...]
"""The values of a family's labels, in the order of their declaration."""

S = TypeVar("S", Counter, Gauge, Histogram)

# The series `…_created` double a scrape, and upstream has none.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Names:
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

    def __init__(self, declared: Declared, metric: S, names: Mapping[str, Names]) -> None:
        """`names`: the values of the labels that come from outside, by label."""
        self.declared = declared
        self._metric: S = metric
        self._names = names
        # A look-up by the library takes 3 us, and a request makes a dozen.
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

    def collect(self) -> Metric | None:
        """Return the samples; None before there is a series."""
        if not self._series:
            return None
        [metric] = self._metric.collect()
        if self.declared.only_successes:
            metric.samples = [
                sample
                for sample in metric.samples
                if sample.labels["outcome"] == "success" or sample.labels.get("le", "+Inf") == "+Inf"
            ]
        return metric

    def collected(self, answer: Mapping[Labels, float]) -> Metric:
        """Return samples with these values, which are not kept."""
        kind = CounterMetricFamily if self.declared.kind == "counter" else GaugeMetricFamily
        metric = kind(self.declared.name, self.declared.help, labels=self.declared.label_names)
        for values, value in answer.items():
            metric.add_metric(values, value)
        return metric

    def _shown(self, label: Label, value: str) -> str:
        if label.most:
            return self._names[label.name].known(value)
        return value if not label.values or value in label.values else OTHER


class Registry:
    """All families, by name. It is not the library's global registry."""

    def __init__(self, declared: Sequence[Declared]) -> None:
        names = {label.name: Names(label.most) for item in declared for label in item.labels if label.most}
        self.counters: dict[str, Family[Counter]] = {}
        self.gauges: dict[str, Family[Gauge]] = {}
        self.histograms: dict[str, Family[Histogram]] = {}
        self.order = [item.name for item in declared]
        for item in declared:
            what = item.name, item.help, item.label_names
            if item.kind == "histogram":
                histogram = Histogram(*what, buckets=item.buckets, registry=None)
                self.histograms[item.name] = Family(item, histogram, names)
            elif item.kind == "counter":
                self.counters[item.name] = Family(item, Counter(*what, registry=None), names)
            else:
                self.gauges[item.name] = Family(item, Gauge(*what, registry=None), names)

    def __getitem__(self, name: str) -> Family[Counter] | Family[Gauge] | Family[Histogram]:
        """Raises KeyError."""
        return self.counters.get(name) or self.gauges.get(name) or self.histograms[name]

    def collect(self, answers: Mapping[str, Mapping[Labels, float]]) -> Iterator[Metric]:
        """Yield each family that has samples, in the order of the declarations; those in `answers` with these."""
        for name in self.order:
            if answer := answers.get(name):
                yield self[name].collected(answer)
            elif metric := self[name].collect():
                yield metric
