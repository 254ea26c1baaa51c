"""Show the state of this node's daemon (`of`) and its last requests (`trace`): docs/multusctl.md has the formats."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from multus_daemon.runtime.timeline import Timeline, Timelines

ERRORS_MAX: Final = 10


@dataclass(frozen=True, slots=True)
class Parts:
    """The state of the daemon. `of` puts the mappings into its answer unchanged."""

    version: str
    started: float
    gates: Mapping[str, str]
    primary: Mapping[str, Any]
    cluster: Mapping[str, Any]
    requests: Mapping[str, int]
    processes: Mapping[str, int]
    leftovers: int
    broken: int = 0
    """Number of attachments that differ from their record, as last compared."""
    differences: Sequence[Mapping[str, str]] = ()
    """The differences of these attachments, or the first of many."""
    source: str = "daemon"
    degraded: Mapping[str, str] = field(default_factory=dict)


def of(parts: Parts, timelines: Iterable[Timeline], *, containers: int, spooled: int) -> dict[str, Any]:
    """Build the answer of `multusctl status`."""
    return {
        "schema": "multusctl.status/v1",
        "source": parts.source,
        "version": parts.version,
        "startedAt": parts.started,
        "ready": parts.source == "daemon" and not parts.gates,
        "gates": dict(parts.gates),
        "degraded": dict(parts.degraded),
        "primary": dict(parts.primary),
        "cluster": dict(parts.cluster),
        "behind": {item["resource"]: text for item in parts.cluster["informers"] if (text := _behind(item))},
        "requests": dict(parts.requests),
        "processes": dict(parts.processes),
        "spooled": spooled,
        "containers": containers,
        "leftovers": parts.leftovers,
        "broken": parts.broken,
        "differences": [dict(item) for item in parts.differences],
        "errors": errors(timelines),
    }


def _behind(informer: Mapping[str, Any]) -> str:
    """Return why, and for how long, the daemon's copy of a resource does not follow the cluster; empty if it does."""
    seconds = informer["staleSeconds"]
    since = "never listed" if seconds is None else f"not in sync for {seconds:g} s" if seconds else ""
    return ": ".join(filter(None, (since, informer["problem"])))


def entries_in(spool: Path) -> int:
    """Count the DELs in the shim's spool; files that the shim still writes are hidden."""
    try:
        with os.scandir(spool) as entries:
            return sum(entry.is_file() and not entry.name.startswith(".") for entry in entries)
    except OSError:
        return 0


def errors(timelines: Iterable[Timeline]) -> list[dict[str, Any]]:
    """Group the errors of the last requests by cause, the most frequent first."""
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for item in timelines:
        if item.error is None:
            continue
        code, cause = item.error[0], cause_of(item.error[1])
        verb = item.subject.get("verb", "")
        entry = found.setdefault((verb, code, cause), {"verb": verb, "code": code, "cause": cause, "count": 0})
        entry["count"] += 1
        entry["last"] = round(item.began, 3)
        entry["pod"] = item.subject.get("pod", "")
    return sorted(found.values(), key=lambda entry: (-entry["count"], -entry["last"]))[:ERRORS_MAX]


def cause_of(text: str) -> str:
    """Return an error's text without its context in brackets and its details behind a semicolon (`cni.errors`)."""
    return text.partition(" (pod ")[0].partition("; ")[0]


def trace(timelines: Timelines, pod: str, last: int) -> dict[str, Any]:
    """Return the `last` requests for `pod` (`namespace/name`; empty: all pods), the oldest first.

    Some requests, like those of a hot-plug, have no pod; they are found by their container.
    """
    kept = list(timelines)
    containers = {item.subject.get("container") for item in kept if item.subject.get("pod") == pod}
    chosen = [item for item in kept if not pod or item.subject.get("container") in containers]
    return {"schema": "multusctl.trace/v1", "pod": pod, "requests": [_request(item) for item in chosen[-last:]]}


def _request(item: Timeline) -> dict[str, Any]:
    names = {key: item.subject.get(key, "") for key in ("verb", "pod", "container", "ifname", "network")}
    error = None if item.error is None else {"code": item.error[0], "text": item.error[1]}
    steps = [{"what": what, "at": round(at, 6), "seconds": round(took, 6)} for what, at, took in tuple(item.steps)]
    return {
        "request": item.id,
        "traceId": item.trace_id,
        **names,
        "began": round(item.began, 3),
        "seconds": None if item.ended is None else round(item.ended, 6),
        "error": error,
        "stepsNotKept": item.dropped,
        "steps": steps,
    }
