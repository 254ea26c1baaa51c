"""Show the last requests for a pod, step by step, from the daemon's timelines.

{"schema": "multusctl.trace/v1", "pod": "default/web", "requests": [
  {"verb": "ADD", "pod": …, "container": …, "ifname": …, "network": …, "began": <Unix time in seconds>,
   "seconds": <number, null while it runs>, "error": {"code": …, "text": …} or null, "stepsNotKept": 0,
   "steps": [{"what": …, "at": <seconds from the beginning>, "seconds": <duration, 0: not measured>}]}]}
"""

from __future__ import annotations

from typing import Any

from multus_daemon.runtime.timeline import Timeline, Timelines


def of(timelines: Timelines, pod: str, last: int) -> dict[str, Any]:
    """Return the `last` requests for `pod` (`namespace/name`; empty: all pods), the oldest first.

    Some requests, like those of a hot-plug, have no pod; they are found by their container.
    """
    kept = list(timelines)
    containers = {item.subject.get("container") for item in kept if item.subject.get("pod") == pod}
    chosen = [item for item in kept if not pod or item.subject.get("container") in containers]
    return {"schema": "multusctl.trace/v1", "pod": pod, "requests": [_object(item) for item in chosen[-last:]]}


def _object(item: Timeline) -> dict[str, Any]:
    names = {key: item.subject.get(key, "") for key in ("verb", "pod", "container", "ifname", "network")}
    error = None if item.error is None else {"code": item.error[0], "text": item.error[1]}
    steps = [{"what": what, "at": round(at, 6), "seconds": round(took, 6)} for what, at, took in tuple(item.steps)]
    return {
        **names,
        "began": round(item.began, 3),
        "seconds": None if item.ended is None else round(item.ended, 6),
        "error": error,
        "stepsNotKept": item.dropped,
        "steps": steps,
    }
