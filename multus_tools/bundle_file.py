"""The archive for a bug report: a tar.gz of bounded size, from whose files secrets are removed.

All files are in one directory. `index.json` says what is there, and what is missing and why; `removed.json` lists what
was removed. The archive of a cluster has those of its nodes in `nodes/<node>/`.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import re
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final

import msgspec

from multus_daemon import __version__
from multus_tools.command_line import output_file
from multus_tools.scrub import Removal, Scrubber

SCHEMA: Final = "multusctl.bundle/v1"
INDEX: Final = "index.json"
REMOVED_LIST: Final = "removed.json"
FILE_MAX_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of one file of the archive; a larger one is left out, a longer log is cut."""
NODE_MAX_BYTES: Final = 7 * 1024 * 1024
"""Maximum compressed size of a node's archive. Even with one file more it is below what `kubectl multus` reads."""
UNPACKED_MAX_BYTES: Final = 128 * 1024 * 1024
"""Maximum size of a node's archive, unpacked."""
_RATIO: Final = 16
"""Maximum ratio of unpacked to compressed size, with which a node's archive stays below UNPACKED_MAX_BYTES."""
CLUSTER_MAX_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of a cluster's archive, compressed."""
FILES_MAX: Final = 5000
"""Maximum number of files of a node's archive."""
REMOVALS_MAX: Final = 5000
"""Maximum number of removed secrets that are listed; further ones are counted."""
_MODE: Final = 0o600
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9_./-]|(?<![^/])[.-]")


class BundleError(Exception):
    """The bytes are not an archive of a node; the message says why."""


class _Index(msgspec.Struct):
    """The keys of a node's `index.json` that are read."""

    schema: str
    daemon: str = ""
    """Why no daemon answers; empty if one does."""
    missing: list[dict[str, str]] = []


class _List(msgspec.Struct):
    """`removed.json`."""

    removals: list[dict[str, str]]


