"""The file that a command writes: beside its place and renamed, for its user only; `-` is standard output."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from multus_tools.command_line import CommandError, explained


@contextlib.contextmanager
def opened(name: str, *, force: bool) -> Iterator[IO[bytes]]:
    """Open the file for the block, after which it is in its place; a failing block leaves nothing.

    Raises CommandError, also if the file exists, unless `force`, and for a terminal.
    """
    if name == "-":
        if sys.stdout.isatty():
            raise CommandError("an archive is not for a terminal: redirect it, or name a file with --output")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    _refuse(path, force=force)
    temporary = path.parent / f".{path.name[:200]}.{os.getpid()}-{secrets.token_hex(6)}"
    with explained(f"{path} can't be written"):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with explained(f"{path} can't be written"):
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _refuse(path, force=force)
            temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _refuse(path: Path, *, force: bool) -> None:
    if not force and os.path.lexists(path):
        raise CommandError(f"{path} exists: name another file, or say --force")
