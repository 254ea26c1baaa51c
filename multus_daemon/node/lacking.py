"""Find and report running pods that lack networks of their annotation.

Such a pod was started while the runtime did not use Multus, or its annotation was changed after its start. Each is
reported once, when a second look confirms it: a hot-plug may be under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
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
from multus_daemon.spec.ports import EVENT_MESSAGE_MAX, Events, StoreUnavailableError

log = logging.getLogger(__name__)

MISSING: Final = "NetworksMissing"


@dataclass(frozen=True, slots=True)
class Lacking:
    """A pod that runs and lacks networks that it asked for."""

    pod: Pod
    networks: tuple[str, ...]
    has_others: bool
    """It has other networks, so its annotation was changed after its start."""
    is_followed: bool
    """The daemon attaches what is missing (`hotplug`)."""


class Reports:
    """The pods that lack networks, and what was said of them. `run` is a task."""

    def __init__(
        self,
        engine: Engine,
        events: Events,
        reason: Callable[[str], str],
        *,
        seconds: float = deadlines.RECONCILE_SECONDS,
    ) -> None:
        """`reason` returns what keeps the daemon from attaching the networks of a pod (`namespace/name`).

        `seconds`: from one look to the next.
        """
        self._seconds = seconds
        self._engine = engine
        self._events = events
        self._reason = reason
        self._lacking: frozenset[str] = frozenset()
        self._reported: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Look for such pods for ever; if the interval is 0, never."""
        while self._seconds:
            seconds = self._seconds
            try:
                await self.look()
            except StoreUnavailableError as error:
                # A starting daemon does not know its pods yet.
                log.debug("pods without their networks are not looked for: %s", error)
                seconds = min(seconds, deadlines.RECONCILE_BLIND_SECONDS)
            except Exception as error:
                # A fault in one record must not stop the daemon.
                text = "pods without their networks can't be looked for: %s"
                log.error(text, error, exc_info=not isinstance(error, OSError))
            await asyncio.sleep(seconds)

    async def look(self) -> None:
        """Look once. Raises OSError, StoreUnavailableError if the node's pods are not known."""
        found = await portal.run(Deadline(), partial(look, self._engine), name="lacking")
        confirmed = [item for item in found if item.pod.uid in self._lacking]
        self._engine.metrics.deletes.lacking.set(len(confirmed))
        for item in confirmed:
            if item.pod.uid not in self._reported:
                advice = self._advice(item)
                text = f"the pod runs without networks that it asked for: {', '.join(item.networks)}; {advice}"
                log.warning("pod %s: %s", item.pod, text)
                self._events.event(item.pod, "Warning", MISSING, text[:EVENT_MESSAGE_MAX])
        self._lacking = frozenset(item.pod.uid for item in found)
        self._reported = (self._reported & self._lacking) | {item.pod.uid for item in confirmed}

    def _advice(self, item: Lacking) -> str:
        if not item.has_others:
            return "was it started while the runtime did not use Multus? delete it, so that it is made again"
        changed = "its annotation was changed after its start"
        if item.is_followed:
            return f"{changed}, and the daemon attaches them (hotplug): {self._reason(str(item.pod)) or 'under way'}"
        # A new pod is made from the template, so it would lack an edited annotation.
        return (
            f"{changed}, when networks are attached: put them into the template that the pod is made from; a pod that "
            "runs gets them only from a hot-plug controller, or with the setting hotplug"
        )


def look(engine: Engine) -> tuple[Lacking, ...]:
    """Return the running pods that lack networks. Raises OSError, StoreUnavailableError."""
    engine.records.refresh()
    running = [pod for pod in engine.cluster.node_pods() if pod.phase == "Running" and not pod.host_network]
    lacking = [pod for pod in running if _wanted(pod) and _missing(pod, _own(engine, pod))]
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


def _own(engine: Engine, pod: Pod) -> list[ContainerRecord]:
    names = [entry.container_id for entry in engine.records.view.of_pod(str(pod))]
    return [record for record in engine.records.read(names).values() if record is not None and is_of(record, pod)]


def _is_followed(engine: Engine, pod: Pod) -> bool:
    try:
        return follows(engine, pod)
    except CniError:
        return False


def _wanted(pod: Pod) -> Counter[str]:
    """Return the networks of the pod's annotation; none if it is malformed, because its ADD has failed then."""
    annotation = pod.annotations.get(selection.NETWORKS_ANNOTATION, "")
    try:
        return Counter(str(element) for element in selection.parse(annotation, pod_namespace=pod.namespace))
    except CniError:
        return Counter()


def _missing(pod: Pod, records: Collection[ContainerRecord]) -> tuple[str, ...]:
    """Return the networks that none of the pod's containers has. Names of hot-plugged ones may differ."""
    wanted = _wanted(pod)
    least = tuple(wanted.elements())
    for record in records:
        own = Counter(item.name for item in record.attachments if not (item.hot_plugged or item.leaving))
        hot_plugged = sum(item.hot_plugged for item in record.attachments)
        missing = tuple((wanted - own).elements())
        missing = missing if len(missing) > hot_plugged else ()
        least = missing if len(missing) < len(least) else least
    return least
