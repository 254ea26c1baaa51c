"""How the daemon of this node is.

    {"schema": "multusctl.status/v1", "source": "daemon" or "store", "version": …, "startedAt": <Unix time>,
     "ready": true, "gates": {<name of a closed gate>: <reason>},
     "primary": {"wanted": true, "file": …, "placed": …, "problem": "", "passedOver": [{"file": …, "reason": …}]},
     "cluster": {"kind": "kubernetes", "standalone" or "", "informers": [{"resource": "pods", "objects": 12,
                 "staleSeconds": 0.3, "problem": ""}], "pendingStatuses": 0},
     "requests": {"running": 0, "waiting": 0, "limit": 256},
     "processes": {"running": 0, "waiting": 0, "limit": 8},
     "spooled": 0, "containers": 12, "leftovers": 0,
     "errors": [{"verb": "ADD", "code": 7, "cause": …, "count": 3, "last": <Unix time>, "pod": <the last one>}]}

What is not known without a daemon is 0, empty or false; `source` says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from multus_daemon.runtime.timeline import Timeline

SCHEMA: Final = "multusctl.status/v1"
ERRORS_MAX: Final = 10


@dataclass(frozen=True, slots=True)
class Parts:
    """What the daemon knows of itself; each part as the module's docstring has it."""

    version: str
    started: float
    gates: Mapping[str, str]
    primary: Mapping[str, Any]
    cluster: Mapping[str, Any]
    requests: Mapping[str, int]
    processes: Mapping[str, int]
    leftovers: int
    source: str = "daemon"


def of(parts: Parts, timelines: Iterable[Timeline], *, containers: int, spooled: int) -> dict[str, Any]:
    """The whole status."""
    return {
        "schema": SCHEMA,
        "source": parts.source,
        "version": parts.version,
        "startedAt": parts.started,
        "ready": parts.source == "daemon" and not parts.gates,
        "gates": dict(parts.gates),
        "primary": dict(parts.primary),
        "cluster": dict(parts.cluster),
        "requests": dict(parts.requests),
        "processes": dict(parts.processes),
        "spooled": spooled,
        "containers": containers,
        "leftovers": parts.leftovers,
        "errors": errors(timelines),
    }


def entries_in(spool: Path) -> int:
    """How many DELs the shim has left there; those under way are hidden."""
    try:
        with os.scandir(spool) as entries:
            return sum(entry.is_file() and not entry.name.startswith(".") for entry in entries)
    except OSError:
        return 0


def errors(timelines: Iterable[Timeline]) -> list[dict[str, Any]]:
    """The errors of the last requests by cause, the most frequent first."""
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for item in timelines:
        if item.error is None:
            continue
        code, text = item.error
        cause = cause_of(text)
        verb = item.subject.get("verb", "")
        entry = found.setdefault((verb, code, cause), {"verb": verb, "code": code, "cause": cause, "count": 0})
        entry["count"] += 1
        entry["last"] = round(item.began, 3)
        entry["pod"] = item.subject.get("pod", "")
    return sorted(found.values(), key=lambda entry: (-entry["count"], -entry["last"]))[:ERRORS_MAX]


def cause_of(text: str) -> str:
    """The cause in an error's text: without what it was for, in brackets or behind a semicolon (`cni.errors`)."""
    return text.partition(" (pod ")[0].partition("; ")[0]
