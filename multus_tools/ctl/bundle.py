"""Collect the parts of a node's archive for a bug report (`bundle_file`): docs/multusctl.md lists its files.

A part that fails or is too slow is missing, and the index says why: a sick node is what the archive is for. Parts that
have secrets under keys come first, so that the same secrets are found in what follows.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from multus_daemon import __version__, deadlines
from multus_daemon.runtime import cgroup, fs, jsontext
from multus_daemon.settings import Settings
from multus_daemon.spec.cni.errors import CniError
from multus_tools import inventory
from multus_tools.bundle_file import SCHEMA, Archive
from multus_tools.command_line import Answer, CommandError
from multus_tools.ctl import offline
from multus_tools.ctl.socket_client import Client, NoDaemonError
from multus_tools.doctor import examine, to_object
from multus_tools.scrub import looks_secret

EXPLAINED_MAX: Final = 16
"""Maximum number of pods that are explained."""
REQUESTS: Final = 200
"""Number of the last requests."""
LOG_BYTES: Final = 1024 * 1024
"""Size of the end of the log."""
_LISTED_MAX: Final = 2000
"""Maximum number of listed files of a directory and those in it."""
_READ_MAX: Final = 1000
"""Maximum number of files of a directory whose content is taken."""
_FILE_MAX_BYTES: Final = 1024 * 1024
_PART_MAX_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of the files of a directory: in the daemon's pod, memory is scarce."""
_AFTER_EXPLAIN_SECONDS: Final = 5.0
"""Time that is kept for what comes after the explanations."""
_STEP_SECONDS: Final = 0.25
_CONFIGURATIONS: Final = (".conf", ".conflist", ".json")
_RECORDS: Final = ("attachments", "aside")
"""Directories of records; the others have the same again, or environments."""
_RUNTIMES: Final = (("containerd", "--version"), ("crio", "--version"), ("runc", "--version"))

Parts = Iterable[tuple[str, Any]]
"""Names of files and their contents: a text, or a JSON value."""


@dataclass(frozen=True, slots=True)
class Source:
    """The sources of the archive: settings, files, and the daemon."""

    settings: Settings
    settings_problem: str
    """Why the settings are the defaults; empty if they are the daemon's."""
    config: Path | None
    client: Client
    pods: tuple[str, ...]
    """Pods that are explained, `namespace/name`; empty: those whose requests failed, and leftovers."""


def secrets_of_environment() -> list[str]:
    """Return the values of this program's environment that are secrets by their names."""
    return [value for name, value in os.environ.items() if looks_secret(name)]


def collect(archive: Archive, source: Source, on_part: Callable[[str], None]) -> str:
    """Fill the archive and close it; `on_part` is called with the name of each part. Blocks for CTL_BUNDLE_SECONDS.

    Returns why no daemon answers, empty if one does.
    """
    collected = _Collected(archive, time.monotonic() + deadlines.CTL_BUNDLE_SECONDS, on_part)
    _collect_files(collected, archive, source)
    problem = _collect_answers(collected, source)
    if file := source.settings.logs.file:
        collected.add("log.txt", 2, lambda: [("log.txt", _end_of(file))])
    node = os.environ.get("MULTUS_NODE_NAME") or os.uname().nodename
    archive.close({"schema": SCHEMA, "node": node, "daemon": problem})
    return problem


def _collect_files(collected: _Collected, archive: Archive, source: Source) -> None:
    if source.settings_problem:
        archive.lacks("settings.json", source.settings_problem)
    collected.add("settings.json", 1, lambda: [("settings.json", _settings(source))])
    collected.add("versions.json", 5, lambda: [("versions.json", _versions(source))])
    primary, paths = source.settings.primary, source.settings.paths
    named = {"cniConfigDir": primary.config_dir, "confDir": paths.conf_dir, "autoconfigDir": primary.autoconfig_dir}
    # Often two of them are the same.
    for directory, name in {path: name for name, path in reversed(named.items()) if path}.items():
        collected.add(f"cni/{name}", 2, functools.partial(_configurations, f"cni/{name}", Path(directory), archive))
    collected.add("records", 3, lambda: _records(Path(paths.cni_dir)))


