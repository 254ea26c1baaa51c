"""Make what krew installs: the archive of `kubectl multus`, and the manifest that names it by its digest.

    python3 krew/package.py WHEEL DIRECTORY

WHEEL is the one for every platform (MULTUS_SHIM_ARCH=none). The same wheel gives the same archive. The script uses the
standard library only.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PROGRAM: Final = "kubectl-multus"


def main() -> None:
    """The command."""
    package(Path(sys.argv[1]), Path(sys.argv[2]))


def package(wheel: Path, directory: Path) -> None:
    """Write the archive and `multus.yaml` into `directory`."""
    version = wheel.name.split("-")[1]
    archive = directory / f"{PROGRAM}-{version}.tar.gz"
    archive.write_bytes(archived([ROOT / "krew" / PROGRAM, ROOT / "LICENSE", ROOT / "constraints.txt", wheel]))
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    text = (ROOT / "krew" / "multus.yaml").read_text()
    for key, value in (
        ("version", f"v{version}"),
        ("homepage", source),
        ("uri", f"{source}/releases/download/v{version}/{archive.name}"),
        ("sha256", hashlib.sha256(archive.read_bytes()).hexdigest()),
    ):
        text, number = re.subn(rf'^( +{key}): ""$', rf"\1: {value}", text, flags=re.MULTILINE)
        assert number == 1, key
    (directory / "multus.yaml").write_text(text)


def archived(files: list[Path]) -> bytes:
    """Return a compressed archive of `files`, without their times and owners."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in files:
            entry = tarfile.TarInfo(path.name)
            entry.size = path.stat().st_size
            entry.mode = 0o755 if path.name == PROGRAM else 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return gzip.compress(raw.getvalue(), mtime=0)


if __name__ == "__main__":
    main()
