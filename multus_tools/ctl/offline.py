"""Answers without a daemon: from the records on this node, and from the kernel."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multus_daemon import __version__
from multus_daemon.answers import attachments as about_attachments
from multus_daemon.answers import status as about_status
from multus_daemon.kernel.pod_netns import NodeNamespaces
from multus_daemon.plugins.cache import ResultCache
from multus_daemon.pod.store import FileStore
from multus_tools.command_line import explained


def attachments(cni_dir: Path, *, pod: str, leaks: bool) -> dict[str, Any]:
    """Return the daemon's answer to `attachments`, without what only a daemon knows. Raises CommandError."""
    with explained(f"records in {cni_dir} can't be listed"):
        return about_attachments.of(store(cni_dir), NodeNamespaces(), source="store", pod=pod, leaks=leaks)


def status(cni_dir: Path, because: str) -> dict[str, Any]:
    """Return an answer to `status` with the reason why no daemon answers, and the records. Raises CommandError."""
    with explained(f"records in {cni_dir} can't be listed"):
        containers = len(store(cni_dir).containers(foreign=False))
    leftovers = len(attachments(cni_dir, pod="", leaks=True)["containers"])
    load = {"running": 0, "waiting": 0, "limit": 0}
    parts = about_status.Parts(
        version=__version__,
        started=0.0,
        gates={"daemon": because},
        primary={"wanted": False},
        cluster={"kind": "", "informers": [], "pendingStatuses": 0},
        requests=load,
        processes=load,
        source="store",
    )
    return about_status.of(
        parts, (), containers=containers, leftovers=leftovers, spooled=about_status.entries_in(cni_dir / "spool")
    )


def store(cni_dir: Path) -> FileStore:
    """Return the records below `cni_dir`."""
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
