"""The series of a metric and their values. Label values are bounded.

The series of prometheus_client take three times the memory, and it makes a `Sample` of each for a scrape. A lock of the
family guards the values: an addition is not atomic in Python.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Final, Generic, TypeVar

from multus_daemon.metrics.exposition import braced, exemplar_of, number
from multus_daemon.metrics.kinds import Declared, Label

OTHER: Final = "other"
_NAME_MAX: Final = 128
"""Maximum characters of a label's value that comes from outside."""

Labels = tuple[str, ...]
"""The values of a family's labels, in the order of their declaration."""


class Counter:
    """A value that only grows. Thread-safe."""

    __slots__ = ("_lock", "labels", "value")

    def __init__(self, declared: Declared, values: Labels, lock: threading.Lock) -> None:
        self.labels = braced(declared.label_names, values)
        self.value = 0.0
        self._lock = lock

    def inc(self, amount: float = 1) -> None:
        """Add to the value."""
        with self._lock:
            self.value += amount

    def lines(self, name: str, *, openmetrics: bool) -> Iterator[str]:
        """Yield the lines of a scrape."""
        yield f"{name}{self.labels} {number(self.value)}\n"


class Gauge(Counter):
    """A value. As a context manager, it counts the block as one. Thread-safe."""

    __slots__ = ()

    def set(self, value: float) -> None:
        """Replace the value."""
        with self._lock:
            self.value = value

    def __enter__(self) -> None:
        self.inc()

    def __exit__(self, *_: object) -> None:
        self.inc(-1)


class Histogram:
    """Numbers of observations up to each bound, and their sum. Thread-safe."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_lock", "_sum", "labels")

    def __init__(self, declared: Declared, values: Labels, lock: threading.Lock) -> None:
        self.labels = braced(declared.label_names, values)
        is_whole = not declared.only_successes or ("outcome", "success") in zip(
            declared.label_names, values, strict=True
        )
        self._bounds = declared.buckets if is_whole else ()
        # Not cumulative; the last one is of observations above all bounds.
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, tuple[Mapping[str, str], float, float]] | None = None
        self._lock = lock

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Count a value; `exemplar`: labels of at most 128 characters that name what was observed."""
        place = bisect_left(self._bounds, value)
        latest = (exemplar, value, time.time()) if exemplar else None
        with self._lock:
            self._counts[place] += 1
            self._sum += value
            if latest:
                self._exemplars = self._exemplars or {}
                self._exemplars[place] = latest

    def lines(self, name: str, *, openmetrics: bool) -> Iterator[str]:
        """Yield the lines of a scrape; only OpenMetrics has exemplars."""
        with self._lock:
            counts, total = list(self._counts), self._sum
            exemplars = dict(self._exemplars) if openmetrics and self._exemplars else {}
        # `le` is the first label: the library sorts them, and ours come after it.
        opening, closing = f'{name}_bucket{{le="', f'",{self.labels[1:]}' if self.labels else '"}'
        count = 0
        for place, bound in enumerate(_bounds_of(self._bounds)):
            count += counts[place]
            end = exemplar_of(*exemplars[place]) if place in exemplars else ""
            yield f"{opening}{bound}{closing} {count}.0{end}\n"
        yield f"{name}_count{self.labels} {count}.0\n{name}_sum{self.labels} {number(total)}\n"


@lru_cache
def _bounds_of(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(number, bounds), "+Inf")


S = TypeVar("S", Counter, Gauge, Histogram)


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

    def __init__(self, declared: Declared, kind: type[S], names: Mapping[str, Names]) -> None:
        """`names`: the values of the labels that come from outside, by label."""
        self.declared = declared
        self._kind: type[S] = kind
        self._names = names
        self._lock = threading.Lock()
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
            series = self._series.setdefault(known, self._kind(self.declared, known, self._lock))
        return series

    def bounded(self, values: Labels) -> Labels:
        """Return the values as they are shown."""
        return tuple(self._shown(label, value) for label, value in zip(self.declared.labels, values, strict=True))

    def lines(self, *, openmetrics: bool) -> list[str]:
        """Return the lines of all series."""
        name, series = self.declared.name, list(self._series.values())
        return [line for item in series for line in item.lines(name, openmetrics=openmetrics)]

    def _shown(self, label: Label, value: str) -> str:
        if label.most:
            return self._names[label.name].known(value)
        return value if not label.values or value in label.values else OTHER


class Registry:
    """All families, by name."""

    def __init__(self, declared: Sequence[Declared]) -> None:
        names = {label.name: Names(label.most) for item in declared for label in item.labels if label.most}
        self.counters = {item.name: Family(item, Counter, names) for item in declared if item.kind == "counter"}
        self.gauges = {item.name: Family(item, Gauge, names) for item in declared if item.kind == "gauge"}
        self.histograms = {item.name: Family(item, Histogram, names) for item in declared if item.kind == "histogram"}
        families = self.counters | self.gauges | self.histograms
        self.families = {item.name: families[item.name] for item in declared}
        """In the order of the declarations."""
