"""Collect the parts of a node's archive for a bug report (`bundle_file`): docs/multusctl.md lists its files.

A part that fails or is too slow is left out, and the index says why. Parts with secrets under known keys come first, so
that the same secrets are found in later parts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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

from multus_daemon import __version__
from multus_daemon.deadlines import SOCKET_CONNECT_SECONDS
from multus_daemon.runtime import cgroup, fs, jsontext
from multus_daemon.settings import Settings
from multus_daemon.spec.cni.errors import CniError
from multus_tools import deadlines, inventory
from multus_tools.bundle_file import SCHEMA, Archive
from multus_tools.command_line import Answer, CommandError
from multus_tools.ctl import offline
from multus_tools.ctl.doctor import Node, examine, to_object
from multus_tools.ctl.socket_client import Client, NoDaemonError
from multus_tools.scrub import looks_secret

EXPLAINED_MAX: Final = 16
"""Maximum number of pods that are explained."""
REQUESTS: Final = 200
"""Number of the last requests that the archive has."""
LOG_BYTES: Final = 1024 * 1024
"""Maximum bytes of the log, from its end."""
_LISTED_MAX: Final = 2000
"""Maximum number of files in a directory tree that are listed."""
_READ_MAX: Final = 1000
"""Maximum number of files in a directory tree whose content is archived."""
_FILE_MAX_BYTES: Final = 1024 * 1024
_PART_MAX_BYTES: Final = 8 * 1024 * 1024
"""Maximum bytes of the archived files of a directory: the memory of the daemon's pod is limited."""
_AFTER_EXPLAIN_SECONDS: Final = 5.0
"""Seconds that are reserved for the parts after the explanations."""
_STEP_SECONDS: Final = 0.25
_CONFIGURATIONS: Final = (".conf", ".conflist", ".json")
_RECORDS: Final = ("attachments", "aside")
"""Directories whose files are archived; other ones have copies of them, or environment variables."""
_RUNTIMES: Final = (("containerd", "--version"), ("crio", "--version"), ("runc", "--version"))

Parts = Iterable[tuple[str, Any]]
"""Names of files and their contents: a text, or a JSON value."""


def secrets_of_environment() -> list[str]:
    """Return the values of environment variables whose names look like those of secrets."""
    return [value for name, value in os.environ.items() if looks_secret(name)]


