"""Read metrics without a scrape."""

from __future__ import annotations

from typing import Any

from multus_daemon.metrics import Metrics
from multus_daemon.metrics.exposition import braced
from multus_daemon.metrics.series import Family, Number


def counted(metric: Family[Number] | Number, **labels: str) -> float:
    """Return the value of the series with these labels; 0 if there is none."""
    if isinstance(metric, Number):
        return metric.value
    return _value(metric, metric.declared.name, labels) or 0.0


def value_of(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the sample `name` with these labels, of a histogram its `_count` or `_sum`; None if there is none."""
    families = metrics.registry.families
    return _value(families.get(name) or families[name.rpartition("_")[0]], name, labels)


def _value(family: Family[Any], name: str, labels: dict[str, str]) -> float | None:
    beginning = f"{name}{braced(tuple(labels), tuple(labels.values()))} "
    lines = "".join(family.texts({}, openmetrics=False)).splitlines()
    return next((float(line.removeprefix(beginning)) for line in lines if line.startswith(beginning)), None)
