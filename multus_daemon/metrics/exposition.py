"""The text of a scrape: Prometheus' text format 0.0.4, or OpenMetrics 1.0 with exemplars.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

from multus_daemon.metrics.kinds import Declared

OPENMETRICS: Final = "application/openmetrics-text"
"""The media type of OpenMetrics."""
EOF: Final = "# EOF\n"
"""The end of OpenMetrics."""


def wants_openmetrics(accept: str) -> bool:
    """Report whether a client with this Accept header gets OpenMetrics."""
    try:
        return choose_encoder(accept)[1].startswith(OPENMETRICS)
    except (TypeError, ValueError):
        # A version that is no number.
        return False


def content_type(*, openmetrics: bool) -> str:
    """Return the Content-Type of the text."""
    return CONTENT_TYPE_LATEST if openmetrics else CONTENT_TYPE_PLAIN_0_0_4


def head(declared: Declared, *, openmetrics: bool) -> str:
    """Return the lines that say what the family is."""
    name = declared.name.removesuffix("_total") if openmetrics else declared.name
    text = declared.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {declared.kind}\n"


def braced(names: Sequence[str], values: Sequence[str]) -> str:
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


def exemplar_of(labels: Mapping[str, str], value: float, moment: float) -> str:
    """Return the end of a line: an observed value, its labels and its Unix time."""
    return f" # {braced(tuple(labels), tuple(labels.values()))} {number(value)} {moment}"
