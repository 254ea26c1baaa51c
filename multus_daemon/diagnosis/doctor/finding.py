"""Types of the doctor's checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from multus_daemon.runtime import fs
from multus_daemon.settings import Settings
from multus_daemon.spec.attachment import ContainerRecord
from multus_daemon.spec.ports import CorruptRecordError, DelegateStore

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of the node."""

    check: str
    severity: Severity
    subject: str
    """A path, a pod, a program."""
    evidence: str
    advice: str
    """A command, or what to do."""
    fix: Callable[[], None] | None = field(default=None, compare=False)
    """The repair, if it is safe to run unasked. Raises OSError."""
    fix_is: str = ""
    """The repair in words."""

    def to_object(self) -> dict[str, str]:
        """Return the finding in the format of `multusctl.doctor/v1`."""
        texts = (self.check, self.severity, self.subject, self.evidence, self.advice, self.fix_is)
        return dict(zip(("check", "severity", "subject", "evidence", "advice", "fix"), texts, strict=True))


@dataclass(frozen=True)
class Node:
    """The node under examination."""

    settings: Settings
    store: DelegateStore
    vanished: Callable[[set[str]], set[str]]
    """`ports.LinkOps.vanished`: returns the network namespaces that are certainly gone."""
    answers: Callable[[], tuple[str, dict[str, str]]]
    """Returns why the daemon does not answer, empty if it does, and its closed gates."""
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    tool: Callable[[Sequence[str]], str] = lambda _: ""
    """Runs a program of the host and returns its output; empty if it does not exist or fails."""
    lease_dirs: Sequence[Path] = ()
    """host-local's directories, as this process sees them."""

    def host(self, path: str) -> Path:
        """Return where this process sees `path` of the host. Raises OSError if it does not exist."""
        return Path(fs.resolve(self.settings.paths.chroot_dir, path))

    def records(self) -> Iterator[ContainerRecord]:
        """Yield our records, except damaged ones. Raises OSError."""
        for container_id in self.store.containers(foreign=False):
            with contextlib.suppress(CorruptRecordError):
                record = self.store.load(container_id)
                if record is not None:
                    yield record
