"""The cluster store without a cluster: a watched directory of manifests, with status files in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from multus_daemon.cluster.standalone import manifests, status_file
from multus_daemon.cluster.standalone.manifests import ManifestError, Manifests
from multus_daemon.cluster.standalone.status_file import STATUS_DIRECTORY
from multus_daemon.runtime import fs, inotify
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni.names import Namespace, PodName, PodUid
from multus_daemon.spec.nad.following import NETWORKS_READY
from multus_daemon.spec.nad.selection import NetworkAttachmentDefinition
from multus_daemon.spec.ports import NetworkNotFoundError, PodNotFoundError, StatusWriteError, StoreUnavailableError

log = logging.getLogger(__name__)

GATE: Final = "manifests"
SUFFIXES: Final = (".yaml", ".yml", ".json")
FILE_MAX_BYTES: Final = 1024 * 1024
FILES_MAX: Final = 10_000
POLL_SECONDS: Final = 2.0  # for a directory that can't be watched
_SHOWN: Final = 10
_STEP_SECONDS: Final = 0.05  # changes within this time cause one scan

Key = tuple[str, str]  # namespace and name


@dataclass(frozen=True, slots=True)
class View:
    """The content of all manifests at one moment."""

    pods: Mapping[Key, Pod] = field(default_factory=dict)
    networks: Mapping[Key, NetworkAttachmentDefinition] = field(default_factory=dict)
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # labels
    errors: Mapping[str, str] = field(default_factory=dict)  # by file, relative to the directory


@dataclass(slots=True)
class _File:
    """One file with its last valid content."""

    signature: tuple[int, ...] | None
    content: Manifests = field(default_factory=Manifests)
    error: str = ""


class Folder:
    """The manifests below a directory, without dot names and `status/` at its top. Not thread-safe; blocks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # The directories of the last scan, with their inodes to detect a replaced directory.
        self.directories: Mapping[Path, int] = {}
        self._files: dict[str, _File] = {}
        self._reported: dict[str, str] = {}

    def scan(self, changed: Collection[str] = ()) -> View:
        """Read new and changed files, and those in `changed` (relative paths) in any case. Raises OSError.

        An invalid file keeps its last valid content.
        """
        files: dict[str, _File] = {}
        for name, path in sorted(self._walk()):
            file = self._read(name, path, name in changed)
            if file:
                files[name] = file
        self._files = files
        view = self._view()
        for name, error in view.errors.items():
            if self._reported.get(name) != error:
                log.error("%s: %s; its last valid content stays in effect", self._directory / name, error)
        for name in self._reported.keys() - view.errors.keys():
            log.info("%s: in order again, or gone", self._directory / name)
        self._reported = dict(view.errors)
        return view

    def _walk(self) -> Iterator[tuple[str, Path]]:
        pending = [self._directory]
        directories = {}
        count = 0
        while pending:
            directory = pending.pop()
            try:
                inode = os.stat(directory).st_ino
                entries = list(os.scandir(directory))
            except OSError:
                if directory == self._directory:
                    raise
                continue
            directories[directory] = inode
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                # Links to directories may form a loop. Links to files are followed, as in a mounted ConfigMap.
                if entry.is_dir(follow_symlinks=False):
                    if directory != self._directory or entry.name != STATUS_DIRECTORY:
                        pending.append(Path(entry.path))
                elif entry.name.endswith(SUFFIXES):
                    count += 1
                    if count > FILES_MAX:
                        raise OSError(f"{self._directory} holds more than {FILES_MAX} manifests")
                    path = Path(entry.path)
                    yield str(path.relative_to(self._directory)), path
        self.directories = directories

    def _read(self, name: str, path: Path, changed: bool) -> _File | None:
        """Return the file, read again if it has changed; None if it is gone."""
        before = self._files.get(name, _File(None))
        signature: tuple[int, ...] | None = None
        try:
            status = path.stat()
            signature = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if signature == before.signature and not changed:
                return before
            data = fs.read_limited(path, limit=FILE_MAX_BYTES)
            content = manifests.parse(data, is_json=path.suffix == ".json")
        except FileNotFoundError:
            return None
        except OSError as error:
            # Without a signature the next scan reads the file again: the error may be temporary.
            return _File(None, before.content, f"can't be read: {error.strerror or error}")
        except ManifestError as error:
            return _File(signature, before.content, str(error))
        for kind in content.passed_over:
            log.info("%s: %s is ignored: only pods, NetworkAttachmentDefinitions and Namespaces count", path, kind)
        return _File(signature, content)

    def _view(self) -> View:
        """Merge the files. The first file by name wins; a second declaration of an object is an error."""
        pods: dict[Key, Pod] = {}
        networks: dict[Key, NetworkAttachmentDefinition] = {}
        namespaces: dict[str, Mapping[str, str]] = {}
        owners: dict[tuple[type, Key], str] = {}
        errors: dict[str, str] = {}
        for name, file in self._files.items():
            problems = [file.error] if file.error else []
            items: tuple[Pod | NetworkAttachmentDefinition, ...] = (*file.content.pods, *file.content.networks)
            for item in items:
                key: Key = (item.namespace, item.name)
                if owner := owners.get((type(item), key)):
                    kind = "Pod" if isinstance(item, Pod) else "NetworkAttachmentDefinition"
                    problems.append(f"{kind} {item} is declared in {owner} already")
                    continue
                owners[type(item), key] = name
                if isinstance(item, Pod):
                    pods[key] = item
                else:
                    networks[key] = item
            for namespace, labels in file.content.namespaces.items():
                owner = owners.setdefault((Mapping, (namespace, "")), name)
                if owner != name:
                    problems.append(f"Namespace {namespace} is declared in {owner} already")
                else:
                    namespaces[namespace] = labels
            if problems:
                errors[name] = "; ".join(problems)
        return View(pods, networks, namespaces, errors)


