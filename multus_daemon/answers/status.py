"""Show the state of this node's daemon (`of`) and its last requests (`trace`): docs/multusctl.md has the formats."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from multus_daemon.runtime.timeline import Timeline, Timelines

ON_HOST: Final = "the pod is in the host's network (hostNetwork: true): the runtime does not ask Multus"
LEAVE_HOST: Final = "remove hostNetwork from the pod's template, or ask for no networks"
ERRORS_MAX: Final = 10
FAILING_SECONDS: Final = 180.0
"""A pod whose last ADD failed within this time counts as a pod that does not get its networks.

The kubelet retries after 10 to 20 s, and a call takes two minutes at most: an older failure is of a pod that is gone.
"""


@dataclass(frozen=True, slots=True)
class Parts:
    """The state of the daemon's parts. `of` copies the mappings to its answer."""

    version: str
    started: float
    gates: Mapping[str, str]
    primary: Mapping[str, Any]
    cluster: Mapping[str, Any]
    requests: Mapping[str, int]
    processes: Mapping[str, int]
    broken: int = 0
    """Number of attachments that differ from their record, as last compared."""
    differences: Sequence[Mapping[str, str]] = ()
    """The differences of these attachments, DIFFERENCES_MAX at most."""
    source: str = "daemon"
    degraded: Mapping[str, str] = field(default_factory=dict)


def of(parts: Parts, timelines: Iterable[Timeline], *, containers: int, leftovers: int, spooled: int) -> dict[str, Any]:
    """Build the answer of `multusctl status`."""
    behind = {item["resource"]: text for item in parts.cluster["informers"] if (text := _behind(item))}
    answer, because = _answer(parts, behind, timelines)
    return {
        "schema": "multusctl.status/v1",
        "podsGetNetworks": answer,
        "because": because,
        **{field.name: getattr(parts, field.name) for field in fields(parts) if field.name != "started"},
        "startedAt": parts.started,
        "ready": parts.source == "daemon" and not parts.gates,
        "behind": behind,
        "spooled": spooled,
        "containers": containers,
        "leftovers": leftovers,
        "errors": errors(timelines),
    }


def _answer(parts: Parts, behind: Mapping[str, str], timelines: Iterable[Timeline]) -> tuple[str, str]:
    """Answer whether pods of this node get their networks now: `yes`, `no` or `in part`, and why not."""
    if parts.gates:
        return "no", next(iter(parts.gates.values()))
    last = {item.subject.get("pod"): item for item in timelines if item.subject.get("verb") == "ADD"}
    recent = time.time() - FAILING_SECONDS
    failing = [item.error[1] for item in last.values() if item.error and item.began + (item.ended or 0.0) > recent]
    reasons = [*parts.degraded.values(), *(f"{resource}: {text}" for resource, text in behind.items())]
    reasons += [f"the last ADD of {len(failing)} pods failed: {cause_of(failing[-1])}"] if failing else []
    return ("in part", "; ".join(reasons[:1])) if reasons else ("yes", "")


def _behind(informer: Mapping[str, Any]) -> str:
    """Return why, and for how long, an informer does not follow the API server; empty if it does."""
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
