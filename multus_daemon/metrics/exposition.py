"""The text of a scrape: Prometheus' text format 0.0.4, or OpenMetrics 1.0 with exemplars.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

from multus_daemon.metrics.library import choose_encoder

OPENMETRICS: Final = "application/openmetrics-text"
"""The media type of OpenMetrics."""


def wants_openmetrics(accept: str) -> bool:
    """Report whether a client with this Accept header gets OpenMetrics."""
    try:
        return choose_encoder(accept)[1].startswith(OPENMETRICS)
    except (TypeError, ValueError):
        # A version that is no number.
        return False


# What is asked for at a scrape has the same labels at the next one.
@lru_cache(maxsize=512)
def braced(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return the labels in braces, sorted by name; empty without labels."""
    labels = sorted(zip(names, values, strict=True))
    return f"{{{','.join(f'{name}={_quoted(value)}' for name, value in labels)}}}" if labels else ""


def _quoted(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'"{escaped}"'


def number(value: float) -> str:
    """Return the text of a value."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
