"""Read metrics, as a scrape does."""

from __future__ import annotations

from prometheus_client.metrics import MetricWrapperBase


def counted(metric: MetricWrapperBase, **labels: str) -> float:
    """Return the value of the series with these labels; 0 if there is none."""
    (family,) = metric.collect()
    values = [item.value for item in family.samples if item.labels == labels and not item.name.endswith("_created")]
    return values[0] if values else 0.0
