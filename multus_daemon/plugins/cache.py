"""libcni's result cache: the arguments and the result of each ADD, in `<cniDir>/results`.

Format: containernetworking/cni `libcni/api.go` ("cniCacheV1"), compact JSON in the struct's order, files 0600 in a
directory 0700, named `<network>-<container>-<interface>`. Upstream's daemon and libcni can read these files, and this
module reads theirs. Writes are atomic. All methods block.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from multus_daemon.runtime import fs
from multus_daemon.spec.cni import gojson, names, result
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError
from multus_daemon.spec.cni.names import FILE_NAME_MAX_BYTES
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)

KIND: Final = "cniCacheV1"
# Upstream leaves the files of failed calls behind.
_SEARCHED_MAX: Final = 5000
_NotEmpty = Annotated[str, Meta(min_length=1)]


class Entry(
    Struct,
    frozen=True,
    omit_defaults=True,
    tag_field="kind",
    tag=KIND,
    rename={
        "container_id": "containerId",
        "ifname": "ifName",
        "network": "networkName",
        "cni_args": "cniArgs",
        "capability_args": "capabilityArgs",
        # libcni ignores unknown keys.
        "networks": "multusNetworks",
    },
):
    """The content of one file in libcni's result cache: an attachment of a container."""

    container_id: _NotEmpty
    config: Annotated[bytes, Meta(min_length=1)]
    """The configuration, single or list, byte for byte."""
    ifname: _NotEmpty
    network: _NotEmpty
    netns: str = ""
    cni_args: names.Pairs = ()
    capability_args: Mapping[str, Any] = {}
    result: dict[str, Any] | None = None
    """The result object, with its cniVersion."""
    networks: int = 0
    """Number of entries that the container has, including this one; 0 if not known, as in libcni's files."""

    def encode(self) -> bytes:
        """Return the file's content."""
        return gojson.dumps(msgspec.to_builtins(self, order="deterministic"), sort_keys=False)


_decode: Final = msgspec.json.Decoder(Entry).decode


def decode(data: bytes) -> Entry:
    """Return the entry in a file's content. Raises gojson.JsonError unless it is a complete `cniCacheV1` entry."""
    try:
        return _decode(data)
    except (ValueError, RecursionError) as error:
        raise gojson.JsonError(str(error)) from error


def is_complete(entries: Sequence[Entry]) -> bool:
    """Return True if these are certainly all entries of their container (see `Entry.networks`)."""
    return 0 < max((entry.networks for entry in entries), default=0) == len(entries)


def name_problem(network: str, container_id: str, ifname: str) -> str:
    """Return why the network's name is too long for a file of the cache; empty if it is not."""
    length, rest = (len(text.encode("utf-8", "surrogatepass")) for text in (network, f"-{container_id}-{ifname}"))
    room = FILE_NAME_MAX_BYTES - rest
    return f"network name is too long: {length} bytes, and {room} is the most here" if length > room else ""


