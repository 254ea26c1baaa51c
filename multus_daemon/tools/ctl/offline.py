"""What can be told without a daemon: from the records on this node, and from the kernel."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multus_daemon import __version__, deadlines
from multus_daemon.diagnosis import attachments as about_attachments
from multus_daemon.diagnosis import status as about_status
from multus_daemon.kernel.ops import KernelLinks
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime import fs
from multus_daemon.tools.ctl.commands.common import CommandError


def attachments(cni_dir: Path, *, pod: str, leaks: bool) -> dict[str, Any]:
    """As the daemon's answer, but for what only the daemon knows: which pods there are. Raises CommandError."""
    try:
        return about_attachments.of(store(cni_dir), KernelLinks(), source="store", pod=pod, leaks=leaks)
    except OSError as error:
        raise CommandError(f"records in {cni_dir} can't be listed: {error.strerror or error}") from error


def status(cni_dir: Path, because: str) -> dict[str, Any]:
    """The daemon is away, `because` of that; and how much is on record. Raises CommandError."""
    try:
        containers = len(store(cni_dir).containers(foreign=False))
    except OSError as error:
        raise CommandError(f"records in {cni_dir} can't be listed: {error.strerror or error}") from error
    parts = about_status.Parts(
        version=__version__,
        started=0.0,
        gates={"daemon": because},
        primary={"wanted": False},
        cluster={"kind": "", "informers": [], "pendingStatuses": 0},
        requests={"running": 0, "waiting": 0, "limit": 0},
        processes={"running": 0, "waiting": 0, "limit": 0},
        leftovers=0,
        source="store",
    )
    return about_status.of(parts, (), containers=containers, spooled=about_status.entries_in(cni_dir / "spool"))


def store(cni_dir: Path) -> FileStore:
    """The records in `cni_dir`."""
    return FileStore(cni_dir, ResultCache(cni_dir))


def vanished(paths: set[str]) -> set[str]:
    """Those of the network namespaces that are certainly gone."""
    return KernelLinks().vanished(paths)


def present(root: str, paths: Sequence[str]) -> list[Path]:
    """Those of `paths`, of the host whose root is `root`, that are there, as we see them."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append(Path(fs.resolve(root, path)))
    return found


def output_of(root: str, command: Sequence[str]) -> str:
    """What a program of the host whose root is `root` prints; empty where it is not there, fails, or takes too long."""
    words = ["chroot", root, *command] if root else list(command)
    try:
        done = subprocess.run(  # noqa: S603  the words are the doctor's own
            words, capture_output=True, timeout=deadlines.PROBE_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""
