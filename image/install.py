"""Install the daemon, its dependencies and the shim into a new virtual environment, for this machine or another.

    python3 image/install.py /opt/multus arm64

Runs while the image is built, in the source tree. Nothing that is installed is executed: the dependencies are wheels of
the architecture, the shim is cross-compiled. pip takes only wheels whose hashes are in `requirements.txt` and
`build-requirements.txt` (`make lock`). The standard library is all that there is.
"""

from __future__ import annotations

import hashlib
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
UNUSED: Final = (
    # 860 modules that are made from the API's definition: `multus_daemon/cluster/kube/library.py` imports none.
    "kubernetes_asyncio/client/api",
    "kubernetes_asyncio/client/models",
    # For source code in colours, which rich shows on request only.
    "pygments/lexers",
)
"""A quarter of the environment. `tests/e2e/test_image.py` imports what is used."""
PROGRAMS: Final = (
    "multus-daemon",
    "multusctl",
    "kubectl-multus",
    "kubectl_complete-multus",
    "multus-builtin",
    "multus-probe",
    "multus-shim",
)
_FOLDER: Final = Path(__file__).resolve().parent


def main() -> None:
    """The command."""
    environment, architecture = Path(sys.argv[1]), sys.argv[2]
    machine = platform.machine() if architecture == "native" else ARCHITECTURES.get(architecture)
    if not machine or machine not in ARCHITECTURES.values():
        sys.exit(f"image/install.py: no image for {architecture}; there is one for {', '.join(ARCHITECTURES)}")
    with tempfile.TemporaryDirectory() as scratch:
        install(environment, machine, Path(scratch))


def platforms(machine: str) -> list[str]:
    """Return the names of the platforms whose wheels run on `machine`."""
    return [
        *(f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS),
        f"manylinux2014_{machine}",
        f"linux_{machine}",
    ]


def install(environment: Path, machine: str, scratch: Path) -> None:
    """Fill the new virtual environment at `environment`."""
    run(sys.executable, "-m", "venv", str(scratch / "pip"))
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python, pip = environment / "bin" / "python", scratch / "pip" / "bin" / "pip"
    shared = ["--no-cache-dir", "--only-binary=:all:", "--require-hashes"]
    build = ["--no-cache-dir", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(scratch)]
    os.environ["MULTUS_SHIM_ARCH"] = machine
    # Hatchling runs in the environment of pip, which is thrown away.
    os.environ["PATH"] = f"{pip.parent}:{os.environ['PATH']}"
    run(str(pip), "install", *shared, "--requirement", str(_FOLDER / "build-requirements.txt"))
    run(str(pip), "wheel", *build, str(_FOLDER.parent))
    (wheel,) = scratch.glob("multus_daemon-*.whl")
    requirements = scratch / "requirements.txt"
    requirements.write_text(
        f"multus-daemon[{EXTRAS}] @ {wheel.as_uri()} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
        f"--requirement {_FOLDER / 'requirements.txt'}\n"
    )
    target = environment / Path(sysconfig.get_path("purelib", "venv", {"base": "."}))
    # With the environment's Python the first line of each program is right. pip looks for wheels of other machines
    # only where it is told of a directory.
    run(
        *(str(pip), "--python", str(python), "install", *shared, "--no-compile"),
        *(f"--platform={tag}" for tag in platforms(machine)),
        *("--target", str(target), "--requirement", str(requirements)),
    )
    for name in PROGRAMS:
        (target / "bin" / name).replace(environment / "bin" / name)
    shutil.rmtree(target / "bin")
    for path in sorted(environment.glob("bin/[aA]ctivate*")):
        path.unlink()
    for path in [*target.rglob("tests"), *target.rglob("test"), *(target / name for name in UNUSED)]:
        if path.is_dir():
            shutil.rmtree(path)
    for suffix in ("c", "h", "pxd", "pyx"):
        for path in target.rglob(f"*.{suffix}"):
            path.unlink()


def run(*command: str) -> None:
    """Run a program, what it prints shown. Exits where it fails."""
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"image/install.py: {' '.join(command[:4])} ... failed with status {done.returncode}")


if __name__ == "__main__":
    main()
