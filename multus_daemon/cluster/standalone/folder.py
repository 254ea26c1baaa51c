"""A directory of manifests, read again as it changes: what all its files declare together. Blocks; see `store`."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from multus_daemon.cluster.standalone import manifests
from multus_daemon.cluster.standalone.manifests import ManifestError, Manifests
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import Pod
from multus_daemon.spec.cni import gojson
from multus_daemon.spec.nad.definition import NetworkAttachmentDefinition

log = logging.getLogger(__name__)

SUFFIXES: Final = (".yaml", ".yml", ".json")
STATUS_DIRECTORY: Final = "status"
FILE_MAX_BYTES: Final = 1024 * 1024
FILES_MAX: Final = 10_000

Signature = tuple[int, int, int, int]
Key = tuple[str, str]
Object = TypeVar("Object", Pod, NetworkAttachmentDefinition)


@dataclass(frozen=True, slots=True)
class View:
    """What the directory declares at one moment, by namespace and name."""

    pods: Mapping[Key, Pod] = field(default_factory=dict)
    networks: Mapping[Key, NetworkAttachmentDefinition] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    """File, relative to the directory -> what is wrong in it."""


@dataclass(slots=True)
class _File:
    """One file: the content that is in effect, which is its last good one."""

    signature: Signature | None
    content: Manifests = field(default_factory=Manifests)
    error: str = ""


class Folder:
    """The manifests below a directory; dot names and `status/` at its top are passed over. Not for several threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.directories: Mapping[Path, int] = {}
        """Where the last scan has looked for manifests, each with its inode: another may come under the same name."""
        self._files: dict[str, _File] = {}
        self._reported: dict[str, str] = {}

    def scan(self, changed: Collection[str] = ()) -> View:
        """Read the files that are new or have changed, and `changed` (relative) in any case.

        A file that can't be used keeps the content that it had before, an error says why. Raises OSError if the
        directory itself can't be read.
        """
        found: dict[str, _File] = {}
        for name, path in sorted(self._walk()):
            file = self._read(name, path, name in changed)
            if file:
                found[name] = file
        self._files = found
        view = self._view()
        self._report(view.errors)
        return view

    def _walk(self) -> Iterator[tuple[str, Path]]:
        pending = [self._directory]
        read = {}
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
            read[directory] = inode
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                # Links to directories are not followed: they can go round. Links to files are how Kubernetes mounts
                # a ConfigMap.
                if entry.is_dir(follow_symlinks=False):
                    if directory != self._directory or entry.name != STATUS_DIRECTORY:
                        pending.append(Path(entry.path))
                elif entry.name.endswith(SUFFIXES):
                    count += 1
                    if count > FILES_MAX:
                        raise OSError(f"{self._directory} holds more than {FILES_MAX} manifests")
                    path = Path(entry.path)
                    yield str(path.relative_to(self._directory)), path
        self.directories = read

    def _read(self, name: str, path: Path, changed: bool) -> _File | None:
        """The file as it counts now, None if it has gone."""
        before = self._files.get(name, _File(None))
        signature: Signature | None = None
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
            # No signature: whatever it was may pass, and is tried again with every scan.
            return _File(None, before.content, f"can't be read: {error.strerror or error}")
        except (ManifestError, gojson.JsonError) as error:
            return _File(signature, before.content, str(error))
        for kind in content.passed_over:
            log.info("%s: %s is passed over: only pods and NetworkAttachmentDefinitions count", path, kind)
        return _File(signature, content)

    def _view(self) -> View:
        pods: dict[Key, Pod] = {}
        networks: dict[Key, NetworkAttachmentDefinition] = {}
        owners: dict[tuple[str, Key], str] = {}
        errors: dict[str, list[str]] = {}
        for name, file in self._files.items():
            problems = [file.error] if file.error else []
            problems += _merge(name, "Pod", file.content.pods, pods, owners)
            problems += _merge(name, "NetworkAttachmentDefinition", file.content.networks, networks, owners)
            if problems:
                errors[name] = problems
        return View(pods, networks, {name: "; ".join(problems) for name, problems in errors.items()})

    def _report(self, errors: Mapping[str, str]) -> None:
        """Log what is new about the errors, once."""
        for name, error in errors.items():
            if self._reported.get(name) != error:
                log.error("%s: %s; what it last declared stays in effect", self._directory / name, error)
        for name in self._reported.keys() - errors.keys():
            log.info("%s: in order again, or gone", self._directory / name)
        self._reported = dict(errors)


def _merge(
    file: str,
    kind: str,
    declared: Collection[Object],
    into: dict[Key, Object],
    owners: dict[tuple[str, Key], str],
) -> Iterator[str]:
    """Add what `file` declares; the first file by name keeps what two declare, the second gets the problem."""
    for item in declared:
        key: Key = (item.namespace, item.name)
        owner = owners.setdefault((kind, key), file)
        if key in into:
            yield f"{kind} {item} is declared in {owner} already"
        else:
            into[key] = item
