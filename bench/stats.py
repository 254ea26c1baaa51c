"""Medians with an interval. Pure: no I/O, no clock; the random numbers of the bootstrap have a fixed seed."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 1000


@dataclass(frozen=True)
class Figure:
    """One recorded number. `low` and `high` are the bounds of the 95 % interval."""

    value: float
    unit: str
    low: float
    high: float
    n: int
    """Number of samples behind the value."""

    @classmethod
    def exact(cls, value: float, unit: str, n: int = 1) -> Figure:
        """A number without an interval, such as a count or a mean over `n` requests."""
        return cls(value, unit, value, value, n)


def median(values: Sequence[float], unit: str) -> Figure:
    """The median of the values with its bootstrap interval. Raises ValueError where there are none."""
    return _with_interval(values, unit, statistics.median)


def mean(values: Sequence[float], unit: str) -> Figure:
    """The mean of the values with its bootstrap interval. Raises ValueError where there are none."""
    return _with_interval(values, unit, statistics.fmean)


def _with_interval(values: Sequence[float], unit: str, middle: Callable[[Sequence[float]], float]) -> Figure:
    if not values:
        raise ValueError("no values")
    source = random.Random(1)
    resampled = sorted(middle(source.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = resampled[round(0.025 * (RESAMPLES - 1))], resampled[round(0.975 * (RESAMPLES - 1))]
    return Figure(middle(values), unit, low, high, len(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    """The median of the quotients of pairs: the n-th value of both was measured in the same round."""
    return median([one / other for one, other in zip(ours, theirs, strict=True)], "x")


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed, by nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
