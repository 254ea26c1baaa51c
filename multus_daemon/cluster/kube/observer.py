"""What this package counts, told to whoever keeps the metrics. No method may block or raise."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """`resource` is `pods` or `networks`."""

    def listed(self, resource: str, objects: int) -> None:
        """Everything was listed, at the start or again; so many objects are known."""
        ...

    def watch_failed(self, resource: str) -> None:
        """A list or watch ended with an error."""
        ...

    def received(self, resource: str) -> None:
        """A watch told of one change."""
        ...

    def malformed(self, resource: str) -> None:
        """An object was passed over, because it is not as the API defines it."""
        ...

    def status_written(self) -> None:
        """A network-status was written."""
        ...

    def status_put(self) -> None:
        """A network-status was written by GET and PUT, since PATCH is forbidden."""
        ...

    def status_retried(self) -> None:
        """A network-status was put off, to be written later."""
        ...

    def status_dropped(self) -> None:
        """A network-status will not be written: its pod has gone, it was refused for good, or too many wait."""
        ...

    def status_pending(self, number: int) -> None:
        """So many network-statuses wait to be written."""
        ...

    def event_written(self) -> None:
        """One Event object was made or counted up."""
        ...

    def events_dropped(self, number: int) -> None:
        """So many messages will be in no Event."""
        ...


class NullObserver:
    """Counts nothing."""

    def listed(self, resource: str, objects: int) -> None:
        """See `Observer`."""

    def watch_failed(self, resource: str) -> None:
        """See `Observer`."""

    def received(self, resource: str) -> None:
        """See `Observer`."""

    def malformed(self, resource: str) -> None:
        """See `Observer`."""

    def status_written(self) -> None:
        """See `Observer`."""

    def status_put(self) -> None:
        """See `Observer`."""

    def status_retried(self) -> None:
        """See `Observer`."""

    def status_dropped(self) -> None:
        """See `Observer`."""

    def status_pending(self, number: int) -> None:
        """See `Observer`."""

    def event_written(self) -> None:
        """See `Observer`."""

    def events_dropped(self, number: int) -> None:
        """See `Observer`."""
