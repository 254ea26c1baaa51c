"""The TLS certificate of a server, read again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 10.0
"""Interval between checks of the files."""

log = logging.getLogger(__name__)


class Certificate:
    """A server's certificate and key, reloaded when their files change."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load the files. Blocks. Raises OSError, which includes ssl.SSLError."""
        self._files = (certificate, key)
        self._state = self._look()
        self.context = self._load()
        """Context for new connections. A renewal replaces it, as open connections use it unchanged."""

    async def run(self, *, pause: float = LOOK_SECONDS) -> None:
        """Reload changed files for ever; if they are unusable, log that and keep the certificate in use."""
        while True:
            await asyncio.sleep(pause)
            try:
                if await asyncio.to_thread(self._renew):
                    log.info("certificate %s: the new one is in use", self._files[0])
            except OSError as error:
                log.error("certificate %s: the new one can't be used, the old one stays: %s", self._files[0], error)

    def _renew(self) -> bool:
        state = self._look()
        if state == self._state:
            return False
        self.context = self._load()
        self._state = state
        return True

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.load_cert_chain(*self._files)
        return context

    def _look(self) -> list[tuple[int, int, int]]:
        # Links are followed: the kubelet replaces the directory that they lead to.
        return [(status.st_ino, status.st_mtime_ns, status.st_size) for status in map(Path.stat, self._files)]
