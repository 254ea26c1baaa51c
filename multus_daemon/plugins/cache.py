"""libcni's result cache: the arguments and the result of each ADD, in `<cniDir>/results`.

Format: containernetworking/cni `libcni/api.go` ("cniCacheV1"), compact JSON in the struct's order, files 0600 in a
directory 0700, named `<network>-<container>-<interface>`. An upstream daemon and libcni can read our files, and we can
read theirs; ours are never half written. All methods block.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import os
from collections.abc import Collection, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from multus_daemon.runtime import fs
from multus_daemon.spec.cni import gojson, names, result
from multus_daemon.spec.cni.errors import CniError, InvalidNetworkConfigError
from multus_daemon.spec.cni.names import FILE_NAME_MAX_BYTES
from multus_daemon.spec.cni.result import Result

log = logging.getLogger(__name__)

KIND: Final = "cniCacheV1"
# Upstream leaves the files of failed calls behind.
_SEARCHED_MAX: Final = 5000
# libcni ignores unknown keys.
_NETWORKS: Final = "multusNetworks"


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of one file in libcni's result cache: an attachment of a container."""

    container_id: str
    config: bytes
    """The configuration, single or list, byte for byte."""
    ifname: str
    network: str
    netns: str = ""
    cni_args: names.Pairs = ()
    capability_args: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    """The result object, with its cniVersion."""
    networks: int = 0
    """Number of entries that the container has with this one; 0 if not known, as in libcni's files."""

    def encode(self) -> bytes:
        """Return the file's content."""
        fields: dict[str, Any] = {
            "kind": KIND,
            "containerId": self.container_id,
            "config": base64.b64encode(self.config).decode("ascii"),
            "ifName": self.ifname,
            "networkName": self.network,
        }
        optional = {"netns": self.netns, "cniArgs": [list(pair) for pair in self.cni_args]}
        fields |= {key: value for key, value in optional.items() if value}
        # Go writes maps in the order of their keys, and the struct in that of its fields.
        maps = {"capabilityArgs": self.capability_args, "result": self.result, _NETWORKS: self.networks}
        inner = b"".join(b',"%s":%s' % (key.encode(), gojson.dumps(value)) for key, value in maps.items() if value)
        return gojson.dumps(fields, sort_keys=False)[:-1] + inner + b"}"


def decode(data: bytes) -> Entry:
    """Return the entry in a file's content. Raises gojson.JsonError unless it is a complete entry of our kind."""
    fields = gojson.loads_object(data)
    if (kind := gojson.get_str(fields, "kind")) != KIND:
        raise gojson.JsonError(f"kind: {KIND!r} is needed, not {kind!r}")
    texts = {key: gojson.get_str(fields, key) or "" for key in ("containerId", "ifName", "networkName")}
    config = gojson.get_bytes(fields, "config") or b""
    for key, value in {**texts, "config": config}.items():
        if not value:
            raise gojson.JsonError(f"{key} is missing")
    pairs = gojson.get_list(fields, "cniArgs") or []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise gojson.JsonError("cniArgs: pairs of strings are needed")
    return Entry(
        container_id=texts["containerId"],
        config=config,
        ifname=texts["ifName"],
        network=texts["networkName"],
        netns=gojson.get_str(fields, "netns") or "",
        cni_args=tuple((key, value) for key, value in pairs),
        capability_args=gojson.get_object(fields, "capabilityArgs") or {},
        result=gojson.get_object(fields, "result"),
        networks=gojson.get_int(fields, _NETWORKS) or 0,
    )


