"""What the daemon answers itself: the admin paths, by name (`server.admin_api`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multus_daemon.base.timeline import Timelines
from multus_daemon.diagnosis import trace
from multus_daemon.server.admin_api import Answer, Asked


class Answers:
    """The questions and orders that a running daemon takes. Each blocks and raises CniError."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        self.questions: Mapping[str, Answer] = {"trace": self._trace}
        self.orders: Mapping[str, Answer] = {}

    def _trace(self, asked: Asked) -> Mapping[str, Any]:
        return trace.of(self._timelines, asked.query.get("pod", ""), asked.number("last", 20, most=1000))
