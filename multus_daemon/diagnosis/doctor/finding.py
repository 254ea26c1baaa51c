"""What a check looks at, and what it finds."""

from __future__ import annotations

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
    """One thing that is not as it should be."""

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
    """In words, what `fix` does."""

    def to_object(self) -> dict[str, str]:
        """As the module's docstring has it."""
        texts = (self.check, self.severity, self.subject, self.evidence, self.advice, self.fix_is)
        return dict(zip(("check", "severity", "subject", "evidence", "advice", "fix"), texts, strict=True))


@dataclass(frozen=True)
class Node:
    """What is looked at."""

    settings: Settings
    store: DelegateStore
    vanished: Callable[[set[str]], set[str]]
    """Which of the network namespaces are certainly gone: `ports.LinkOps` has it."""
    answers: Callable[[], tuple[str, dict[str, str]]]
    """Why no daemon answers, empty where one does; then its closed gates."""
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    tool: Callable[[Sequence[str]], str] = lambda _: ""
    """Runs a program of the host; what it prints, empty where it is not there or fails."""
    lease_dirs: Sequence[Path] = ()
    """host-local's directories of networks, as we see them."""

    def host(self, path: str) -> Path:
        """`path` of the host, as we see it. Raises OSError where it is not there."""
        return Path(fs.resolve(self.settings.paths.chroot_dir, path))


def readable(store: DelegateStore) -> Iterator[ContainerRecord]:
    """Our own records. Raises OSError."""
    for container_id in store.containers(foreign=False):
        try:
            record = store.load(container_id)
        except CorruptRecordError:
            continue
        if record is not None:
            yield record
