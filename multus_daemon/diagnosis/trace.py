"""What happened to a pod on this node, in order: from the timelines of the daemon's last requests.

{"schema": "multusctl.trace/v1", "pod": "default/web", "requests": [
  {"verb": "ADD", "pod": …, "container": …, "ifname": …, "network": …, "began": <Unix time in seconds>,
   "seconds": <number, null while it runs>, "error": {"code": …, "text": …} or null, "stepsNotKept": 0,
   "steps": [{"what": …, "at": <seconds from the beginning>, "seconds": <that it took, 0 where not measured>}]}]}
"""

from __future__ import annotations

from typing import Any, Final

from multus_daemon.runtime.timeline import Timeline, Timelines

SCHEMA: Final = "multusctl.trace/v1"


def of(timelines: Timelines, pod: str, last: int) -> dict[str, Any]:
    """The `last` requests for `pod` (`namespace/name`; empty: for all pods), the oldest first.

    Those that name the container only, as a hot-plug's do, are found by the containers of the others.
    """
    kept = list(timelines)
    containers = {item.subject.get("container") for item in kept if item.subject.get("pod") == pod}
    chosen = [item for item in kept if not pod or item.subject.get("container") in containers]
    return {"schema": SCHEMA, "pod": pod, "requests": [_object(item) for item in chosen[-last:]]}


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
