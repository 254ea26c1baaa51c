"""The daemon's image as a tar file, built once for a state of the sources: on a base of Debian's packages.

    python -m tests.e2e.cluster.daemon_image

Kept beside what `build_tools` builds. Tests call `find`, which never builds. The base takes a minute and is kept until
the machine's cache is emptied; the image takes another. MULTUS_IMAGE_TAR names another tar file to test with. Exit
status: 0, the image is there, or what it is built with is not, which is said; 1, the build has failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from multus_daemon import __version__
from tests import debian
from tests.e2e.build_tools import ToolError, cache_root
from tests.programs import missing

NAME: Final = f"docker.io/library/multus-daemon:{__version__}"
"""The kubelet expands the image name in `manifests/` to this name."""

_ROOT: Final = Path(__file__).resolve().parents[3]
_SOURCES: Final = (
    *("Dockerfile", "LICENSE", "README.md", "hatch_build.py", "pyproject.toml"),
    *("image", "multus_daemon", "multus_shim", "multus_tools"),
)
_PACKAGES: Final = ("python3", "python3-venv", "ca-certificates")
_BASE: Final = "localhost/debian-with-python:test"


def _digest() -> str:
    """Hash every source file of the image."""
    digest = hashlib.sha256()
    for source in _SOURCES:
        top = _ROOT / source
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(_ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _directory() -> Path:
    return cache_root().with_name("images")


class MissingToolError(ToolError):
    """The image can't be built on this machine; the message says what is missing."""


def find() -> Path:
    """The tar file of the present sources. Raises ToolError where it has not been built."""
    if named := os.environ.get("MULTUS_IMAGE_TAR"):
        if not Path(named).is_file():
            raise ToolError(f"MULTUS_IMAGE_TAR is {named!r}, where no file is")
        return Path(named)
    path = _directory() / f"multus-daemon-{_digest()}.tar"
    if not path.exists():
        raise ToolError(
            f"{path.name} is not built: `make e2e`, or `python -m tests.e2e.cluster.daemon_image` in the source tree"
        )
    return path


def base() -> Path:
    """The tar file of the base, which a build has left. Raises ToolError where there was none."""
    path = _directory() / f"debian-{debian.SUITE}.tar"
    if not path.exists():
        raise ToolError(f"{path.name} is not there: `python -m tests.e2e.cluster.daemon_image` makes it")
    return path


def ensure() -> Path:
    """`find`, after building what is not there; those of other sources are removed. Raises ToolError."""
    if os.environ.get("MULTUS_IMAGE_TAR"):
        return find()
    with contextlib.suppress(ToolError):
        return find()
    if reason := missing("buildah", "debootstrap"):
        raise MissingToolError(reason)
    if os.geteuid() != 0:
        raise MissingToolError("the image is built as root only")
    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"multus-daemon-{_digest()}.tar"
    with tempfile.TemporaryDirectory(prefix=".image-", dir=directory) as scratch:
        state = Path(scratch)
        _say(f"building {target.name}")
        _provide_base(state, directory / f"debian-{debian.SUITE}.tar")
        arguments = ["bud", "--isolation", "chroot", "--build-arg", f"BASE={_BASE}", *_pip_configuration(state)]
        _buildah(state, *arguments, "--tag", NAME, ".")
        archive = state / "image.tar"
        _buildah(state, "push", "--quiet", NAME, f"docker-archive:{archive}:{NAME}")
        for old in directory.glob("multus-daemon-*.tar"):
            old.unlink()
        archive.rename(target)
    return target


def _provide_base(state: Path, kept: Path) -> None:
    """Have the image _BASE in buildah's store; from the tar file `kept`, which is made where it is not there."""
    if not kept.exists():
        root, archive = state / "debian", state / "debian.tar"
        debian.bootstrap(root, _PACKAGES)
        _run(["tar", "--create", "--numeric-owner", "--file", str(archive), "--directory", str(root), "."], timeout=120)
        shutil.rmtree(root)
        archive.rename(kept)
    container = _buildah(state, "from", "scratch")
    _buildah(state, "add", "--quiet", container, str(kept), "/")
    _buildah(state, "commit", "--quiet", "--rm", container, _BASE)


def _buildah(state: Path, *arguments: str) -> str:
    """Run buildah with everything of its own below `state`; what it printed."""
    store = ["--storage-driver", "vfs", "--root", str(state / "storage"), "--runroot", str(state / "run")]
    return _run(["buildah", *store, *arguments], timeout=900)


def _pip_configuration(state: Path) -> list[str]:
    """This machine's configuration of pip, its certificates included, as secrets of the build: they stay outside."""
    found = debian.pip_settings()
    secrets = []
    if "cert" in found:
        secrets += ["--secret", f"id=ca.pem,src={found['cert']}"]
        found["cert"] = "/run/secrets/ca.pem"
    path = state / "pip.conf"
    path.touch(mode=0o600)
    path.write_text(debian.pip_conf(found))
    return [*secrets, "--secret", f"id=pip.conf,src={path}"]


def _run(command: list[str], *, timeout: float) -> str:
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=_ROOT)
    if done.returncode:
        raise ToolError(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    if (seconds := time.monotonic() - start) > 5:
        _say(f"{command[0]}: {seconds:.0f} s")
    return done.stdout.strip()


def _say(text: str) -> None:
    print(f"daemon_image: {text}", flush=True)


if __name__ == "__main__":
    try:
        _say(f"it is {ensure()}")
    except MissingToolError as error:
        _say(f"{error}; the tests of the image are skipped")
    except (ToolError, debian.DebianError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"daemon_image: {error}")
