"""Debian's kernels, unpacked into the cache beside what `build_tools` builds. Nothing is installed."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.e2e.build_tools import cache_root
from tests.programs import missing, needed, path_of

RUNS: Final = ("Linux",)
SERIES: Final = ("6.1", "6.12")
"""Kernels of Debian 12, and of Debian 13 and Debian 12's backport."""
_PACKAGE: Final = r"linux-image-{}\.\d[\w.+]*(?:-\d+)?-amd64"


class KernelError(Exception):
    """This machine can't have the kernel; the message says why."""


def kernel(series: str) -> Path:
    """Return the directory with `boot/vmlinuz-...` and the modules of the newest kernel of a series.

    It comes from the machine's own sources of packages, or the cache where these have none. Raises KernelError.
    """
    if platform.machine() != "x86_64":
        raise KernelError("the kernels of Debian are run on x86-64 only")
    kept = cache_root().with_name("kernels")
    newest = _newest([line for line in _names(series) if re.fullmatch(_PACKAGE.format(re.escape(series)), line)])
    if newest and not (kept / newest).exists():
        _unpack(newest, kept / newest)
    if not newest:
        newest = _newest([path.name for path in kept.glob(f"linux-image-{series}.*")])
    if not newest:
        raise KernelError(f"apt has no package linux-image-{series}...-amd64: Debian 12 has it, after apt-get update")
    return kept / newest


def image(directory: Path) -> Path:
    """Return the kernel itself."""
    (found,) = (directory / "boot").glob("vmlinuz-*")
    return found


def _names(series: str) -> list[str]:
    if not (apt := path_of("apt-cache")):
        return []
    command = [apt, "pkgnames", f"linux-image-{series}."]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.split()


def _newest(names: list[str]) -> str:
    return max(names, default="", key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def _unpack(package: str, target: Path) -> None:
    if reason := missing("depmod", "dpkg-deb"):
        raise KernelError(reason)
    print(f"kernels: unpacking {package} into {target}: it is kept", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kernel-", dir=target.parent) as scratch:
        command = [needed("apt-get"), "-o", "APT::Sandbox::User=root", "download", "-qq", package]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise KernelError(f"apt-get download {package} failed: {done.stderr.strip()}")
        (archive,) = Path(scratch).glob("*.deb")
        made = Path(scratch, "root")
        subprocess.run([needed("dpkg-deb"), "--extract", archive, made], check=True, timeout=600)
        (modules,) = (made / "lib" / "modules").iterdir()
        for folder in ("sound", "drivers/gpu", "drivers/media"):
            shutil.rmtree(modules / "kernel" / folder)
        subprocess.run([needed("depmod"), "--basedir", made, modules.name], check=True, timeout=600)
        made.rename(target)
