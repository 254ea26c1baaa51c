"""The cluster store without a cluster: a watched directory of manifests, with status files in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from multus_daemon.cluster.standalone import manifests, status_file
from multus_daemon.cluster.standalone.manifests import Key, ManifestError, Manifests
from multus_daemon.cluster.standalone.status_file import STATUS_DIRECTORY
from multus_daemon.runtime import fs, inotify
from multus_daemon.runtime.gates import Gates
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.claims import DeviceReport
from multus_daemon.spec.cni.names import KubernetesArgs, Namespace, PodName, PodUid
from multus_daemon.spec.nad.selection import KIND, NETWORKS_READY, NetworkAttachmentDefinition
from multus_daemon.spec.ports import (
    EVENT_MESSAGE_MAX,
    NetworkNotFoundError,
    PodNotFoundError,
    StatusWriteError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    from multus_daemon.cluster.standalone.reservations import DirectoryReservations

log = logging.getLogger(__name__)

GATE: Final = "manifests"
NODE_NAME: Final = "MULTUS_NODE_NAME"
ADDRESSES_DIRECTORY: Final = "addresses"
"""Directory of the addresses that the daemons of several nodes share; it may be a link."""
SUFFIXES: Final = (".yaml", ".yml", ".json")
FILE_MAX_BYTES: Final = 1024 * 1024
FILES_MAX: Final = 10_000
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class View:
    """The content of all manifests at one moment."""

    pods: Mapping[Key, Pod] = field(default_factory=dict)
    networks: Mapping[Key, NetworkAttachmentDefinition] = field(default_factory=dict)
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # labels
    errors: Mapping[str, str] = field(default_factory=dict)  # by file, relative to the directory


@dataclass(slots=True)
class _File:
    """A manifest's file with its last valid content."""

    signature: tuple[int, ...] | None
    content: Manifests = field(default_factory=Manifests)
    error: str = ""


class Folder:
    """The manifests in a directory tree, without dot names and top directories of other files.

    Not thread-safe; blocks.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._others = directory / STATUS_DIRECTORY, directory / ADDRESSES_DIRECTORY
        # The directories of the last scan, with their inodes to detect a replaced directory.
        self.directories: Mapping[Path, int] = {}
        self._files: dict[str, _File] = {}
        self._reported: dict[str, str] = {}

    def scan(self, changed: Collection[str] = ()) -> View:
        """Read new and changed files, and those in `changed` (relative paths) in any case. Raises OSError.

        Of a file that has become invalid, the last valid content stays in effect.
        """
        files: dict[str, _File] = {}
        for name, path in sorted(self._walk().items()):
            file = self._read(name, path, name in changed)
            if file:
                files[name] = file
        self._files = files
        view = self._view()
        for name, error in view.errors.items():
            if self._reported.get(name) != error:
                log.error("%s: %s; its last valid content stays in effect", self._directory / name, error)
        for name in self._reported.keys() - view.errors.keys():
            log.info("%s: the file is valid again, or gone", self._directory / name)
        self._reported = dict(view.errors)
        return view

    def _walk(self) -> dict[str, Path]:
        """Return the manifests by their relative path. Raises OSError."""

        def failed(error: OSError) -> None:
            if error.filename == str(self._directory):
                raise error

        directories, found = {self._directory: os.stat(self._directory).st_ino}, list[Path]()
        for root, folders, files in os.walk(self._directory, onerror=failed):
            here = Path(root)
            # Links to directories may form a loop. Links to files are followed, as in a mounted ConfigMap.
            inner = [here / name for name in folders if not name.startswith(".")]
            inner = [path for path in inner if not path.is_symlink() and path not in self._others]
            folders[:] = [path.name for path in inner]
            for path in inner:
                with contextlib.suppress(OSError):
                    directories[path] = os.stat(path).st_ino
            found += [here / name for name in files if name.endswith(SUFFIXES) and not name.startswith(".")]
            if len(found) > FILES_MAX:
                raise OSError(f"{self._directory} has more than {FILES_MAX} manifests")
        self.directories = directories
        return {str(path.relative_to(self._directory)): path for path in found}

    def _read(self, name: str, path: Path, changed: bool) -> _File | None:
        """Return the file, read again if it changed; None if it is gone. `changed`: read it in any case."""
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
        found: dict[str, dict[Key, Any]] = {"Pod": {}, KIND: {}, "Namespace": {}}
        owners: dict[tuple[str, Key], str] = {}
        errors: dict[str, str] = {}
        for name, file in self._files.items():
            problems = [file.error] if file.error else []
            for kind, key, value in file.content.declared:
                if owner := owners.get((kind, key)):
                    problems.append(f"{kind} {'/'.join(filter(None, key))} is declared in {owner} already")
                else:
                    owners[kind, key], found[kind][key] = name, value
            if problems:
                errors[name] = "; ".join(problems)
        namespaces = {name: labels for (name, _), labels in found["Namespace"].items()}
        return View(found["Pod"], found[KIND], namespaces, errors)


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
        self.claims = None
        self.shares_addresses = asyncio.Event()
        """Set if the directory of the addresses exists."""
        self.node = os.environ.get(NODE_NAME) or socket.gethostname()
        """Name of this node, for the addresses that it shares with others."""

    def asked_networks(self, args: KubernetesArgs) -> str:
        """Return an empty text: without a cluster, requests are not grouped by networks."""
        return ""

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
        """Call `callback` on the loop for each pod that is known now, and for each that is new or changes later."""
        self._changed, self._loop = callback, asyncio.get_running_loop()
        self._report(list(self._view.pods.values()))

    def hotplug_controller(self) -> str:
        """Return nothing: without a cluster there is no such controller."""
        return ""

    def namespace_labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of the Namespace `name` in the directory, none if it is not there."""
        return self._view.namespaces.get(name, {})

    async def run(self) -> None:
        """Follow changes of the directory for ever; poll it while it can't be watched."""

        async def changed(paths: set[Path]) -> None:
            try:
                await asyncio.to_thread(self.refresh, {str(path.relative_to(self._directory)) for path in paths})
            except StoreUnavailableError as error:
                raise OSError(str(error)) from error

        if await asyncio.to_thread((self._directory / ADDRESSES_DIRECTORY).is_dir):
            self.shares_addresses.set()
        name = str(self._directory)
        await inotify.follow(lambda: self._folder.directories, self._is_relevant, changed, name=name)

    def reservations(self) -> DirectoryReservations:
        """Return the addresses that the daemons of several nodes share."""
        from multus_daemon.cluster.standalone.reservations import DirectoryReservations

        return DirectoryReservations(self._directory / ADDRESSES_DIRECTORY)

    def _is_relevant(self, directory: Path, name: str) -> bool:
        # Each ADD causes three changes in the status directory.
        if directory == self._directory and name in (STATUS_DIRECTORY, ADDRESSES_DIRECTORY):
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
            raise StatusWriteError(
                f"pod {pod} was replaced: it has UID {present.uid} now, and the status is for {pod.uid}"
            )
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
        log.log(level, "event for %s: %s: %s", subject, reason, message[:EVENT_MESSAGE_MAX])

    def _hint(self) -> str:
        errors = ", ".join(f"{name} ({error})" for name, error in sorted(self._view.errors.items()))
        return f"; files with errors: {errors}" if errors else ""
