"""What a metric and its labels are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Label:
    """A label and the values that it may have; any other value is shown as `other`."""

    name: str
    values: frozenset[str] = frozenset()
    """The known values."""
    most: int = 0
    """Number of values that come from outside and become known, the first ones. All families share them by the label's
    name."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric."""

    name: str
    kind: Kind
    help: str
    question: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without +Inf."""
    only_successes: bool = False
    """Show these buckets with the outcome `success` only; others have +Inf, `_count` and `_sum`, to save series."""
    from_start: bool = False
    """Show the series of all known label values from the start: so a rate includes the first event."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, in their order."""
        return tuple(label.name for label in self.labels)


NETWORKS_MAX: Final = 100
NETWORK: Final = Label("network", most=NETWORKS_MAX)
