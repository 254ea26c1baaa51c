"""The cluster store without a cluster: a watched directory of manifests, status files beside them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from multus_daemon.cluster.standalone import status_file
from multus_daemon.cluster.standalone.folder import STATUS_DIRECTORY, SUFFIXES, Folder, View
from multus_daemon.runtime import watching
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError, PodNotFoundError, StatusWriteError, StoreUnavailableError

log = logging.getLogger(__name__)

GATE: Final = "manifests"
EVENTS_KEPT: Final = 1000
_SHOWN: Final = 10
_STEP_SECONDS: Final = 0.05
"""Changes that follow each other faster are one."""
POLL_SECONDS: Final = 2.0
"""How often the directory is looked at where it can't be watched."""


@dataclass(frozen=True, slots=True)
class Event:
    """What was reported about a pod; `kind` is Normal or Warning."""

    pod: str
    kind: str
    reason: str
    message: str


class StandaloneStore:
    """Implements `ports.ClusterStore`; `run` is a root task, on the event loop."""

    def __init__(self, directory: Path, gates: Gates | None = None, *, poll_seconds: float = POLL_SECONDS) -> None:
        """The gate `manifests` is open while the directory can be read; `poll_seconds` is for where no watch works."""
        self._gates = gates or Gates()
        self._gates.close(GATE, "not read yet")
        self._directory = directory
        self._poll_seconds = poll_seconds
        self._folder = Folder(directory)
        self._view = View()
        self._scanning = threading.Lock()
        self._events: collections.deque[Event] = collections.deque(maxlen=EVENTS_KEPT)

    # --- the directory ---

    @property
    def errors(self) -> Mapping[str, str]:
        """Files that can't be used as they are now, relative to the directory, and why."""
        return self._view.errors

    @property
    def events(self) -> tuple[Event, ...]:
        """The last events, oldest first."""
        return tuple(self._events)

    def report(self) -> dict[str, Any]:
        """What is known from the directory; for `diagnosis.status`. From any thread."""
        broken = "; ".join(f"{file}: {problem}" for file, problem in sorted(self.errors.items())[:_SHOWN])
        counts = {"pods": len(self._view.pods), "networks": len(self._view.networks)}
        return {
            "kind": "standalone",
            "informers": [
                {"resource": resource, "objects": number, "staleSeconds": 0.0, "problem": broken}
                for resource, number in counts.items()
            ],
            "pendingStatuses": 0,
        }

    def refresh(self, changed: Collection[str] = ()) -> None:
        """Read what has changed, and the files `changed` in any case. Blocks. Raises StoreUnavailableError."""
        with self._scanning:
            try:
                self._view = self._folder.scan(changed)
                self._gates.open(GATE)
            except OSError as error:
                self._gates.close(GATE, str(error))
                raise StoreUnavailableError(f"manifests in {self._directory} can't be read: {error}") from error

    async def run(self) -> None:
        """Follow the directory's changes for ever; polls where it can't be watched. Ends only by cancellation."""
        complaint = ""
        while True:
            try:
                await self._watch_until_failure()
            except (OSError, StoreUnavailableError) as error:
                problem = str(error)
            if problem != complaint:
                complaint = problem
                log.warning("%s is looked at every %s s: %s", self._directory, self._poll_seconds, problem)
            await asyncio.sleep(self._poll_seconds)

    async def _watch_until_failure(self) -> NoReturn:
        await asyncio.to_thread(self.refresh)
        while True:
            await self._watch(self._folder.directories)

    async def _watch(self, directories: Mapping[Path, int]) -> None:
        """Follow changes in `directories`, until there are others to follow."""
        # Not those below the status directory, of which each ADD makes three.
        changes = watching.changes(directories, self._concerns_us, step=_STEP_SECONDS)
        async with contextlib.aclosing(changes):
            async for changed in changes:
                await asyncio.to_thread(self.refresh, {str(path.relative_to(self._directory)) for path in changed})
                if self._folder.directories != directories:
                    return

    def _concerns_us(self, directory: Path, name: str) -> bool:
        if directory == self._directory and name == STATUS_DIRECTORY:
            return False
        # A name without suffix may be a directory that was moved in.
        return name.endswith(SUFFIXES) or "." not in name or name.startswith("..")

    # --- ports.ClusterStore: it blocks, without a way over the event loop ---

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """See `ports.ClusterStore`. A miss looks at the directory, so that a file just written counts at once."""
        found = self._view.pods.get((namespace, name))
        if found is None or (uid and found.uid != uid):
            self.refresh()
            found = self._view.pods.get((namespace, name))
        if found is None:
            raise PodNotFoundError(f"no manifest in {self._directory} declares pod {namespace}/{name}{self._hint()}")
        return found

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """See `ports.ClusterStore`. A miss looks at the directory."""
        if (namespace, name) not in self._view.networks:
            self.refresh()
        found = self._view.networks.get((namespace, name))
        if found is None:
            raise NetworkNotFoundError(
                f"no manifest in {self._directory} declares NetworkAttachmentDefinition {namespace}/{name}"
                f"{self._hint()}"
            )
        return found

    def namespaces_with_network(self, name: str) -> list[str]:
        """See `ports.ClusterStore`."""
        return sorted(namespace for namespace, found in self._view.networks if found == name)

    def node_pods(self) -> list[Pod]:
        """See `ports.ClusterStore`. Looks at the directory; a file that can't be used may declare anything."""
        self.refresh()
        if self.errors:
            raise StoreUnavailableError(f"not every manifest in {self._directory} can be read{self._hint()}")
        return list(self._view.pods.values())

    def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """See `ports.ClusterStore`. Writes `status/<namespace>/<pod>.yaml`."""
        present = self._view.pods.get((pod.namespace, pod.name))
        if present is None:
            raise StatusWriteError(f"pod {pod} is no longer declared in {self._directory}")
        if present.uid != pod.uid:
            raise StatusWriteError(f"pod {pod} has UID {present.uid} now, and the status is for {pod.uid}")
        try:
            status_file.write(self._directory, pod, value)
        except (OSError, ValueError) as error:
            raise StatusWriteError(f"status file of pod {pod} can't be written: {error}") from error

    def event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """See `ports.ClusterStore`. Logged and kept for a while."""
        self._events.append(Event(str(pod), kind, reason, message))
        _log_event(str(pod), kind, reason, message)

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """See `ports.ClusterStore`. Logged."""
        _log_event("the node", kind, reason, message)

    def _hint(self) -> str:
        if not self.errors:
            return ""
        return f"; files with errors: {', '.join(f'{name} ({error})' for name, error in sorted(self.errors.items()))}"


def _log_event(subject: str, kind: str, reason: str, message: str) -> None:
    log.log(logging.WARNING if kind == "Warning" else logging.INFO, "event for %s: %s: %s", subject, reason, message)
