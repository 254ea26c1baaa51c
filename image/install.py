"""Install the daemon, its dependencies and the shim into a new virtual environment, for this machine or another.

    python3 image/install.py /opt/multus arm64

Runs while the image is built, in the source tree. Nothing that is installed is executed: the dependencies are wheels of
the architecture, the shim is cross-compiled. The standard library is all that there is.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

ARCHITECTURES: Final = {"amd64": "x86_64", "arm64": "aarch64", "ppc64le": "ppc64le", "s390x": "s390x"}
"""What builders call them -> what the kernel, and wheels, call them."""
GLIBC_MINORS: Final = range(17, 37)
"""Of the wheels that may be taken: from manylinux2014 to the glibc 2.36 of the default base, Debian 12."""
EXTRAS: Final = "devices,certificates"
PROGRAMS: Final = ("multus-daemon", "multusctl", "kubectl-multus", "multus-builtin", "multus-probe", "multus-shim")
_ROOT: Final = Path(__file__).resolve().parent.parent


def main() -> None:
    """The command."""
    environment, architecture = Path(sys.argv[1]), sys.argv[2]
    machine = platform.machine() if architecture == "native" else ARCHITECTURES.get(architecture)
    if not machine or machine not in ARCHITECTURES.values():
        sys.exit(f"image/install.py: no image for {architecture}; there is one for {', '.join(ARCHITECTURES)}")
    with tempfile.TemporaryDirectory() as scratch:
        install(environment, machine, Path(scratch))


def install(environment: Path, machine: str, scratch: Path) -> None:
    """Fill the new virtual environment at `environment`."""
    run(sys.executable, "-m", "venv", str(scratch / "pip"))
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python, pip = environment / "bin" / "python", scratch / "pip" / "bin" / "pip"
    shared = ["--no-cache-dir", "--constraint", str(_ROOT / "constraints.txt")]
    # The build's own requirements, too.
    os.environ["PIP_CONSTRAINT"] = str(_ROOT / "constraints.txt")
    os.environ["MULTUS_SHIM_ARCH"] = machine
    run(str(pip), "wheel", *shared, "--no-deps", "--wheel-dir", str(scratch), str(_ROOT))
    (wheel,) = scratch.glob("multus_daemon-*.whl")
    tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    target = environment / Path(sysconfig.get_path("purelib", "venv", {"base": "."}))
    # With the environment's Python the first line of each program is right. pip looks for wheels of other machines
    # only where it is told of a directory.
    run(
        *(str(pip), "--python", str(python), "install", *shared, "--no-compile", "--only-binary=:all:"),
        *(f"--platform={tag}" for tag in tags),
        *("--target", str(target), f"{wheel}[{EXTRAS}]"),
    )
    for name in PROGRAMS:
        (target / "bin" / name).replace(environment / "bin" / name)
    shutil.rmtree(target / "bin")
    for path in sorted(environment.glob("bin/[aA]ctivate*")):
        path.unlink()
    for path in [*target.rglob("tests"), *target.rglob("test")]:
        if path.is_dir():
            shutil.rmtree(path)


def run(*command: str) -> None:
    """Run a program, what it prints shown. Exits where it fails."""
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"image/install.py: {' '.join(command[:4])} ... failed with status {done.returncode}")


if __name__ == "__main__":
    main()
