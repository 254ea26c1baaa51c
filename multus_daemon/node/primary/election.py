"""Elect the primary configuration: the file that the settings name, else the first suitable file of a directory.

Like the runtime and upstream, it takes the first file by name, if `netconf` accepts its name and content. The result
depends only on the directory, so a restart elects the same file. A new file that sorts before the elected one replaces
it after a while. If the elected file is removed, it is waited for: agents remove and rewrite theirs when they start.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from multus_daemon import deadlines
from multus_daemon.cluster.conf_files import NodeConfFiles
from multus_daemon.spec import netconf
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError

log = logging.getLogger(__name__)

FILES_MAX: Final = 1000
_SHOWN: Final = 10

_Signature = tuple[int, int, int]
"""Modification time in ns, size and inode of a file."""


class NoPrimaryError(Exception):
    """There is no primary configuration now; the message says why, and what the daemon waits for."""


@dataclass(frozen=True, slots=True)
class Primary:
    """The elected primary configuration."""

    path: Path
    config: NetworkConfig


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    config: NetworkConfig | None = None
    """The file's configuration; None if the file can't be elected."""
    problem: str = ""
    broken: bool = False
    """True if the file can't be parsed: it may be half written."""


@dataclass(eq=False, slots=True)
class Election:
    """Elects the primary configuration at each call, and remembers the last result."""

    directory: Path
    files: NodeConfFiles
    named: str
    """The setting `multusMasterCNI`."""
    plugin_type: str
    """The shim's type."""
    clock: Callable[[], float]
    """Returns seconds."""
    ours: str
    """The name of our file if it is in this directory. A file that sorts before it does not replace the elected one:
    the runtime itself uses that file."""
    passed_over: tuple[tuple[str, str], ...] = ()
    """Files that were not suitable at the last look, and the reasons."""
    _elected: str = ""
    _missing_since: float | None = None
    _seen: dict[str, tuple[_Signature, float]] = field(default_factory=dict)
    """Keys are file names. Values are the signature and the time of its first look."""

    def remember(self, path: str) -> None:
        """Use the file `path`, which an earlier daemon elected, if it is in this directory."""
        if Path(path).parent == self.directory:
            self._elected = Path(path).name

    def primary(self) -> Primary:
        """Elect, and return the primary configuration. Blocks. Raises NoPrimaryError."""
        if self.named:
            return self._by_name()
        candidates = self._candidates()
        self.passed_over = tuple((other.name, other.problem) for other in candidates if other.problem)
        first = next((candidate for candidate in candidates if candidate.config), None)
        before = [candidate for candidate in candidates if not first or candidate.name < first.name]
        awaited = next((item for item in before if item.broken and not self._settled(item)), None)
        if self._elected:
            present = next((candidate for candidate in candidates if candidate.name == self._elected), None)
            if successor := self._successor(present, None if awaited else first):
                return self._elect(successor, candidates)
            path = self.directory / self._elected
            if present is not None and present.config:
                return Primary(path, present.config)
            if present is not None and present.broken:
                raise NoPrimaryError(f"{path}, the primary network's configuration, can't be read: {present.problem}")
            what = f"can no longer be it: {present.problem}" if present else "is gone"
            then = self._why_none(candidates)
            if first is not None:
                seconds = deadlines.PRIMARY_MISSING_SECONDS
                then = f"it is waited for {seconds:.0f} s, then {first.name} takes its place"
            raise NoPrimaryError(f"{path}, the primary network's configuration, {what}; {then}")
        if awaited:
            raise NoPrimaryError(
                f"{self.directory / awaited.name} can't be read, and would be the primary network's: {awaited.problem}"
            )
        if first is None:
            raise NoPrimaryError(self._why_none(candidates))
        return self._elect(first, candidates)

    def _successor(self, present: _Candidate | None, first: _Candidate | None) -> _Candidate | None:
        """Return the file that replaces the elected one now; None if none does."""
        if present is not None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = self.clock()
        if first is None or first is present:
            return None
        if self.ours <= first.name < self._elected and self._settled(first):
            return first
        if self._missing_since is None:
            # A file that is still there is replaced at once only if it is not suitable any more.
            return None if present and (present.config or present.broken) else first
        return first if self.clock() - self._missing_since >= deadlines.PRIMARY_MISSING_SECONDS else None

    def _settled(self, candidate: _Candidate) -> bool:
        return self.clock() - self._seen[candidate.name][1] >= deadlines.PRIMARY_SETTLE_SECONDS

    def _elect(self, candidate: _Candidate, candidates: list[_Candidate]) -> Primary:
        passed_over = [
            f"{other.name} ({other.problem})" for other in candidates if other.problem and other.name < candidate.name
        ]
        log.info(
            "%s is the primary network's configuration%s%s",
            self.directory / candidate.name,
            f", in place of {self._elected}" if self._elected else "",
            f"; passed over: {', '.join(passed_over)}" if passed_over else "",
        )
        self._elected = candidate.name
        self._missing_since = None
        assert candidate.config is not None
        return Primary(self.directory / candidate.name, candidate.config)

    def _by_name(self) -> Primary:
        path = self.directory / self.named.lstrip("/")
        if not path.is_file():
            raise NoPrimaryError(f"{path} (multusMasterCNI) does not exist; the daemon waits for it")
        try:
            config = self.files.at_path(str(path))
        except CniError as error:
            raise NoPrimaryError(f"{path} (multusMasterCNI) can't be read: {error}") from error
        if problem := netconf.own_problem(config, self.plugin_type):
            raise NoPrimaryError(f"{path} (multusMasterCNI) can't be the primary network: {problem}")
        return Primary(path, config)

    def _candidates(self) -> list[_Candidate]:
        """Return every file that is not hidden, by name. Raises NoPrimaryError if the directory can't be listed."""
        try:
            found = self._list()
        except OSError as error:
            raise NoPrimaryError(
                f"{self.directory} (multusAutoconfigDir) can't be listed: {error.strerror or error}"
            ) from error
        self._seen = {
            name: before if (before := self._seen.get(name)) and before[0] == signature else (signature, self.clock())
            for name, signature in found
        }
        return [self._judge(name) for name, _ in found]

    def _list(self) -> list[tuple[str, _Signature]]:
        found = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                # A file may be removed meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if not entry.name.startswith(".") and entry.is_file():
                        status = entry.stat()
                        found.append((entry.name, (status.st_mtime_ns, status.st_size, status.st_ino)))
        if len(found) > FILES_MAX:
            raise OSError(f"it has more than {FILES_MAX} files")
        return sorted(found)

    def _judge(self, name: str) -> _Candidate:
        if problem := netconf.name_problem(name):
            return _Candidate(name, problem=problem)
        try:
            config = self.files.at_path(str(self.directory / name))
        except CniError as error:
            return _Candidate(name, problem=str(error), broken=True)
        if problem := netconf.content_problem(config, self.plugin_type):
            return _Candidate(name, problem=problem)
        return _Candidate(name, config)

    def _why_none(self, candidates: list[_Candidate]) -> str:
        judged = [f"{item.name}: {item.problem}" for item in candidates if not item.name.startswith(netconf.OWN_PREFIX)]
        seen = f" ({', '.join(judged[:_SHOWN])}{', ...' if len(judged) > _SHOWN else ''})" if judged else ""
        return (
            f"no file in {self.directory} can be the primary network's configuration{seen}; one that ends in "
            f"{' or '.join(netconf.SUFFIXES)} is waited for, or name one in multusMasterCNI"
        )
