"""Differences between the running pods' attachments and their records; and one pod's repair by hand.

Compared when it is asked for, so it is true now. A container at which a request is at work is passed over.
"""

from __future__ import annotations

from typing import Any

from multus_daemon.pod import upkeep
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.upkeep import Compared, Finding
from multus_daemon.pod.view import Entry
from multus_daemon.runtime import deadline
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.cni.errors import CniError, UnknownContainerError

SCHEMA = "multusctl.drift/v1"
_BUSY = "a request is at work on it"
_DAMAGED = "its record is damaged; `multusctl attachments --leaks` says what to do"


def of(engine: Engine, pod: str = "") -> dict[str, Any]:
    """Return what differs, of all containers on record or of those of `pod` (`namespace/name`), sorted by pod.

    Blocks, until the deadline of the calling context; the rest is reported as not compared. Raises OSError if the
    records can't be listed, UnknownContainerError if there is no container of `pod`.
    """
    entries = _kept(engine, pod)
    found, passed_over, compared = [], [], 0
    if not pod:
        damaged = sorted(engine.records.view.unreadable)
        passed_over += [{"pod": "", "container": container_id, "problem": _DAMAGED} for container_id in damaged]
    for entry in entries:
        container_id = entry.container_id
        try:
            deadline.check()
            if container_id in engine.at_work:
                problem = _BUSY
            else:
                result = upkeep.compare(engine, container_id)
                found += [_shown(result.record, item) for item in result.found]
                compared += 1
                continue
        except CniError as error:
            problem = str(error)
        except deadline.Interrupted:
            problem = "there was no time left"
        passed_over.append({"pod": entry.pod, "container": container_id, "problem": problem})
    return {"schema": SCHEMA, "compared": compared, "differences": found, "passedOver": passed_over}


def repair(engine: Engine, pod: str, *, dry_run: bool) -> dict[str, Any]:
    """Bring the attachments of a pod back, whatever `keep` says; return what differed and what still does.

    Blocks. Raises UnknownContainerError if there is no container of the pod, CniError, OSError.
    """
    work = upkeep.compare if dry_run else upkeep.repair
    results: list[Compared] = []
    gone: UnknownContainerError | None = None
    for entry in _kept(engine, pod):
        try:
            results.append(work(engine, entry.container_id))
        except UnknownContainerError as error:
            # An earlier container of the pod, whose DEL has not come yet.
            gone = error
    if gone is not None and not results:
        raise gone
    return {
        "schema": "multusctl.repair/v1",
        "pod": pod,
        "dryRun": dry_run,
        "found": [_shown(item.record, finding) for item in results for finding in item.found],
        "left": [_shown(item.record, finding) for item in results for finding in item.left],
        "errors": [str(item.error) for item in results if item.error],
    }


def _kept(engine: Engine, pod: str) -> list[Entry]:
    """Return those whose ADD is done, sorted by pod.

    Raises OSError if the records can't be listed, UnknownContainerError if there is none of `pod`.
    """
    engine.records.refresh()
    found = [entry for entry in engine.records.view if entry.complete and pod in ("", entry.pod)]
    if pod and not found:
        raise UnknownContainerError(f"pod {pod} has no networks on record on this node")
    return sorted(found, key=lambda entry: (entry.pod, entry.created))


def _shown(record: ContainerRecord, item: Finding) -> dict[str, Any]:
    return {
        "pod": record.pod,
        "container": record.sandbox.container_id,
        "network": item.attachment.name,
        "interface": item.attachment.ifname,
        "difference": item.difference.text,
        "repairable": item.difference.repair is not None,
        "keep": item.keep,
    }
