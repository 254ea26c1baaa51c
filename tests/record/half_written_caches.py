"""The power fails some seconds after an ADD; the runtime deletes the pod after the reboot.

The disk of the daemon's directory is a file: its copy has what was written through at that moment, and no more.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from tests.programs import needed
from tests.record.incident import Incident, Seen
from tests.record.side import Side, told

SECONDS: Final = 7.0
"""After which ext4 has written the names of new files, and of a file that was not synced nothing else."""


def show(side: Side) -> Seen:
    disk, after = side.node.root / "disk", side.node.root / "disk-after-the-failure"
    subprocess.run([needed("mkfs.ext4"), "-q", str(disk), "64M"], check=True, capture_output=True)
    side.cluster_network("conf")
    mount(disk, side.node.cni_dir)
    try:
        side.serve()
        side.pod("web", "macvlan")
        added = side.call("ADD", "web")
        assert added.code == 0, added
        time.sleep(SECONDS)
        shutil.copy(disk, after)
        side.end(signal.SIGKILL)
        side.die("web")
    finally:
        subprocess.run(["umount", "--lazy", str(side.node.cni_dir)], check=True)
    mount(after, side.node.cni_dir)
    try:
        side.serve()
        deleted = side.call("DEL", "web")
        left = [path for path in side.node.networks_dir.rglob("10.9*") if path.is_file()]
        text = f"DEL after the reboot: {told(deleted)}; leases left: {len(left)}"
        return Seen(bool(left), text)
    finally:
        side.end(signal.SIGKILL)
        subprocess.run(["umount", "--lazy", str(side.node.cni_dir)], check=True)


def mount(disk: Path, directory: Path) -> None:
    """Mount a file as a disk."""
    directory.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(disk), str(directory)], check=True, capture_output=True)


ROW = Incident(
    __name__,
    "After a power failure the caches are empty: a DEL does nothing, and addresses leak",
    "https://github.com/k8snetworkplumbingwg/multus-cni/issues/1087",
    show,
)