class StandaloneStore:
    """Implements `ports.ClusterStore`; `run` is a root task on the event loop, the port's methods block."""

    def __init__(self, directory: Path, gates: Gates | None = None) -> None:
        """The gate `manifests` is open while the directory can be read."""
        self._gates = gates or Gates()
        self._gates.close(GATE, "not read yet")
        self._directory = directory
        self._folder = Folder(directory)
        self._view = View()
        self._scanning = threading.Lock()
        self._changed: Callable[[Pod], None] = lambda _: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.conditions: dict[Key, tuple[PodUid, bool, str, str]] = {}
        """The last conditions of pods that are declared: UID, ready, reason, message."""

    def report(self) -> dict[str, Any]:
        """Return the state of the directory for `answers.status`. Safe in any thread."""
        broken = "; ".join(f"{file}: {problem}" for file, problem in sorted(self._view.errors.items())[:_SHOWN])
        counts = {"pods": len(self._view.pods), "networks": len(self._view.networks)}
        return {
            "kind": "standalone",
            "informers": [
                {"resource": resource, "objects": number, "staleSeconds": 0.0, "heardSeconds": 0.0, "problem": broken}
                for resource, number in counts.items()
            ],
            "pendingStatuses": 0,
        }

    def refresh(self, changed: Collection[str] = ()) -> None:
        """Read changed files, and those in `changed` in any case. Blocks. Raises StoreUnavailableError."""
        with self._scanning:
            try:
                before, self._view = self._view, self._folder.scan(changed)
                self._gates.open(GATE)
                self._report([pod for key, pod in self._view.pods.items() if before.pods.get(key) != pod])
            except OSError as error:
                self._gates.close(GATE, str(error))
                raise StoreUnavailableError(f"manifests in {self._directory} can't be read: {error}") from error

    def _report(self, pods: Collection[Pod]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                for pod in pods:
                    self._loop.call_soon_threadsafe(self._changed, pod)

    def watch_pods(self, callback: Callable[[Pod], None]) -> None:
        """Call `callback` on the loop for each pod that is new or differs from what was known, and for the known."""
        self._changed, self._loop = callback, asyncio.get_running_loop()
        self._report(list(self._view.pods.values()))

    def hotplug_controller(self) -> str:
        """Return nothing: without a cluster there is no such controller."""
        return ""

    def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of the Namespace in the directory, if there is one."""
        return self._view.namespaces.get(name, {})

    async def run(self) -> None:
        """Follow changes of the directory for ever; poll it while it can't be watched."""
        complaint = ""
        while True:
            try:
                await asyncio.to_thread(self.refresh)
                while True:
                    await self._watch(self._folder.directories)
            except (OSError, StoreUnavailableError) as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("%s is looked at every %s s: %s", self._directory, POLL_SECONDS, error)
            await asyncio.sleep(POLL_SECONDS)

    async def _watch(self, directories: Mapping[Path, int]) -> None:
        """Follow changes in `directories`; returns when there are other directories."""
        changes = inotify.changes(directories, self._is_relevant, step=_STEP_SECONDS)
        async with contextlib.aclosing(changes):
            async for changed in changes:
                await asyncio.to_thread(self.refresh, {str(path.relative_to(self._directory)) for path in changed})
                if self._folder.directories != directories:
                    return

    def _is_relevant(self, directory: Path, name: str) -> bool:
        # Each ADD causes three changes in the status directory.
        if directory == self._directory and name == STATUS_DIRECTORY:
            return False
        # A name without suffix may be a directory that was moved here.
        return name.endswith(SUFFIXES) or "." not in name or name.startswith("..")

    def pod(self, namespace: Namespace, name: PodName, uid: PodUid) -> Pod:
        """Return the pod; a miss scans the directory, so that a new file is found at once."""
        pod = self._view.pods.get((namespace, name))
        if pod is None or (uid and pod.uid != uid):
            self.refresh()
            pod = self._view.pods.get((namespace, name))
        if pod is None:
            raise PodNotFoundError(f"no manifest in {self._directory} declares pod {namespace}/{name}{self._hint()}")
        return pod

    def network(self, namespace: str, name: str) -> NetworkAttachmentDefinition:
        """Return the network; a miss scans the directory."""
        if (namespace, name) not in self._view.networks:
            self.refresh()
        network = self._view.networks.get((namespace, name))
        if network is None:
            what = f"NetworkAttachmentDefinition {namespace}/{name}"
            raise NetworkNotFoundError(f"no manifest in {self._directory} declares {what}{self._hint()}")
        return network

    def namespaces_with_network(self, name: str) -> list[str]:
        """Return the namespaces that had a network `name` in the last scan."""
        return sorted(namespace for namespace, network in self._view.networks if network == name)

    def node_pods(self) -> list[Pod]:
        """Scan the directory and return its pods. Raises StoreUnavailableError if any file is invalid."""
        self.refresh()
        if self._view.errors:
            raise StoreUnavailableError(f"not every manifest in {self._directory} can be read{self._hint()}")
        return list(self._view.pods.values())

    def write_network_status(self, pod: Pod, value: str, *, keep_trying: bool) -> None:
        """Write `status/<namespace>/<pod>.yaml`; `keep_trying` has no effect."""
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
        """Log the Event."""
        self._log_event(str(pod), kind, reason, message)

    def node_event(self, kind: str, reason: str, message: str) -> None:
        """Log the Event."""
        self._log_event("the node", kind, reason, message)

    def condition(self, pod: Pod, *, ready: bool, reason: str, message: str) -> None:
        """Log the condition, if the pod does not have it."""
        key, value = (pod.namespace, pod.name), (pod.uid, ready, reason, message)
        present = self._view.pods.get(key)
        if present is None or present.uid != pod.uid or self.conditions.get(key) == value:
            return
        pods = self._view.pods
        self.conditions = {other: found for other, found in self.conditions.items() if other in pods} | {key: value}
        log.info("condition of %s: %s=%s: %s: %s", pod, NETWORKS_READY, ready, reason, message)

    def device_status(self, pod: Pod, report: DeviceReport) -> None:
        """Do nothing: a directory has no ResourceClaims."""

    def _log_event(self, subject: str, kind: str, reason: str, message: str) -> None:
        level = logging.WARNING if kind == "Warning" else logging.INFO
        log.log(level, "event for %s: %s: %s", subject, reason, message)

    def _hint(self) -> str:
        errors = ", ".join(f"{name} ({error})" for name, error in sorted(self._view.errors.items()))
        return f"; files with errors: {errors}" if errors else ""
