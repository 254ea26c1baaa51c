"""The shim is installed anew while a shim runs: after a reboot the runtime's call waits for the daemon."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.e2e import build_tools
from tests.programs import needed
from tests.record.incident import Incident, Seen
from tests.record.side import Side

SOURCE: Final = Path("/usr/src")
"""Where upstream's image has its programs; covered in a mount namespace of the call's own."""
PUT: Final = f"""
mount -t tmpfs none {SOURCE} && mkdir -p {SOURCE}/multus-cni/bin
cp "$1" {SOURCE}/multus-cni/bin/multus-shim && cp "$2" {SOURCE}/multus-cni/bin/passthru
exec "$3" -d "$4" -t thick
"""


def show(side: Side) -> Seen:
    side.cluster_network("conf")
    side.serve()
    side.pod("web")
    stdin = side.upstream.stdin()
    side.end()
    directory = side.node.root / "plugins"
    directory.mkdir()
    shim = directory / "multus-shim"
    shutil.copy(side.shim, shim)
    # Of another release: an equal file is not replaced.
    with shim.open("ab") as file:
        file.write(b"\0")
    environment = side.node.environment("ADD", "c-web", side.node.add_netns(), "web", side.namespace, side.uids["web"])
    waiting = subprocess.Popen([str(shim)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert waiting.stdin
        waiting.stdin.write(stdin)
        waiting.stdin.close()
        time.sleep(1)
        assert waiting.poll() is None, "the shim does not wait for the daemon"
        before = shim.stat().st_ino
        done = subprocess.run(command(side, directory), capture_output=True, text=True, check=False, timeout=30)
    finally:
        waiting.kill()
        waiting.wait()
    busy = done.returncode != 0 or shim.stat().st_ino == before
    return Seen(busy, (done.stderr.strip().splitlines() or ["failed"])[-1] if busy else "replaced while one runs")


def command(side: Side, directory: Path) -> list[str]:
    """The init container's."""
    if not side.release:
        return [sys.executable, "-m", "multus_daemon.cli", "install", "--bin-dir", str(directory)]
    programs = [
        str(side.shim),
        *(str(build_tools.find(f"upstream-{name}")) for name in ("passthru", "install_multus")),
    ]
    return [needed("unshare"), "-m", "sh", "-ec", PUT, "sh", *programs, str(directory)]


ROW = Incident(
    __name__,
    '"Text file busy": the shim cannot be replaced while one runs, and the node starts no pod',
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1221",
    show,
    upstream_is_right=True,
)