@dataclass
class Bundle:
    """Collects one archive within a time limit."""

    archive: Archive
    settings: Settings
    settings_problem: str
    """Why the defaults are used as settings; empty if they are the daemon's settings."""
    config: Path | None
    client: Client
    pods: tuple[str, ...]
    """Pods (`namespace/name`) to explain; empty: those with failed requests or leftovers."""
    on_part: Callable[[str], None]
    """Called with the name of each part."""
    _until: float = 0.0
    _last_problem: str = ""

    def collect(self) -> str:
        """Fill the archive and close it. Blocks for CTL_BUNDLE_SECONDS.

        Returns why no daemon answers, empty if one does.
        """
        self._until = time.monotonic() + deadlines.CTL_BUNDLE_SECONDS
        self._files()
        problem = self._answers()
        if file := self.settings.logs.file:
            self._add("log.txt", 2, lambda: [("log.txt", _end_of(file))])
        node = os.environ.get("MULTUS_NODE_NAME") or os.uname().nodename
        self.archive.close({"schema": SCHEMA, "node": node, "daemon": problem})
        return problem

    def _files(self) -> None:
        if self.settings_problem:
            self.archive.lacks("settings.json", self.settings_problem)
        self._add("settings.json", 1, lambda: [("settings.json", self._settings())])
        self._add("versions.json", 5, lambda: [("versions.json", _versions(self.settings, self.client.path))])
        primary, paths = self.settings.primary, self.settings.paths
        named = {"cniConfigDir": primary.config_dir, "confDir": paths.conf_dir, "autoconfigDir": primary.autoconfig_dir}
        # Often two of them are the same.
        for path, name in {path: name for name, path in reversed(named.items()) if path}.items():
            self._add(f"cni/{name}", 2, functools.partial(_configurations, f"cni/{name}", Path(path), self.archive))
        self._add("records", 3, lambda: _records(Path(paths.cni_dir)))

    def _settings(self) -> dict[str, Any]:
        given, effective = msgspec.to_builtins(dict(self.settings.given)), self.settings.effective()
        warnings = list(self.settings.warnings)
        return {"file": str(self.config or ""), "given": given, "effective": effective, "warnings": warnings}

    def _answers(self) -> str:
        """Add the daemon's answers; return why no daemon answers, empty if one does."""
        cni_dir = Path(self.settings.paths.cni_dir)
        away: list[str] = []

        def present_status() -> Answer:
            try:
                return self.client.ask("status", timeout=deadlines.CTL_BUNDLE_STATUS_SECONDS)
            except NoDaemonError as error:
                away.append(str(error))
                return offline.status(cni_dir, str(error))

        status = self._answer("status", deadlines.CTL_BUNDLE_STATUS_SECONDS + 1, present_status)
        problem = "".join(away) or self._last_problem
        containers: list[Answer] = []
        for name, leaks in (("attachments", False), ("leaks", True)):
            look: Callable[[], Answer] = functools.partial(self._ask, "attachments", leaks="true" if leaks else "")
            if problem:
                look = functools.partial(offline.attachments, cni_dir, pod="", leaks=leaks)
            found = self._answer(name, 4, look)
            containers += found["containers"] if found else []
        if not problem:
            trace = self._answer("trace", 3, lambda: self._ask("trace", last=str(REQUESTS)))
            for pod in self.pods or _concerned(trace["requests"] if trace else [], containers):
                seconds = min(3.0, self._until - time.monotonic() - _AFTER_EXPLAIN_SECONDS)
                self._answer(f"explain/{pod}", seconds, functools.partial(self._ask, "explain", pod=pod))
            self._answer("drift", 4, lambda: self._ask("drift"))
            self._add("metrics.txt", 3, lambda: [("metrics.txt", self._ask("metrics")["text"])])
        self._answer("plugins", 2, lambda: inventory.plugins(self.settings))
        answered = {} if problem else status or {}
        self._answer("doctor", 5, lambda: to_object(examine(Node(self.settings, lambda: (problem, answered)))))
        return problem

    def _ask(self, question: str, **query: str) -> Answer:
        return self.client.ask(question, query, timeout=deadlines.CTL_BUNDLE_SECONDS)

    def _answer(self, name: str, seconds: float, look: Callable[[], Answer]) -> Answer | None:
        """Add an answer of the daemon; return it, None if there is none."""
        found: list[Answer] = []

        def parts() -> Parts:
            found.append(look())
            yield f"answers/{name}.json", found[0]

        self._add(f"answers/{name}.json", seconds, parts)
        return found[0] if found and not self._last_problem else None

    def _add(self, name: str, seconds: float, look: Callable[[], Parts]) -> None:
        """Add the files of a part, within `seconds`."""
        self.on_part(name)
        seconds = min(seconds, self._until - time.monotonic())
        self._last_problem = problem = self._run(look, seconds) if seconds > 0 else "the time was over"
        if problem:
            self.archive.lacks(name, problem)

    def _run(self, look: Callable[[], Parts], seconds: float) -> str:
        """Run `look` in a thread, for `seconds` at most; return why it failed, empty if it did not."""
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
            (self.archive.text if isinstance(content, str) else self.archive.json)(name, content)
        return f"no answer within {seconds:.1f} s" if thread.is_alive() else "".join(problems)


def _versions(settings: Settings, socket_path: Path) -> dict[str, Any]:
    root = settings.paths.chroot_dir
    shim = f"{settings.paths.bin_dir}/{settings.primary.plugin_type}"
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
        "commandLine": _command_line(socket_path),
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
            connection.settimeout(SOCKET_CONNECT_SECONDS)
            connection.connect(str(path))
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode("utf-8", "replace") for word in words if word]


def _list(top: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return the listing of a directory tree for the archive, and the paths of its files. Raises OSError."""
    shown: list[dict[str, Any]] = []
    files: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        below = sorted(path for path in top.iterdir() if path.is_dir() and not path.is_symlink())
        entries = (path for directory in (top, *below) for path in sorted(directory.iterdir()))
        for path in itertools.islice(entries, _LISTED_MAX):
            with contextlib.suppress(FileNotFoundError):
                shown.append(_described(path, str(path.relative_to(top))))
                files.append(path)
    return {"directory": str(top), "exists": top.is_dir(), "files": shown}, files


def _described(path: Path, name: str) -> dict[str, Any]:
    status = path.lstat()
    described = {
        "name": name,
        "mode": stat.filemode(status.st_mode),
        "owner": status.st_uid,
        "bytes": status.st_size,
        "modified": round(status.st_mtime, 3),
    }
    return {**described, "target": os.readlink(path)} if stat.S_ISLNK(status.st_mode) else described


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
            archive.lacks(place, f"left out: {jsontext.fault(data, error)}")


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
    """Yield files up to the limits, the smallest first. Then raises ValueError if files are left out."""
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
