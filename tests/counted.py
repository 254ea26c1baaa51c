"""Read metrics without a scrape."""

from __future__ import annotations

from multus_daemon.metrics import Metrics
from multus_daemon.metrics.series import Family, Number


def counted(metric: Family[Number] | Number, **labels: str) -> float:
    """Return the value of the series with these labels; 0 if there is none."""
    if isinstance(metric, Number):
        return metric.value
    series = metric.series.get(tuple(labels[name] for name in metric.declared.label_names))
    return series.value if series else 0.0


def value_of(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the sample `name` with these labels, of a histogram its `_count` or `_sum`; None if there is none."""
    if (family := metrics.registry.numbers.get(name)) is not None:
        number = family.series.get(tuple(labels[label] for label in family.declared.label_names))
        return number.value if number else None
    base, _, part = name.rpartition("_")
    histogram = metrics.registry.distributions[base]
    series = histogram.series.get(tuple(labels[label] for label in histogram.declared.label_names))
    if series is None:
        return None
    return series.sum if part == "sum" else float(sum(series.counts))