class ResultCache:
    """The directory `<cniDir>/results`."""

    def __init__(self, cni_dir: Path) -> None:
        self._directory = f"{cni_dir}/results"

    def sweep(self, *, own: bool = True) -> None:
        """Remove temporary files of killed writers; `own` as in `fs.temporary_files`. Raises OSError."""
        fs.sweep(Path(self._directory), own=own)

    def _path(self, network: str, container_id: str, ifname: str) -> str:
        parts = (network, container_id, ifname)
        if not all(parts) or any("/" in part or "\0" in part for part in parts):
            raise InvalidNetworkConfigError(
                "the cached result can't have a file: network, container id or interface name is empty or contains '/'",
                f"{network!r}-{container_id!r}-{ifname!r}",
            )
        return f"{self._directory}/{'-'.join(parts)}"

    def write(self, entry: Entry) -> None:
        """Write the entry without fsync (0.6 ms): the container's record has the result, too. Raises OSError.

        Raises InvalidNetworkConfigError for an empty name.
        """
        path = self._path(entry.network, entry.container_id, entry.ifname)
        data = entry.encode()
        if len(data) > fs.DEFAULT_READ_LIMIT:
            raise fs.FileTooLargeError(path, fs.DEFAULT_READ_LIMIT)
        fs.ensure_private_directory(self._directory)
        fs.write_atomic(path, data, fsync=False)

    def remove(self, network: str, container_id: str, ifname: str) -> None:
        """Remove the entry if it exists. Raises as `write` does."""
        if name_problem(network, container_id, ifname):
            return
        fs.remove(self._path(network, container_id, ifname))

    def read_result(self, network: str, container_id: str, ifname: str, implied_version: str) -> Result | None:
        """Return the result of the ADD; None if there is none that can be read."""
        if name_problem(network, container_id, ifname):
            return None
        try:
            data = fs.read_limited(self._path(network, container_id, ifname), follow=False)
            fields = decode(data).result
            return None if fields is None else result.from_object(fields, implied_version)
        except FileNotFoundError:
            return None
        except (OSError, CniError, gojson.JsonError) as error:
            what = f"network {network} for container {container_id}, interface {ifname},"
            log.warning("cached result of %s can't be read: %s", what, error)
            return None

    def entries(self, container_id: str) -> list[Entry]:
        """Return the entries of one container, sorted by network and interface.

        Names and ids may contain `-`, so the content decides whether a file that may belong to the container does.
        Raises OSError if the directory exists and cannot be listed.
        """
        # The needle is neither at the start nor at the end.
        found = self._entries(lambda name: f"-{container_id}-" in name[1:-1])
        mine = [entry for entry in found if entry.container_id == container_id]
        return sorted(mine, key=lambda entry: (entry.network, entry.ifname))

    def mentioning(self, text: str, *, other_than: str) -> Iterator[Entry]:
        """Yield entries with `text`, not of container `other_than`; reads 5000 files at most. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as listed:
            for item in itertools.islice(listed, _SEARCHED_MAX):
                with contextlib.suppress(OSError, gojson.JsonError):
                    data = b"" if item.name[0] == "." else fs.read_limited(item.path, follow=False)
                    if text.encode() in data and (entry := decode(data)).container_id != other_than:
                        yield entry

    def of_containers(self, wanted: Collection[str], passed_over: Set[str], more: int) -> dict[str, list[Entry]]:
        """Return by container the entries of those `wanted`, and of up to `more` others that are not `passed_over`.

        Raises OSError if the directory exists and cannot be listed.
        """
        found: dict[str, list[Entry]] = {container_id: [] for container_id in wanted}
        room = len(found) + more
        # Without room for others, only files of known containers are read.
        for entry in self._entries(lambda name: _may_be_of(name, found if len(found) >= room else None, passed_over)):
            if entry.container_id in found:
                found[entry.container_id].append(entry)
            elif len(found) < room and entry.container_id not in passed_over:
                found[entry.container_id] = [entry]
        return found

    def _entries(self, may_be: Callable[[str], bool]) -> Iterator[Entry]:
        """Yield the entries of files for whose name `may_be` is true; log the number of unreadable files.

        Upstream never removes files of failed calls, so there may be hundreds of thousands. Raises OSError.
        """
        unreadable = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as listed:
            for item in listed:
                # A dot name is a temporary file of write_atomic.
                if item.name[0] == "." or not may_be(item.name):
                    continue
                try:
                    entry = decode(fs.read_limited(item.path, follow=False))
                except FileNotFoundError:
                    continue
                except (OSError, gojson.JsonError) as error:
                    unreadable += 1
                    log.debug("cached result %s can't be read: %s", item.path, error)
                    continue
                yield entry
        if unreadable:
            log.warning("%d cached results in %s can't be read", unreadable, self._directory)


def _may_be_of(name: str, candidates: Container[str] | None, passed_over: Set[str]) -> bool:
    """Return True if the file may be of a container that is in `candidates` (None: any) and not in `passed_over`."""
    parts = name.split("-")
    # Networks, ids and interfaces may hold `-` themselves; each of the three has at least one part.
    ids = ["-".join(parts[start:end]) for start in range(1, len(parts) - 1) for end in range(start + 1, len(parts))]
    if any(container_id in passed_over for container_id in ids):
        return False
    return bool(ids) if candidates is None else any(container_id in candidates for container_id in ids)