def _collect_answers(collected: _Collected, source: Source) -> str:
    """Return why no daemon answers, empty if one does."""
    settings, ask = source.settings, functools.partial(_ask, source.client)
    cni_dir = Path(settings.paths.cni_dir)
    away: list[str] = []

    def present_status() -> Answer:
        try:
            return source.client.ask("status", timeout=deadlines.CTL_BUNDLE_STATUS_SECONDS)
        except NoDaemonError as error:
            away.append(str(error))
            return offline.status(cni_dir, str(error))

    status = collected.answer("status", deadlines.CTL_BUNDLE_STATUS_SECONDS + 1, present_status)
    problem = "".join(away) or collected.last_problem
    containers: list[Answer] = []
    for name, leaks in (("attachments", False), ("leaks", True)):
        look: Callable[[], Answer] = functools.partial(ask, "attachments", leaks="true" if leaks else "")
        if problem:
            look = functools.partial(offline.attachments, cni_dir, pod="", leaks=leaks)
        found = collected.answer(name, 4, look)
        containers += found["containers"] if found else []
    if not problem:
        trace = collected.answer("trace", 3, lambda: ask("trace", last=str(REQUESTS)))
        for pod in source.pods or _concerned(trace["requests"] if trace else [], containers):
            seconds = min(3.0, collected.left() - _AFTER_EXPLAIN_SECONDS)
            collected.answer(f"explain/{pod}", seconds, functools.partial(ask, "explain", pod=pod))
        collected.answer("drift", 4, lambda: ask("drift"))
        collected.add("metrics.txt", 3, lambda: [("metrics.txt", ask("metrics")["text"])])
    collected.answer("plugins", 2, lambda: inventory.plugins(settings))
    answered = {} if problem else status or {}
    collected.answer("doctor", 5, lambda: to_object(examine(offline.node(settings, lambda: (problem, answered)))))
    return problem


class _Collected:
    """Adds parts to the archive until the time is over."""

    def __init__(self, archive: Archive, until: float, on_part: Callable[[str], None]) -> None:
        self._archive, self._until, self._on_part = archive, until, on_part
        self.last_problem = ""

    def left(self) -> float:
        """Return how many seconds are left."""
        return self._until - time.monotonic()

    def answer(self, name: str, seconds: float, look: Callable[[], Answer]) -> Answer | None:
        """Add an answer; return it, or None if there is none."""
        found: list[Answer] = []

        def parts() -> Parts:
            found.append(look())
            yield f"answers/{name}.json", found[0]

        self.add(f"answers/{name}.json", seconds, parts)
        return found[0] if found and not self.last_problem else None

    def add(self, name: str, seconds: float, look: Callable[[], Parts]) -> None:
        """Add the files of a part within its time."""
        self._on_part(name)
        seconds = min(seconds, self.left())
        self.last_problem = problem = self._add(look, seconds) if seconds > 0 else "the time was over"
        if problem:
            self._archive.lacks(name, problem)

    def _add(self, look: Callable[[], Parts], seconds: float) -> str:
        """Return why there is no answer, empty if there is one. A disk that hangs holds its thread, not the program."""
        found: list[tuple[str, Any]] = []
        problems: list[str] = []

        def work() -> None:
            try:
                found.extend(look())
            except (OSError, CniError, CommandError, ValueError) as error:
                problems.append(str(error))
            except Exception as error:
                # Answers of a daemon of another version, and faults that the report is about.
                problems.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        # In steps: a pause of this whole program, on a busy node, costs the part one of them.
        for _ in range(math.ceil(seconds / _STEP_SECONDS)):
            thread.join(_STEP_SECONDS)
            if not thread.is_alive():
                break
        # Keep the files of a part that failed half-way.
        for name, content in list(found):
            (self._archive.text if isinstance(content, str) else self._archive.json)(name, content)
        return f"no answer within {seconds:.1f} s" if thread.is_alive() else "".join(problems)


def _ask(client: Client, question: str, **query: str) -> Answer:
    return client.ask(question, query, timeout=deadlines.CTL_BUNDLE_SECONDS)


def _settings(source: Source) -> dict[str, Any]:
    given, effective = msgspec.to_builtins(dict(source.settings.given)), source.settings.effective()
    file = str(source.config or "")
    return {"file": file, "given": given, "effective": effective, "warnings": list(source.settings.warnings)}


