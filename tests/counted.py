"""Read metrics without a scrape."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from multus_daemon.metrics import Metrics
from multus_daemon.metrics.registry import Family


def counted(metric: Family[Counter] | Family[Gauge] | Counter | Gauge, **labels: str) -> float:
    """Return the value of the series with these labels; 0 if there is none."""
    families = metric.collect({}) if isinstance(metric, Family) else metric.collect()
    return next((item.value for family in families for item in family.samples if item.labels == labels), 0.0)


def value_of(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the sample `name` with these labels, of a histogram its `_count` or `_sum`; None if there is none."""
    families = metrics.registry.families
    family = families.get(name) or families[name.rpartition("_")[0]]
    samples = (item for metric in family.collect({}) for item in metric.samples)
    return next((item.value for item in samples if (item.name, item.labels) == (name, labels)), None)