# Not made where they are used: threads share them.
_decode_index: Final = msgspec.json.Decoder(_Index).decode
_decode_list: Final = msgspec.json.Decoder(_List).decode


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The checked archive of a node; `files`: without `index.json` and `removed.json`."""

    index: dict[str, Any]
    known: _Index
    removed: list[dict[str, str]]
    files: dict[str, bytes]


@contextlib.contextmanager
def written(program: str, arguments: argparse.Namespace, *, most: int, known: Iterable[str] = ()) -> Iterator[Archive]:
    """Open the archive that the arguments name for the block; then print its name, notes, and what is missing in it.

    `most`: see `Archive`; `known`: secrets to remove. Raises CommandError.
    """
    name = f"multus-bundle-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    file = arguments.file or f"{name}.tar.gz"
    with output_file(file, force=arguments.force) as output:
        archive = Archive(output, name, most=most, scrubber=Scrubber(known))
        yield archive
    if file != "-":
        sys.stdout.write(f"{file}\n")
    missing = (f"{item['name']} is missing: {item['problem']}" for item in archive.missing)
    for line in (*archive.notes, *missing, archive.summary()):
        sys.stderr.write(f"{program}: {line}\n")


class Archive:
    """Writes files to an archive. Add files with secrets under keys first: then `scrub.Scrubber` knows these secrets.

    Thread-safe; all methods block. After `close`, files are ignored.
    """

    def __init__(self, output: IO[bytes], directory: str, *, most: int, scrubber: Scrubber | None = None) -> None:
        """`directory`: name of the archive's only directory. `most`: maximum compressed size in bytes."""
        self.removals: list[dict[str, str]] = []
        self.missing: list[dict[str, str]] = []
        self.notes: list[str] = []
        """Lines for the user."""
        self._lock = threading.Lock()
        self._closed = False
        self._uncounted = 0
        self._scrubber = scrubber or Scrubber()
        self._directory = directory
        self._most = most
        self._files: dict[str, int] = {}
        self._unpacked = 0
        self._output = _Counted(output)
        self._moment = int(time.time())
        # Made with the first file: before it there may be an error instead of an archive.
        self._opened: tuple[gzip.GzipFile, tarfile.TarFile] | None = None

    def json(self, name: str, value: Any) -> None:
        """Add a JSON value, without its secrets."""
        with self._lock:
            cleaned, removals = self._scrubber.value(value)
            self._removed(self._add(name, _encoded(cleaned)), removals)

    def text(self, name: str, text: str) -> None:
        """Add a text, without its secrets; of a long one only the end."""
        with self._lock:
            # A key may be in the part that is cut off.
            cleaned, removals = self._scrubber.text(text)
            data = cleaned.encode("utf-8", "replace")
            if len(data) > FILE_MAX_BYTES:
                data = data[-FILE_MAX_BYTES:].partition(b"\n")[2]
            self._removed(self._add(name, data), removals)

    def lacks(self, name: str, problem: str) -> None:
        """Note in the index why a file is missing."""
        with self._lock:
            self.missing.append({"name": name, "problem": self._scrubber.text(problem)[0]})

    def take(self, unpacked: Unpacked, place: str) -> None:
        """Add the files of a node's archive, which has no secrets, in the directory `place`."""
        with self._lock:
            for name, data in unpacked.files.items():
                self._add(f"{place}/{name}", data)
            self._add(f"{place}/{INDEX}", _encoded(unpacked.index))
            for item in unpacked.removed:
                self._list({**item, "file": f"{place}/{item.get('file', '')}"})
            self.missing += [{**item, "name": f"{place}/{item.get('name', '')}"} for item in unpacked.known.missing]

    def close(self, index: Mapping[str, Any]) -> None:
        """Add the index with the further keys of `index`, and the list of removals; end the archive."""
        with self._lock:
            self._closed = True
            self._put(REMOVED_LIST, _encoded({"removals": self.removals, "notListed": self._uncounted}))
            found = {
                **index,
                "version": __version__,
                "made": self._moment,
                "files": [{"name": name, "bytes": size} for name, size in self._files.items()],
                "missing": self.missing,
                "removed": len(self.removals) + self._uncounted,
            }
            self._put(INDEX, _encoded(self._scrubber.value(found)[0]))
            for stream in reversed(self._open()):
                stream.close()

    def summary(self) -> str:
        """Return in one line what a user must know before publishing the archive."""
        number = len(self.removals) + self._uncounted
        what = f"{number} values were removed, {REMOVED_LIST} lists them" if number else "nothing had to be removed"
        return f"{what}; names and addresses are in it: look through it before you publish it"

    def _add(self, name: str, data: bytes) -> str:
        """Add a file unless a limit forbids it. Return its name in the archive, empty if it is missing."""
        name = _UNUSUAL.sub("_", name)
        problem = ""
        if len(data) > FILE_MAX_BYTES:
            problem = f"larger than {FILE_MAX_BYTES} bytes"
        elif self._output.written > self._most or self._unpacked + len(data) > _RATIO * self._most:
            problem = "the archive would be too large"
        if self._closed:
            return ""
        if problem:
            self.missing.append({"name": name, "problem": problem})
            return ""
        while name in self._files:
            name += "_"
        self._put(name, data)
        return name

    def _put(self, name: str, data: bytes) -> None:
        self._files[name] = len(data)
        self._unpacked += len(data)
        member = tarfile.TarInfo(f"{self._directory}/{name}")
        member.size, member.mode, member.mtime = len(data), _MODE, self._moment
        self._open()[1].addfile(member, io.BytesIO(data))

    def _open(self) -> tuple[gzip.GzipFile, tarfile.TarFile]:
        if self._opened is None:
            stream = gzip.GzipFile(filename="", fileobj=self._output, mode="wb", mtime=self._moment)
            self._opened = stream, tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT)
        return self._opened

    def _removed(self, name: str, removals: list[Removal]) -> None:
        for item in removals if name else ():
            self._list({"file": name, "key": item.where, "reason": item.reason})

    def _list(self, item: dict[str, str]) -> None:
        if len(self.removals) < REMOVALS_MAX:
            self.removals.append(item)
        else:
            self._uncounted += 1


def unpack(data: bytes) -> Unpacked:
    """Read the archive of a node, which may be hostile, within limits. Raises BundleError."""
    try:
        # A few bytes may unpack to any number.
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(data)).read(UNPACKED_MAX_BYTES + 1)
        if len(unpacked) > UNPACKED_MAX_BYTES:
            raise ValueError(f"larger than {UNPACKED_MAX_BYTES} bytes unpacked")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as tar:
            files = dict(_members(tar))
        text = files.pop(INDEX)
        index, known = json.loads(text), _decode_index(text)
        removed = _decode_list(files.pop(REMOVED_LIST)).removals
    except KeyError as error:
        raise BundleError(f"the archive has no file {error}") from error
    except (OSError, EOFError, ValueError, TypeError, tarfile.TarError, RecursionError) as error:
        raise BundleError(f"not an archive: {error}") from error
    if known.schema != SCHEMA:
        raise BundleError(
            f"has schema {known.schema[:80]!r}, and this program reads {SCHEMA}: use that of the writer's version"
        )
    return Unpacked(index, known, removed, files)


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for number, member in enumerate(tar):
        name = member.name.partition("/")[2]
        if number == FILES_MAX:
            raise ValueError(f"more than {FILES_MAX} files")
        if not member.isreg() or not _NAME.fullmatch(name) or member.size > FILE_MAX_BYTES:
            raise ValueError(f"an unexpected entry: {member.name[:80]!r}")
        content = tar.extractfile(member)
        assert content is not None
        yield name, content.read()


def _encoded(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class _Counted:
    """A stream that counts what is written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.written = 0

    def write(self, data: bytes) -> int:
        self.written += len(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()
