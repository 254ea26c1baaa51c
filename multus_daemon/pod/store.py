"""The record of each container, in `<cniDir>/attachments/<containerID>.json`; the files of upstream are read too.

Set aside: `<cniDir>/aside/<containerID>.json`, a line `{"since":<Unix time>,"why":<last error>}`, then the record.

The record that an ADD begins with must survive a power failure, as the files of IPAM plugins do. The results need not:
after a power failure the container is gone, and the first record has all that a DEL needs. So they are appended as
another line, without fsync: if a new file replaced the first without fsync, some file systems would lose both. Each
line is written with its newline.

With `upstream_too` each durable record is also written in upstream's format, for a roll-back.

Files are 0600 in a directory 0700, written with fsync and rename; no symbolic link is followed. All methods block:
`load` for a tenth of a millisecond, `save` and `remove` as long as the disk takes, `recover` and `containers` longer
the more files there are.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec

from multus_daemon.plugins.cache import Entry, ResultCache, is_complete
from multus_daemon.pod import record_format, upstream
from multus_daemon.runtime import fs
from multus_daemon.spec.attachment import ContainerRecord, SetAside
from multus_daemon.spec.cni import gojson, names
from multus_daemon.spec.cni.errors import CniError, InvalidEnvironmentError
from multus_daemon.spec.cni.names import ContainerId
from multus_daemon.spec.ports import CorruptRecordError

log = logging.getLogger(__name__)

_SUFFIX: Final = ".json"
_KEPT: Final = ".kept-"
_WHY_MAX: Final = 4096
"""Maximum characters of `why` in a file of `aside/`."""


class _Head(msgspec.Struct, frozen=True):
    """The first line of a file in `aside/`; the record follows."""

    since: float
    why: str


_decode_head: Final = msgspec.json.Decoder(_Head).decode


class FileStore:
    """The write-ahead record of each container, on disk before the first plugin runs."""

    def __init__(self, cni_dir: Path, cache: ResultCache, *, upstream_too: bool = False) -> None:
        """`cache` is in the same `cni_dir`; `upstream_too`: write what upstream needs to find a container, too."""
        self._cni_dir = cni_dir
        self._directory = cni_dir / "attachments"
        self._aside = cni_dir / "aside"
        self._cache = cache
        self._upstream_too = upstream_too

    def sweep(self) -> None:
        """Make the directories safe, and remove the temporary files of writers that were killed.

        `cniDir` itself may be a link, and readable but not writable by all users. Failures are logged, as the daemon
        must serve DELs even on a read-only disk. Raises OSError if a directory in `cniDir` is a link or another user's.
        """
        self._refuse_writers()
        for directory in (self._directory, self._cni_dir / "results", self._aside):
            try:
                if fs.repair_private_directory(directory):
                    log.warning("directory %s was accessible to other users: its mode is now 0700", directory)
            except FileNotFoundError:
                continue
            except (NotADirectoryError, PermissionError):
                raise
            except OSError as error:
                log.error(
                    "directory %s is accessible to other users, and its mode can't be changed: %s", directory, error
                )
        try:
            self.tidy(own=True)
            self._remove_emptied()
        except OSError as error:
            log.error("temporary files in %s can't be removed: %s", self._cni_dir, error)

    def tidy(self, *, own: bool = False) -> None:
        """Remove temporary files of writers that have ended, such as an earlier daemon. Raises OSError."""
        self._adopt(own=own)
        self._cache.sweep(own=own)
        fs.sweep(self._aside, own=own)
        fs.sweep(self._cni_dir, own=own)

    def _adopt(self, *, own: bool) -> None:
        """Rename records that were written but not renamed; remove other temporary files. Raises OSError.

        A power failure can undo a rename without fsync, and a removal before it: then there is a record of an earlier
        ADD of the same container. If a temporary file is newer than the boot, nothing was attached for it.
        """
        for path, name in fs.temporary_files(self._directory, own=own).items():
            if f"-{fs.boot()}-" in path.name:
                fs.remove(path)
                continue
            try:
                record = record_format.decode(fs.read_limited(path, follow=False))
            except (record_format.RecordFormatError, FileNotFoundError):
                fs.remove(path)
                continue
            place = self._own_path(record.sandbox.container_id)
            if name == os.path.basename(place) and _is_newer(record, place):
                log.warning(
                    "record of container %s is restored: a power failure had lost its rename",
                    record.sandbox.container_id,
                )
                path.rename(place)
            else:
                fs.remove(path)

    def _remove_emptied(self) -> None:
        """Remove upstream's files that a power failure emptied, if nothing else is known of their containers.

        (No daemon fsyncs them.) The containers are gone, and an empty file would fail each GC. Raises OSError.
        """
        for name in _files(self._cni_dir):
            path = self._cni_dir / name
            if names.container_id_problem(name) or (self._directory / f"{name}{_SUFFIX}").exists():
                continue
            status = path.lstat()
            if status.st_size == 0 and fs.is_of_earlier_boot(status) and not self._cache.entries(ContainerId(name)):
                log.warning("%s is removed: a power failure has emptied it", path)
                fs.remove(path)

    def _refuse_writers(self) -> None:
        try:
            mode = stat.S_IMODE(self._cni_dir.stat().st_mode)
            if mode & 0o022:
                log.warning(
                    "other users than root could write to %s with mode %o: the mode is corrected", self._cni_dir, mode
                )
                self._cni_dir.chmod(mode & ~0o022)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.error("other users can write to %s, and its mode can't be changed: %s", self._cni_dir, error)

    def load(self, container_id: ContainerId) -> ContainerRecord | None:
        """Return our own record; without one, upstream's. Reads these two files only.

        Raises CorruptRecordError if one exists and is not readable, InvalidEnvironmentError for an invalid id, OSError.
        """
        own = self._own_path(container_id)
        try:
            record = record_format.decode(fs.read_limited(own, follow=False))
            if record.sandbox.container_id != container_id:
                raise record_format.RecordFormatError(
                    f"the record is for another container, {record.sandbox.container_id}"
                )
            return record
        except FileNotFoundError:
            return self._left_by_upstream(container_id, ())
        except record_format.RecordFormatError as error:
            raise CorruptRecordError(f"record can't be read: {own}: {error}") from error
        except OSError as error:
            # A symbolic link (ELOOP), no file (EINVAL), one too large (EFBIG): not ours.
            if error.errno not in (errno.ELOOP, errno.EFBIG, errno.EINVAL):
                raise
            raise CorruptRecordError(f"record can't be read: {own}: {error.strerror}") from error

    def recover(self, container_id: ContainerId) -> ContainerRecord | None:
        """Return a record made from upstream's file and libcni's result cache; None if neither has the container.

        Lists the whole result cache. If our own record exists, but is unreadable, the cache must be complete: a network
        that it lacks would never be detached. Raises CorruptRecordError if a file exists and too little is readable,
        OSError, InvalidEnvironmentError for an invalid id.
        """
        own = self._own_path(container_id)
        if self._aside_path(container_id).exists():
            return None
        entries = self._cache.entries(container_id)
        try:
            record = self._left_by_upstream(container_id, entries)
        except CorruptRecordError as error:
            record = upstream.from_entries(container_id, entries)
            if record is None:
                raise CorruptRecordError(f"{error}, and the result cache has nothing of the container") from error
            log.warning("the record of container %s is made from the result cache: %s", container_id, error)
        record = record or upstream.from_entries(container_id, entries)
        if record and os.path.exists(own) and not is_complete(entries) and not self._is_all_in_upstreams(record):
            raise CorruptRecordError(f"{own} can't be read, and libcni's result cache may lack some of its attachments")
        return None if record is None else replace(record, foreign=True)

    def _is_all_in_upstreams(self, record: ContainerRecord) -> bool:
        """Return True if upstream's file, which is written with ours, has as many networks as `record`."""
        try:
            listed = gojson.loads(fs.read_limited(self._cni_dir / record.sandbox.container_id, follow=False))
        except (OSError, gojson.JsonError):
            return False
        return isinstance(listed, list) and len(listed) == len(record.attachments)

    def _left_by_upstream(self, container_id: ContainerId, entries: Sequence[Entry]) -> ContainerRecord | None:
        """Return the record of upstream's file, completed from `entries`. Raises CorruptRecordError, OSError."""
        path = f"{self._cni_dir}/{container_id}"
        try:
            # A directory can have the name of a container: `results`.
            if not stat.S_ISREG((status := os.lstat(path)).st_mode):
                return None
            data = fs.read_limited(path, follow=False)
            record = upstream.from_delegates(container_id, data, entries, status.st_mtime)
        except FileNotFoundError:
            return None
        except (gojson.JsonError, fs.FileTooLargeError) as error:
            raise CorruptRecordError(f"upstream's record can't be read: {path}: {error}") from error
        return replace(record, foreign=True)

    def save(self, record: ContainerRecord, *, durable: bool = True) -> None:
        """Write the record so that it survives a crash; after an error the old one is there. Raises as `remove` does.

        `durable` False: after a power failure the last durable record, which must exist, may be there again.
        """
        path = self._own_path(record.sandbox.container_id)
        data = record_format.encode(record) + b"\n"
        if not durable:
            _append(path, data)
            return
        if len(data) > fs.DEFAULT_READ_LIMIT:
            raise fs.FileTooLargeError(path, fs.DEFAULT_READ_LIMIT)
        fs.ensure_private_directory(self._directory)
        # The rename of a new file may be lost: `sweep` finds its temporary file.
        fs.write_atomic(path, data, fsync_name=os.path.exists(path))
        if self._upstream_too:
            self._save_for_upstream(record)

    def _save_for_upstream(self, record: ContainerRecord) -> None:
        """Write the container's file in upstream's format, without fsync, as upstream does. A failure is logged."""
        path = self._cni_dir / record.sandbox.container_id
        try:
            if data := upstream.to_delegates(record):
                fs.write_atomic(path, data, fsync=False)
        except (OSError, CniError, gojson.JsonError) as error:
            log.error("an upstream daemon could not delete pod %s after a roll-back: %s: %s", record.pod, path, error)

    def mark(self, container_id: ContainerId, leaving: Collection[tuple[str, str]]) -> None:
        """Mark attachments as leaving on disk, without fsync: after a power failure the container is gone anyway.

        Raises OSError, FileNotFoundError if the container has no record of ours.
        """
        _append(self._own_path(container_id), record_format.encode_mark(leaving) + b"\n")

    def remove(self, container_id: ContainerId) -> None:
        """Remove our own record and upstream's, if they exist. Raises OSError, InvalidEnvironmentError."""
        own = self._own_path(container_id)
        # A directory can have the name of a container: `results`.
        with contextlib.suppress(IsADirectoryError):
            fs.remove(f"{self._cni_dir}/{container_id}")
        # Last: while ours is there the container is known.
        fs.remove(own)

    def set_aside(self, record: ContainerRecord, *, since: float, why: str) -> None:
        """Move the record to `aside/`, and merge it with the container's file there. Raises OSError.

        An unreadable file of the container may have more than `record`: it is renamed and kept.
        """
        path = self._aside_path(record.sandbox.container_id)
        before = self._read_aside(record.sandbox.container_id).record if path.exists() else None
        if path.exists() and before is None:
            self._keep(path)
        own = Path(self._own_path(record.sandbox.container_id))
        if own.exists() and not self._is_readable(own):
            fs.ensure_private_directory(self._aside)
            self._keep(own)
        if before is not None:
            more = tuple(item for item in before.attachments if item not in record.attachments)
            record = replace(record, attachments=(*more, *record.attachments))
        fs.ensure_private_directory(self._aside)
        head = msgspec.json.encode(_Head(since, why[:_WHY_MAX]))
        fs.write_atomic(path, head + b"\n" + record_format.encode(record) + b"\n")
        self.remove(record.sandbox.container_id)

    def _keep(self, path: Path) -> None:
        kept = self._aside / f"{path.stem}{_KEPT}{time.time_ns()}"
        path.rename(kept)
        log.warning("%s can't be read, and is kept as %s", path, kept)

    def _is_readable(self, path: Path) -> bool:
        try:
            record_format.decode(fs.read_limited(path, follow=False))
        except (OSError, record_format.RecordFormatError):
            return False
        return True

    def aside(self) -> list[SetAside]:
        """Return the containers that are set aside, sorted. Raises OSError."""
        return [self._read_aside(container_id) for container_id in _valid(_records_in(self._aside))]

    def _read_aside(self, container_id: ContainerId) -> SetAside:
        path = self._aside_path(container_id)
        try:
            first, _, rest = fs.read_limited(path, follow=False).partition(b"\n")
            head = _decode_head(first)
            return SetAside(container_id, head.since, head.why, record_format.decode(rest))
        except (OSError, msgspec.MsgspecError, record_format.RecordFormatError) as error:
            return SetAside(container_id, 0.0, f"can't be read: {path}: {error}", None)

    def forget(self, container_id: ContainerId) -> bool:
        """Remove all files of the container, also its cached results; return whether there was one."""
        path = self._aside_path(container_id)
        entries = self._cache.entries(container_id)
        known = bool(entries) or path.exists() or container_id in self.containers()
        for entry in entries:
            self._cache.remove(entry.network, container_id, entry.ifname)
        for kept in [name for name in _files(self._aside) if name.startswith(f"{container_id}{_KEPT}")]:
            fs.remove(self._aside / kept)
        fs.remove(path)
        self.remove(container_id)
        return known

    def _aside_path(self, container_id: ContainerId) -> Path:
        return self._aside / os.path.basename(self._own_path(container_id))

    def containers(self, *, foreign: bool = True) -> list[ContainerId]:
        """Return the ids of our own records and, with `foreign`, of upstream's, sorted. Raises OSError."""
        return _valid({*_records_in(self._directory), *(_files(self._cni_dir) if foreign else ())})

    def leftovers(self, passed_over: Set[ContainerId], limit: int) -> dict[ContainerId, ContainerRecord | None]:
        """Return up to `limit` containers of upstream's daemon, without a record of ours. Raises OSError."""
        known = {*_records_in(self._directory), *_records_in(self._aside), *passed_over}
        listed = _valid(set(_files(self._cni_dir)) - known)[:limit]
        found = self._cache.of_containers(listed, known, limit - len(listed))
        return {
            ContainerId(name): self._leftover(ContainerId(name), sorted(entries, key=attrgetter("network")))
            for name, entries in found.items()
            if not names.container_id_problem(name)
        }

    def _leftover(self, container_id: ContainerId, entries: Sequence[Entry]) -> ContainerRecord | None:
        try:
            record = self._left_by_upstream(container_id, entries)
        except (CorruptRecordError, OSError) as error:
            log.warning("leftover of container %s: %s", container_id, error)
            record = None
        record = record or upstream.from_entries(container_id, entries)
        return None if record is None else replace(record, foreign=True)

    def _own_path(self, container_id: ContainerId) -> str:
        # Checked again where the id becomes a path.
        if problem := names.container_id_problem(container_id):
            raise InvalidEnvironmentError(problem, repr(container_id))
        return f"{self._directory}/{container_id}{_SUFFIX}"


def _append(path: str, data: bytes) -> None:
    """Append to a record's file. Raises OSError, also if `load` would refuse the file."""
    if os.stat(path).st_size + len(data) > fs.DEFAULT_READ_LIMIT:
        raise fs.FileTooLargeError(path, fs.DEFAULT_READ_LIMIT)
    fs.append(path, data)


def _is_newer(record: ContainerRecord, place: str) -> bool:
    """Return True if there is no record at `place`, or one of an earlier ADD than `record`. Raises OSError."""
    try:
        return record_format.decode(fs.read_limited(place, follow=False)).created < record.created
    except FileNotFoundError:
        return True
    except record_format.RecordFormatError:
        return False


def _files(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _records_in(directory: Path) -> list[str]:
    return [name.removesuffix(_SUFFIX) for name in _files(directory) if name.endswith(_SUFFIX)]


def _valid(found: Iterable[str]) -> list[ContainerId]:
    """Return the names that are container ids, sorted."""
    return sorted(ContainerId(name) for name in found if not names.container_id_problem(name))
