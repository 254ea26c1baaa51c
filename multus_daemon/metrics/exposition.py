"""The text of a scrape: Prometheus' text format 0.0.4, or OpenMetrics 1.0 with exemplars.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ and the OpenMetrics specification,
https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Final

from multus_daemon.metrics.declared import Declared
from multus_daemon.metrics.series import Distribution, Exemplar, Family, Labels

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_QUALITY: Final = re.compile(r";\s*q=([0-9.]{1,5})\s*(?:;|$)")
_VERSION: Final = re.compile(r";\s*version=([^;\s]+)")
_RANGES_MAX: Final = 32
_EXEMPLAR_MAX: Final = 128
"""Maximum characters of an exemplar's labels and values, by the specification."""


def wants_openmetrics(accept: str) -> bool:
    """Report whether a client with this Accept header prefers OpenMetrics, in a version that is 1.0 or unsaid."""
    qualities: dict[str, float] = {}
    for item in accept.lower().split(",")[:_RANGES_MAX]:
        kind = item.partition(";")[0].strip()
        version = _VERSION.search(item)
        if kind == "application/openmetrics-text" and version and version[1] not in ("1.0.0", "0.0.1"):
            continue
        try:
            quality = float(found[1]) if (found := _QUALITY.search(item)) else 1.0
        except ValueError:
            continue
        qualities[kind] = max(quality, qualities.get(kind, 0.0))
    asked = qualities.get("application/openmetrics-text", 0.0)
    return asked > 0 and asked >= qualities.get("text/plain", 0.0)


def numbers(declared: Declared, found: Iterable[tuple[Labels, float]], *, openmetrics: bool) -> Iterator[str]:
    """Yield the lines of a counter or gauge."""
    name, labels = declared.name, declared.label_names
    yield _head(declared, openmetrics=openmetrics)
    for values, value in found:
        yield f"{name}{_braced(labels, values)} {_number(value)}\n"


def distributions(family: Family[Distribution], *, openmetrics: bool) -> Iterator[str]:
    """Yield the lines of a histogram."""
    declared = family.declared
    name, labels = declared.name, declared.label_names
    yield _head(declared, openmetrics=openmetrics)
    bounds = [*map(_number, declared.buckets)]
    for values, series in tuple(family.series.items()):
        text = _braced(labels, values)
        inner = f"{text[1:-1]}," if text else ""
        exemplars = series.exemplars if openmetrics else {}
        *lower, total = accumulate(tuple(series.counts))
        if declared.only_successes and "success" not in values:
            lower = []
        for bucket, count in enumerate(lower):
            end = _exemplar(exemplars[bucket]) if bucket in exemplars else ""
            yield f'{name}_bucket{{{inner}le="{bounds[bucket]}"}} {count}.0{end}\n'
        end = _exemplar(exemplars[len(lower)]) if len(lower) in exemplars else ""
        yield f'{name}_bucket{{{inner}le="+Inf"}} {total}.0{end}\n'
        yield f"{name}_count{text} {total}.0\n{name}_sum{text} {_number(series.sum)}\n"


def _head(declared: Declared, *, openmetrics: bool) -> str:
    name = declared.name
    if openmetrics and declared.kind == "counter":
        name = name.removesuffix("_total")
    text = declared.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {declared.kind}\n"


# Remembered: a text takes 2 us, and every scrape has the same ones.
@lru_cache(maxsize=2048)
def _braced(labels: tuple[str, ...], values: Labels) -> str:
    """Return the labels with these values, sorted, in braces; empty without labels."""
    pairs = sorted(zip(labels, values, strict=True))
    return f"{{{','.join(f'{name}={_quoted(value)}' for name, value in pairs)}}}" if pairs else ""


def _quoted(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'"{escaped}"'


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"


def _exemplar(exemplar: Exemplar) -> str:
    labels, value, moment = exemplar
    if sum(len(name) + len(text) for name, text in labels.items()) > _EXEMPLAR_MAX:
        return ""
    text = ",".join(f"{name}={_quoted(value)}" for name, value in labels.items())
    return f" # {{{text}}} {_number(value)} {moment:.3f}"
