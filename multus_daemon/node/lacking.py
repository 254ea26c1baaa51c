"""Find and report running pods that lack networks of their annotation.

Such a pod was started while the runtime did not use Multus, or its annotation was changed after its start. Each is
reported once, if two consecutive searches find it: a hot-plug may be running.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from multus_daemon import deadlines
from multus_daemon.node.orphans import left_by_others
from multus_daemon.pod.engine import Engine
from multus_daemon.pod.records import is_of
from multus_daemon.pod.upkeep import follows
from multus_daemon.runtime import portal
from multus_daemon.runtime.deadline import Deadline
from multus_daemon.spec.attachment import ContainerRecord, Pod
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.nad import selection
from multus_daemon.spec.nad.network_status import EDITED, NOT_FOLLOWED
from multus_daemon.spec.ports import StoreUnavailableError

log = logging.getLogger(__name__)

MISSING: Final = "NetworksMissing"


@dataclass(frozen=True, slots=True)
class Lacking:
    """A running pod that lacks networks of its annotation."""

    pod: Pod
    networks: tuple[str, ...]
    has_others: bool
    """True if it has other networks: then its annotation was changed after its start."""
    is_followed: bool
    """True if the daemon itself attaches the missing networks (setting `hotplug`)."""


class Reports:
    """Finds pods that lack networks, and reports them by log and Event. `run` is a root task."""

    def __init__(self, engine: Engine, reason: Callable[[str], str]) -> None:
        """`reason` returns why the daemon could not attach networks of a pod (`namespace/name`); it is thread-safe."""
        self._seconds = engine.settings.deletes.reconcile_seconds
        self._engine = engine
        self._reason = reason
        self._lacking: frozenset[str] = frozenset()
        self._reported: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Search for such pods at each `reconcileSeconds`, for ever; never if it is 0."""
        while self._seconds:
            seconds = self._seconds
            try:
                await self.look()
            except StoreUnavailableError as error:
                # A starting daemon does not know its pods yet.
                log.debug("pods without their networks can't be found now: %s", error)
                seconds = min(seconds, deadlines.RECONCILE_BLIND_SECONDS)
            except Exception as error:
                # A fault in one record must not stop the daemon.
                text = "pods without their networks can't be looked for: %s"
                log.error(text, error, exc_info=not isinstance(error, OSError))
            await asyncio.sleep(seconds)

    def of(self, pod: Pod) -> str:
        """Return a text: which networks a running pod lacks, and what to do; empty if none. Blocks. Raises OSError."""
        return next(map(self._text, look(self._engine, [pod])), "")

    async def look(self) -> None:
        """Search once, and report. Raises OSError, StoreUnavailableError if the node's pods are not known."""
        found = await portal.run(Deadline(), partial(look, self._engine), name="lacking")
        confirmed = [item for item in found if item.pod.uid in self._lacking]
        self._engine.metrics.lacking.set(len(confirmed))
        for item in confirmed:
            if item.pod.uid not in self._reported:
                text = self._text(item)
                log.warning("pod %s: %s", item.pod, text)
                self._engine.cluster.event(item.pod, "Warning", MISSING, text)
        self._lacking = frozenset(item.pod.uid for item in found)
        self._reported = (self._reported & self._lacking) | {item.pod.uid for item in confirmed}

    def _text(self, item: Lacking) -> str:
        text = f"the pod runs without networks that it asked for: {', '.join(item.networks)}"
        if not item.has_others:
            return f"{text}: it was started while the runtime did not use Multus; delete it, so that it is made anew"
        text += f": {EDITED}"
        if item.is_followed:
            return f"{text}; the daemon attaches them (hotplug): {self._reason(str(item.pod)) or 'under way'}"
        return f"{text}; {NOT_FOLLOWED}"


def look(engine: Engine, pods: Iterable[Pod] | None = None) -> tuple[Lacking, ...]:
    """Return which of `pods` (None: the node's) run and lack networks. Raises OSError, StoreUnavailableError."""
    engine.records.refresh()
    pods = engine.cluster.node_pods() if pods is None else pods
    running = [pod for pod in pods if pod.phase == "Running" and not pod.host_network]
    lacking = [pod for pod in running if _wanted(pod) and not _leaves(engine, pod) and _missing(pod, _own(engine, pod))]
    if not lacking:
        return ()
    left = [record for batch in left_by_others(engine) for record in batch.values() if record is not None]
    found = []
    for pod in lacking:
        records = [*_own(engine, pod), *(record for record in left if is_of(record, pod))]
        if missing := _missing(pod, records):
            # An ADD attaches all networks that the annotation has, or fails.
            has_others = any(not item.hot_plugged for record in records for item in record.attachments)
            found.append(Lacking(pod, missing, has_others, _is_followed(engine, pod)))
    return tuple(found)


def _leaves(engine: Engine, pod: Pod) -> bool:
    """Return True if all recorded attachments of the pod are being deleted, or if a request for it runs."""
    entries = [entry for entry in engine.records.view.of_pod(str(pod)) if is_of(entry, pod)]
    return bool(entries) and not any(entry.complete for entry in entries)


def _own(engine: Engine, pod: Pod) -> list[ContainerRecord]:
    names = [entry.container_id for entry in engine.records.view.of_pod(str(pod))]
    return [record for record in engine.records.read(names).values() if record is not None and is_of(record, pod)]


def _is_followed(engine: Engine, pod: Pod) -> bool:
    try:
        return follows(engine, pod)
    except CniError:
        return False


def _wanted(pod: Pod) -> Counter[str]:
    """Count the networks of the pod's annotation by name; none if it is malformed, as the pod's ADD has then failed."""
    annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
    try:
        return Counter(str(element) for element in selection.parse(annotation, pod_namespace=pod.namespace))
    except CniError:
        return Counter()


def _missing(pod: Pod, records: Collection[ContainerRecord]) -> tuple[str, ...]:
    """Return the requested networks that none of the pod's containers has.

    Each hot-plugged network counts as one of the requested ones: a controller may have given it another name.
    """
    wanted = _wanted(pod)
    least = tuple(wanted.elements())
    for record in records:
        own = Counter(item.name for item in record.attachments if not (item.hot_plugged or item.leaving))
        hot_plugged = sum(item.hot_plugged for item in record.attachments)
        missing = tuple((wanted - own).elements())
        missing = missing if len(missing) > hot_plugged else ()
        least = missing if len(missing) < len(least) else least
    return least
