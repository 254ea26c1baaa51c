"""Answers without a daemon: from the records on this node, and from the kernel."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from multus_daemon import __version__, deadlines
from multus_daemon.answers import attachments as about_attachments
from multus_daemon.answers import status as about_status
from multus_daemon.kernel.pod_netns import NodeNamespaces
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.store import FileStore
from multus_daemon.runtime import fs
from multus_daemon.settings import Settings
from multus_tools import doctor
from multus_tools.command_line import explained

_LEASES: Final = "/var/lib/cni/networks"
"""host-local's default directory."""


def attachments(cni_dir: Path, *, pod: str, leaks: bool) -> dict[str, Any]:
    """Answer like the daemon, which alone knows the cluster's pods. Raises CommandError."""
    with explained(f"records in {cni_dir} can't be listed"):
        return about_attachments.of(_store(cni_dir), NodeNamespaces(), source="store", pod=pod, leaks=leaks)


def status(cni_dir: Path, because: str) -> dict[str, Any]:
    """Answer that the daemon is away, `because` of that, and count the records. Raises CommandError."""
    with explained(f"records in {cni_dir} can't be listed"):
        containers = len(_store(cni_dir).containers(foreign=False))
    load = {"running": 0, "waiting": 0, "limit": 0}
    parts = about_status.Parts(
        version=__version__,
        started=0.0,
        gates={"daemon": because},
        primary={"wanted": False},
        cluster={"kind": "", "informers": [], "pendingStatuses": 0},
        requests=load,
        processes=load,
        leftovers=0,
        source="store",
    )
    return about_status.of(parts, (), containers=containers, spooled=about_status.entries_in(cni_dir / "spool"))


def node(settings: Settings, answers: Callable[[], tuple[str, Mapping[str, Any]]]) -> doctor.Node:
    """Return this node for the doctor. `answers`: see there."""
    root = settings.paths.chroot_dir
    leases: list[Path] = []
    with contextlib.suppress(OSError):
        leases.append(Path(fs.resolve(root, _LEASES)))
    return doctor.Node(
        settings,
        _store(Path(settings.paths.cni_dir)),
        NodeNamespaces().vanished,
        answers,
        tool=lambda command: output_of(root, command, deadlines.CTL_PROGRAM_SECONDS),
        lease_dirs=leases,
    )


def _store(cni_dir: Path) -> FileStore:
    return FileStore(cni_dir, ResultCache(cni_dir))


def output_of(root: str, command: Sequence[str], seconds: float) -> str:
    """Return the output of a program of the host with the root `root`; empty if it is missing, fails or is too slow."""
    words = ["chroot", root, *command] if root else list(command)
    try:
        done = subprocess.run(  # noqa: S603  the words are the doctor's own
            words, capture_output=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""
