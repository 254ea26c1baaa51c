"""Elect the primary network's configuration: the named file, else the first suitable file of a directory.

Files are taken in order of their names, like the runtime and upstream do, if `netconf.primary` accepts them. The result
depends only on the directory, so a restart elects the same file. A new file that sorts before the elected one replaces
it after a while. A removed file is waited for, because agents remove and rewrite theirs when they start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from multus_daemon import deadlines
from multus_daemon.spec.cni.conf import NetworkConfig
from multus_daemon.spec.cni.errors import CniError
from multus_daemon.spec.netconf import primary
from multus_daemon.spec.ports import ConfFiles

log = logging.getLogger(__name__)

FILES_MAX: Final = 1000
_SHOWN: Final = 10

_Signature = tuple[int, int, int]
"""Modification time in ns, size and inode of a file."""


class NoPrimaryError(Exception):
    """There is no primary network now; the message says why, and what the daemon waits for."""


@dataclass(frozen=True, slots=True)
class Primary:
    """The primary network."""

    path: Path
    config: NetworkConfig


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    config: NetworkConfig | None = None
    """It is None if the file can't be elected."""
    problem: str = ""
    broken: bool = False
    """It can't be parsed; it may be half written."""


class Election:
    """Elects again at each call, and remembers the last result."""

    def __init__(
        self, directory: Path, files: ConfFiles, *, named: str, plugin_type: str, clock: Callable[[], float], ours: str
    ) -> None:
        """`named`: the setting `multusMasterCNI`; `plugin_type`: type of the shim; `clock`: seconds.

        `ours`: the name of our file if it is in this directory. The runtime itself uses a file that comes before it, so
        such a file does not replace the elected one.
        """
        self._directory = directory
        self._files = files
        self._named = named.lstrip("/")
        self._plugin_type = plugin_type
        self._clock = clock
        self._ours = ours
        self._elected = ""
        self._missing_since: float | None = None
        self._seen: dict[str, tuple[_Signature, float]] = {}
        """Keys are file names. Values are the signature and the time of its first look."""
        self.passed_over: tuple[tuple[str, str], ...] = ()
        """Files that were not suitable at the last look, and the reasons."""

    def remember(self, path: str) -> None:
        """Adopt the file that an earlier daemon elected, if it is in this directory."""
        if Path(path).parent == self._directory:
            self._elected = Path(path).name

    async def primary(self) -> Primary:
        """Return the primary network as it is now. Raises NoPrimaryError."""
        if self._named:
            return await self._by_name()
        candidates = await self._candidates()
        self.passed_over = tuple((other.name, other.problem) for other in candidates if other.problem)
        first = next((candidate for candidate in candidates if candidate.config), None)
        before = [candidate for candidate in candidates if not first or candidate.name < first.name]
        awaited = next((item for item in before if item.broken and not self._settled(item)), None)
        if self._elected:
            present = next((candidate for candidate in candidates if candidate.name == self._elected), None)
            successor = self._successor(present, None if awaited else first)
            if successor is None and present is not None and (present.config or present.broken):
                return self._accept(present)
            if successor is None:
                raise NoPrimaryError(self._why_not(present, first, candidates))
            return self._elect(successor, candidates)
        if awaited:
            raise NoPrimaryError(
                f"{self._directory / awaited.name} can't be read, and would be the primary network's: {awaited.problem}"
            )
        if first is None:
            raise NoPrimaryError(self._why_none(candidates))
        return self._elect(first, candidates)

    def _successor(self, present: _Candidate | None, first: _Candidate | None) -> _Candidate | None:
        """Return the file that replaces the elected one now, if any."""
        if present is not None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = self._clock()
        if first is None or first is present:
            return None
        if self._ours <= first.name < self._elected and self._settled(first):
            return first
        if self._missing_since is None:
            # A file that is still there is replaced at once only if it is not suitable any more.
            return None if present and (present.config or present.broken) else first
        return first if self._clock() - self._missing_since >= deadlines.PRIMARY_MISSING_SECONDS else None

    def _settled(self, candidate: _Candidate) -> bool:
        return self._clock() - self._seen[candidate.name][1] >= deadlines.PRIMARY_SETTLE_SECONDS

    def _elect(self, candidate: _Candidate, candidates: list[_Candidate]) -> Primary:
        passed_over = [
            f"{other.name} ({other.problem})" for other in candidates if other.problem and other.name < candidate.name
        ]
        log.info(
            "%s is the primary network's configuration%s%s",
            self._directory / candidate.name,
            f", in place of {self._elected}" if self._elected else "",
            f"; passed over: {', '.join(passed_over)}" if passed_over else "",
        )
        self._elected = candidate.name
        self._missing_since = None
        return self._accept(candidate)

    def _accept(self, candidate: _Candidate) -> Primary:
        path = self._directory / candidate.name
        if candidate.config is None:
            raise NoPrimaryError(f"{path}, the primary network's configuration, can't be read: {candidate.problem}")
        return Primary(path, candidate.config)

    async def _by_name(self) -> Primary:
        path = self._directory / self._named
        if not await asyncio.to_thread(path.is_file):
            raise NoPrimaryError(f"{path} (multusMasterCNI) is not there; it is waited for")
        try:
            config = await asyncio.to_thread(self._files.at_path, str(path))
        except CniError as error:
            raise NoPrimaryError(f"{path} (multusMasterCNI) can't be read: {error}") from error
        if problem := primary.own_problem(config, self._plugin_type):
            raise NoPrimaryError(f"{path} (multusMasterCNI) can't be the primary network: {problem}")
        return Primary(path, config)

    async def _candidates(self) -> list[_Candidate]:
        """Return every file that is not hidden, by name. Raises NoPrimaryError if the directory can't be listed."""
        try:
            found = await asyncio.to_thread(self._list)
        except OSError as error:
            raise NoPrimaryError(
                f"{self._directory} (multusAutoconfigDir) can't be listed: {error.strerror or error}"
            ) from error
        self._seen = {
            name: before if (before := self._seen.get(name)) and before[0] == signature else (signature, self._clock())
            for name, signature in found
        }
        return [await self._judge(name) for name, _ in found]

    def _list(self) -> list[tuple[str, _Signature]]:
        found = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                # A file may be removed meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if not entry.name.startswith(".") and entry.is_file():
                        status = entry.stat()
                        found.append((entry.name, (status.st_mtime_ns, status.st_size, status.st_ino)))
        if len(found) > FILES_MAX:
            raise OSError(f"it holds more than {FILES_MAX} files")
        return sorted(found)

    async def _judge(self, name: str) -> _Candidate:
        if problem := primary.name_problem(name):
            return _Candidate(name, problem=problem)
        try:
            config = await asyncio.to_thread(self._files.at_path, str(self._directory / name))
        except CniError as error:
            return _Candidate(name, problem=str(error), broken=True)
        if problem := primary.content_problem(config, self._plugin_type):
            return _Candidate(name, problem=problem)
        return _Candidate(name, config)

    def _why_not(self, present: _Candidate | None, first: _Candidate | None, candidates: list[_Candidate]) -> str:
        what = f"can no longer be it: {present.problem}" if present else "is gone"
        if first is None:
            then = self._why_none(candidates)
        else:
            then = f"it is waited for {deadlines.PRIMARY_MISSING_SECONDS:.0f} s, then {first.name} takes its place"
        return f"{self._directory / self._elected}, the primary network's configuration, {what}; {then}"

    def _why_none(self, candidates: list[_Candidate]) -> str:
        judged = [f"{item.name}: {item.problem}" for item in candidates if not item.name.startswith(primary.OWN_PREFIX)]
        seen = f" ({'; '.join(judged[:_SHOWN])}{'; ...' if len(judged) > _SHOWN else ''})" if judged else ""
        return (
            f"no file in {self._directory} can be the primary network's configuration{seen}; one that ends in "
            f"{' or '.join(primary.SUFFIXES)} is waited for, or name one in multusMasterCNI"
        )
