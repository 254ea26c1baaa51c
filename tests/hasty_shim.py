"""The shim, compiled with deadlines that a test can wait for. Its other behaviour is that of the installed one."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Final

from multus_shim import build

SECONDS: Final = {
    "SHIM_DAEMON_WAIT_SECONDS": 1.0,
    "SHIM_REPLY_SECONDS": 1.0,
    "SHIM_DEL_WAIT_SECONDS": 0.5,
    "SHIM_DEL_REPLY_SECONDS": 1.0,
}

_lock = threading.Lock()
_made: list[Path] = []


def binary() -> Path:
    """Return the path of the binary; compile it the first time."""
    with _lock:
        if not _made:
            _made.append(_compiled())
        return _made[0]


def _compiled() -> Path:
    # Beside the usual binaries, so that an unchanged tree is not compiled twice.
    out = build.ROOT / "build" / build.NAME / f"hasty-{os.getpid()}"
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        daemon = root / "multus_daemon"
        daemon.mkdir()
        shutil.copy(build.ROOT / "multus_daemon" / "__init__.py", daemon)
        table = (build.ROOT / "multus_daemon" / "deadlines.py").read_text()
        overrides = "".join(f"{key} = {value}\n" for key, value in SECONDS.items())
        (daemon / "deadlines.py").write_text(table + overrides)
        (root / "multus_shim").symlink_to(build.ROOT / "multus_shim")
        (root / "build").symlink_to(build.ROOT / "build")
        out.parent.mkdir(parents=True, exist_ok=True)
        return build.build(build.machine(), out, root)
