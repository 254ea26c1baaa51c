"""The series of metrics. Their values are plain numbers, which take a tenth of the memory of prometheus_client's.

A lock of the family guards them: an addition is not atomic in Python.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import Final, Generic, TypeVar

from multus_daemon.metrics.exposition import braced, number
from multus_daemon.metrics.kinds import Declared, Label

OTHER: Final = "other"
_NAME_MAX: Final = 128
"""Maximum characters of a label's value that comes from outside."""

Labels = tuple[str, ...]
"""The values of a family's labels, in the order of their declaration."""


class Number:
    """The value of a counter or a gauge. As a context manager, it counts the block. Thread-safe."""

    __slots__ = ("_lock", "value")

    def __init__(self, _declared: Declared, _values: Labels, lock: threading.Lock) -> None:
        self.value = 0.0
        self._lock = lock

    def inc(self, amount: float = 1) -> None:
        """Add to the value."""
        with self._lock:
            self.value += amount

    def set(self, value: float) -> None:
        """Replace the value."""
        with self._lock:
            self.value = value

    def __enter__(self) -> None:
        self.inc()

    def __exit__(self, *_: object) -> None:
        self.inc(-1)

    def text(self, name: str, labels: str, *, openmetrics: bool) -> str:
        """Return its line of a scrape; `labels`: their text."""
        return f"{name}{labels} {number(self.value)}\n"


class Histogram:
    """Observations by upper bound, and their sum. Thread-safe."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_lock", "_sum", "_written")

    def __init__(self, declared: Declared, values: Labels, lock: threading.Lock) -> None:
        shown = {label.name: value for label, value in zip(declared.labels, values, strict=True)}
        self._bounds = declared.buckets if not declared.only_successes or shown["outcome"] == "success" else ()
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, tuple[Mapping[str, str], float, float]] | None = None
        self._lock = lock
        self._written: tuple[list[int], bool, str] | None = None
        """The text of the last scrape, and what it is of: most series have not changed at the next one."""

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Count a value; `exemplar`: labels that name it, of at most 128 characters."""
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value
            if exemplar:
                self._exemplars = self._exemplars or {}
                self._exemplars[place] = exemplar, value, time.time()

    def text(self, name: str, labels: str, *, openmetrics: bool) -> str:
        """Return its lines of a scrape; `labels`: their text."""
        with self._lock:
            counts, total, exemplars = self._counts.copy(), self._sum, dict(self._exemplars or {})
        if self._written and self._written[:2] == (counts, openmetrics):
            return self._written[2]
        # The library sorts labels, and ours come after `le`.
        opening, closing = f'{name}_bucket{{le="', f'",{labels[1:]}' if labels else '"}'
        lines: list[str] = []
        for place, (bound, count) in enumerate(zip(_texts(self._bounds), accumulate(counts), strict=True)):
            end = ""
            if openmetrics and place in exemplars:
                named, value, moment = exemplars[place]
                end = f" # {braced(tuple(named), tuple(named.values()))} {number(value)} {moment}"
            lines.append(f"{opening}{bound}{closing} {count}.0{end}\n")
        text = f"{''.join(lines)}{name}_count{labels} {sum(counts)}.0\n{name}_sum{labels} {number(total)}\n"
        self._written = counts, openmetrics, text
        return text


@lru_cache
def _texts(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(number, bounds), "+Inf")


S = TypeVar("S", Number, Histogram)


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
        self._texts: dict[Labels, str] = {}
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

    def texts(self, answer: Mapping[str, float], *, openmetrics: bool) -> list[str]:
        """Return the text of a scrape: of the values in `answer` by labels, else of the series; nothing without any."""
        name = self.declared.name
        shown: list[str] = [f"{name}{labels} {number(value)}\n" for labels, value in answer.items()]
        for values, item in () if shown else tuple(self._series.items()):
            # Written with the first scrape, not by the request that makes the series.
            if (labels := self._texts.get(values)) is None:
                labels = self._texts[values] = braced(self.declared.label_names, values)
            shown.append(item.text(name, labels, openmetrics=openmetrics))
        base = name.removesuffix("_total") if openmetrics else name
        return shown and [f"# HELP {base} {self.declared.help}\n# TYPE {base} {self.declared.kind}\n", *shown]

    def _shown(self, label: Label, value: str) -> str:
        if label.most:
            return self._names[label.name].known(value)
        return value if value in label.values else OTHER


class Registry:
    """All families, by name."""

    def __init__(self, declared: Sequence[Declared]) -> None:
        names = {label.name: Names(label.most) for item in declared for label in item.labels if label.most}
        self.numbers = {item.name: Family(item, Number, names) for item in declared if item.kind != "histogram"}
        self.histograms = {item.name: Family(item, Histogram, names) for item in declared if item.kind == "histogram"}
        families = self.numbers | self.histograms
        self.families = {item.name: families[item.name] for item in declared}
