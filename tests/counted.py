"""Read metrics without a scrape."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from multus_daemon.metrics import Metrics
from multus_daemon.metrics.series import Family


def counted(metric: Family[Counter] | Family[Gauge] | Counter | Gauge, **labels: str) -> float:
    """Return the value of the series with these labels; 0 if there is none."""
    collected = metric.collect()
    families = [collected] if isinstance(collected, Metric) else collected or []
    return next((sample.value for family in families for sample in family.samples if sample.labels == labels), 0.0)


def value_of(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the sample `name` with these labels, of a histogram its `_count` or `_sum`; None if there is none."""
    registry = metrics.registry
    base = name if name in registry.order else name.rpartition("_")[0]
    family: Family[Counter] | Family[Gauge] | Family[Histogram] = registry[base]
    samples = collected.samples if (collected := family.collect()) else []
    return next((sample.value for sample in samples if (sample.name, sample.labels) == (name, labels)), None)