def is_complete(entries: Sequence[Entry]) -> bool:
    """Return True if the container is known to have no other entries."""
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
                "no file name for the cached result", f"{network!r}-{container_id!r}-{ifname!r}"
            )
        return f"{self._directory}/{'-'.join(parts)}"

    def write(self, entry: Entry) -> None:
        """Write the entry, without fsync (0.6 ms less): the store's record has it too. Raises OSError.

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
        """Return the result of the ADD; None if there is none that can be read.

        A file without a kind is a result by itself, as libcni before 0.8 wrote it.
        """
        if name_problem(network, container_id, ifname):
            return None
        try:
            data = fs.read_limited(self._path(network, container_id, ifname), follow=False)
            try:
                fields = decode(data).result
            except gojson.JsonError:
                fields = gojson.loads_object(data)
                if gojson.get(fields, "kind") is not None:
                    raise
            return None if fields is None else result.from_object(fields, implied_version)
        except FileNotFoundError:
            return None
        except (OSError, CniError, gojson.JsonError) as error:
            log.warning("cached result of %s for %s, %s, can't be read: %s", network, container_id, ifname, error)
            return None

    def entries(self, container_id: str) -> list[Entry]:
        """Return the entries of one container, sorted by file name; unreadable files are logged.

        Names and ids may hold `-`, so the file's name only chooses candidates and its content decides. Raises OSError
        if the directory exists and cannot be listed.
        """
        needle = f"-{container_id}-"
        try:
            # Upstream never removes the files of failed calls: there may be hundreds of thousands. A dot name is a
            # temporary file of write_atomic. The needle is neither at the start nor at the end.
            with os.scandir(self._directory) as listed:
                names = sorted(item.name for item in listed if needle in item.name[1:-1] and item.name[0] != ".")
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            try:
                entry = decode(fs.read_limited(f"{self._directory}/{name}", follow=False))
            except (OSError, gojson.JsonError) as error:
                log.warning("cached result %s/%s can't be read: %s", self._directory, name, error)
                continue
            if entry.container_id == container_id:
                found.append(entry)
        return found

    def mentioning(self, text: str, *, other_than: str) -> Iterator[Entry]:
        """Yield the entries with `text` of containers `other_than` one; looks at 5000 files at most. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as listed:
            for item in itertools.islice(listed, _SEARCHED_MAX):
                with contextlib.suppress(OSError, gojson.JsonError):
                    data = b"" if item.name[0] == "." else fs.read_limited(item.path, follow=False)
                    if text.encode() in data and (entry := decode(data)).container_id != other_than:
                        yield entry

    def of_containers(self, wanted: Collection[str], passed_over: Set[str], more: int) -> dict[str, list[Entry]]:
        """Return, by container, the entries of those `wanted` and of up to `more` others that are not `passed_over`.

        Lists the directory once: there may be hundreds of thousands of files. Unreadable files are counted in the log.
        Raises OSError if the directory exists and cannot be listed.
        """
        found: dict[str, list[Entry]] = {container_id: [] for container_id in wanted}
        room, unreadable = len(found) + more, 0
        try:
            with os.scandir(self._directory) as listed:
                for item in listed:
                    # Without room for others, only files of known containers are read.
                    candidates = found if len(found) >= room else None
                    if item.name[0] == "." or not _may_be_of(item.name, candidates, passed_over):
                        continue
                    try:
                        entry = decode(fs.read_limited(item.path, follow=False))
                    except FileNotFoundError:
                        continue
                    except (OSError, gojson.JsonError):
                        unreadable += 1
                        continue
                    if entry.container_id in found:
                        found[entry.container_id].append(entry)
                    elif len(found) < room and entry.container_id not in passed_over:
                        found[entry.container_id] = [entry]
        except FileNotFoundError:
            pass
        if unreadable:
            log.warning("%d cached results in %s can't be read", unreadable, self._directory)
        return found


def _may_be_of(name: str, candidates: Container[str] | None, passed_over: Set[str]) -> bool:
    """Return True if the file may be of a container of `candidates` (None: any), and of none of `passed_over`."""
    parts = name.split("-")
    # Networks, ids and interfaces may hold `-` themselves; each of the three has at least one part.
    ids = ["-".join(parts[start:end]) for start in range(1, len(parts) - 1) for end in range(start + 1, len(parts))]
    if any(container_id in passed_over for container_id in ids):
        return False
    return bool(ids) if candidates is None else any(container_id in candidates for container_id in ids)