def _versions(source: Source) -> dict[str, Any]:
    root, paths = source.settings.paths.chroot_dir, source.settings.paths
    shim = f"{paths.bin_dir}/{source.settings.primary.plugin_type}"
    shim_version = offline.output_of(root, (shim, "--version"), deadlines.CTL_PROGRAM_SECONDS)
    runtimes = [offline.output_of(root, words, deadlines.CTL_VERSION_SECONDS) for words in _RUNTIMES]
    return {
        "multusctl": __version__,
        "python": sys.version,
        "kernel": " ".join(os.uname()[index] for index in (0, 2, 3, 4)),
        "system": _system(Path(root or "/")),
        "shim": shim_version.strip(),
        "runtimes": [text.strip() for text in runtimes if text],
        "memoryLimit": cgroup.memory_limit(),
        "cpuLimit": cgroup.cpu_limit(),
        "commandLine": _command_line(source.client.path),
    }


def _system(root: Path) -> str:
    try:
        lines = (root / "etc/os-release").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")), "")


def _command_line(path: Path) -> list[str]:
    """Return the command line of the daemon that listens on the socket; empty if that is not known."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(deadlines.SOCKET_CONNECT_SECONDS)
            connection.connect(str(path))
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode("utf-8", "replace") for word in words if word]


def _listed(top: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files of a directory and of those in it, with what is known of each. Raises OSError."""
    number = 0
    for directory in (top, *sorted(path for path in top.iterdir() if path.is_dir() and not path.is_symlink())):
        for path in sorted(directory.iterdir()):
            if (number := number + 1) > _LISTED_MAX:
                return
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            described: dict[str, Any] = {
                "name": str(path.relative_to(top)),
                "mode": stat.filemode(status.st_mode),
                "owner": status.st_uid,
                "bytes": status.st_size,
                "modified": round(status.st_mtime, 3),
            }
            if stat.S_ISLNK(status.st_mode):
                described["target"] = os.readlink(path)
            yield path, described


def _list(directory: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return a directory as the archive shows it, and its files. Raises OSError."""
    listed: list[tuple[Path, dict[str, Any]]] = []
    with contextlib.suppress(FileNotFoundError):
        listed += _listed(directory)
    described = [item for _, item in listed]
    shown = {"directory": str(directory), "exists": directory.is_dir(), "files": described}
    return shown, [path for path, _ in listed]


def _configurations(name: str, directory: Path, archive: Archive) -> Parts:
    shown, files = _list(directory)
    yield f"{name}.json", shown
    found = [path for path in files if path.suffix in _CONFIGURATIONS and path.is_file()]
    for path in _within(found):
        place = f"{name}/{path.relative_to(directory)}"
        data = b""
        try:
            data = fs.read_limited(path, limit=_FILE_MAX_BYTES)
            # Secrets are recognised by their keys, so by JSON only.
            msgspec.json.decode(data)
            yield place, data.decode()
        except OSError as error:
            archive.lacks(place, error.strerror or str(error))
        except (ValueError, RecursionError) as error:
            archive.lacks(place, f"left out, as it is not JSON: {jsontext.fault(data, error)}")


def _records(cni_dir: Path) -> Parts:
    shown, files = _list(cni_dir)
    yield "records.json", shown
    found = [path for path in files if path.parent.name in _RECORDS and path.parent.parent == cni_dir]
    for path in _within(found):
        try:
            data = fs.read_limited(path, limit=_FILE_MAX_BYTES, follow=False)
        except OSError:
            # Deleted meanwhile; or no record, as the list says.
            continue
        yield f"records/{path.parent.name}/{path.name}", data.decode("utf-8", "replace")


def _within(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that may be read, the small ones first. Raises ValueError if there are more."""
    sized = []
    for path in paths:
        with contextlib.suppress(OSError):
            sized.append((path.stat().st_size, path))
    left = _PART_MAX_BYTES
    for number, (size, path) in enumerate(sorted(sized)):
        left -= size
        if left < 0 or number == _READ_MAX:
            raise ValueError(f"{len(sized) - number} files are left out: too many, or too large together")
        yield path


def _concerned(requests: Iterable[Answer], containers: Iterable[Answer]) -> list[str]:
    """Return the pods whose requests failed, the last ones first, and those with leftovers."""
    failed = [item["pod"] for item in requests if item["error"]][::-1]
    left = [item["pod"] for item in containers if item["problem"]]
    return [pod for pod in dict.fromkeys((*failed, *left)) if pod.count("/") == 1][:EXPLAINED_MAX]


def _end_of(path: str) -> str:
    # A pipe would never end.
    with open(fs.open_regular(path, os.O_RDONLY), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - LOG_BYTES, 0))
        data = file.read(LOG_BYTES)
    return (data.partition(b"\n")[2] if size > LOG_BYTES else data).decode("utf-8", "replace")
