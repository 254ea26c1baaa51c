"""The values of metrics: families, and the series of each by its label values."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final, Generic, TypeVar

from multus_daemon.metrics.declared import Declared, Label

OTHER: Final = "other"
_NAME_MAX: Final = 128
"""Maximum characters of a label's value that comes from outside."""

Labels = tuple[str, ...]
"""The values of a family's labels, in the order of their declaration."""


class Number:
    """The series of a counter or a gauge."""

    __slots__ = ("_lock", "value")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        with self._lock:
            self.value += amount

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        self.value = float(value)

    @contextlib.contextmanager
    def track_inprogress(self) -> Iterator[None]:
        """Count the block as long as it runs."""
        self.inc()
        try:
            yield
        finally:
            self.inc(-1.0)


Exemplar = tuple[Mapping[str, str], float, float]
"""Its labels, the value that was observed, and the Unix time in seconds."""


class Distribution:
    """The series of a histogram. Their number of observations is the sum of `counts`, so a rendering needs no lock."""

    __slots__ = ("_bounds", "_lock", "counts", "exemplars", "sum")

    def __init__(self, lock: threading.Lock, bounds: Sequence[float]) -> None:
        self._lock = lock
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations by bucket, not cumulative; the last one is without an upper bound."""
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """The last one of each bucket."""

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Add an observation; `exemplar`: labels of an example of it, such as the request's id."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self.counts[bucket] += 1
            self.sum += value
        if exemplar:
            self.exemplars[bucket] = exemplar, value, time.time()


S = TypeVar("S", Number, Distribution)


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

    def __init__(self, declared: Declared, make: Callable[[], S], names: Mapping[str, Names]) -> None:
        """`names`: the values of the labels that come from outside, by label."""
        self.declared = declared
        self._make: Callable[[], S] = make
        self._names = names
        self._lock = threading.Lock()
        self.series: dict[Labels, S] = {}
        """The series by label values. It only grows."""
        if declared.from_start:
            for values in product(*(sorted(label.values) for label in declared.labels)):
                self.labels(*values)

    def labels(self, *values: str) -> S:
        """Return the series with these values of the labels; unknown ones are `OTHER`."""
        series = self.series.get(values)
        if series is None:
            known = self.bounded(values)
            # Under `values` only if they are known: what comes from outside must not fill the dictionary.
            with self._lock:
                series = self.series.get(known)
                if series is None:
                    series = self.series[known] = self._make()
        return series

    def bounded(self, values: Labels) -> Labels:
        """Return the values as they are shown."""
        return tuple(self._shown(label, value) for label, value in zip(self.declared.labels, values, strict=True))

    def _shown(self, label: Label, value: str) -> str:
        if label.most:
            return self._names[label.name].known(value)
        return value if not label.values or value in label.values else OTHER


class Registry:
    """All families, by name."""

    def __init__(self, declared: Sequence[Declared]) -> None:
        names = {label.name: Names(label.most) for item in declared for label in item.labels if label.most}
        self.numbers: dict[str, Family[Number]] = {}
        """Counters and gauges."""
        self.distributions: dict[str, Family[Distribution]] = {}
        """Histograms."""
        self.order = [item.name for item in declared]
        for item in declared:
            lock = threading.Lock()
            if item.kind == "histogram":
                self.distributions[item.name] = Family(item, _distributions(lock, item.buckets), names)
            else:
                self.numbers[item.name] = Family(item, _numbers(lock), names)


def _numbers(lock: threading.Lock) -> Callable[[], Number]:
    return lambda: Number(lock)


def _distributions(lock: threading.Lock, bounds: Sequence[float]) -> Callable[[], Distribution]:
    return lambda: Distribution(lock, bounds)
