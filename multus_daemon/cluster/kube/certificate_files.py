"""The files of the node's client certificate.

The certificate is `multus-client-current.pem` in `certDir`, certificate first, then its key. As in client-go's file
store it is a link to a dated file, so that upstream's daemon can take over: client-go refuses to renew what is no link.
The key that waits for its certificate is kept beside it.
"""

from __future__ import annotations

import datetime
import logging
import os
import re
import secrets
from pathlib import Path

from multus_daemon.runtime import fs

log = logging.getLogger(__name__)

FILE_MAX_BYTES = 256 * 1024


_DATED = re.compile(r"multus-client-[0-9]{4}(-[0-9]{2}){5}\.pem")


class CertificateFiles:
    """The files in `certDir`, all of mode 0600. Its methods block and raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.current = directory / "multus-client-current.pem"
        self._pending = directory / "multus-client-pending.key"

    def prepare(self) -> None:
        """Make the directory where it is missing, remove what killed writers left."""
        fs.ensure_directory(self._directory)
        fs.sweep(self._directory)

    def load(self) -> tuple[bytes, bytes]:
        """The certificate and key in use, and the key that waits for its certificate; empty where there is none."""
        return self._read(self.current), self._read(self._pending)

    def _read(self, path: Path) -> bytes:
        try:
            return fs.read_limited(path, limit=FILE_MAX_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("%s is not used, it will be replaced: %s", path, error)
            return b""

    def install(self, pem: bytes, now: float) -> None:
        """Put `pem` in place in one step; of the older ones the last stays, for a reader that is halfway."""
        stamp = datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y-%m-%d-%H-%M-%S")
        dated = self._directory / f"multus-client-{stamp}.pem"
        last = self.current.readlink().name if self.current.is_symlink() else ""
        fs.write_atomic(dated, pem)
        # The name is one that `sweep` knows. The target is relative: the directory may be mounted elsewhere.
        link = self._directory / f".{self.current.name}.{os.getpid()}-{secrets.token_hex(6)}"
        link.symlink_to(dated.name)
        link.replace(self.current)
        fs.fsync_directory(self._directory)
        fs.remove(self._pending)
        for path in list(self._directory.iterdir()):
            if _DATED.fullmatch(path.name) and path.name not in (dated.name, last):
                fs.remove(path)

    def keep(self, key: bytes | None) -> None:
        """The key that waits for its certificate from now on; None: none does."""
        if key:
            fs.write_atomic(self._pending, key)
        else:
            fs.remove(self._pending)
