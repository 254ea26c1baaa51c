"""Run the integration tests on this machine with the programs of one package at a time missing from PATH.

    python -m tests.lacking [PACKAGE ...]

A test that needs a missing program is skipped; none fails. Exit status 1 if one does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.conftest import TESTS, TIERS
from tests.programs import PACKAGES, missing

_OF_THIS_TIER: Final = ("bash", "git", "iproute2", "iptables", "nftables", "openssl", "procps", "util-linux")


def links(folder: Path, package: str) -> None:
    """Fill a folder with links to every program of PATH but those of the package."""
    for directory in os.get_exec_path():
        for path in sorted(Path(directory).glob("*")):
            link = folder / path.name
            if PACKAGES.get(path.name) != package and not link.is_symlink():
                link.symlink_to(path)


def run(package: str) -> int:
    """Run the tests without a package; the exit status of pytest."""
    tier = [str(TESTS / folder) for folder in TIERS["integration"]]
    pytest = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "3", "--dist", "loadfile", "-m", "integration"]
    with tempfile.TemporaryDirectory(prefix="multus-lacking-") as folder:
        links(Path(folder), package)
        print(f"lacking: {package}", flush=True)
        return subprocess.run([*pytest, *tier], env=os.environ | {"PATH": folder}, check=False).returncode


def main(packages: Sequence[str]) -> int:
    """Run the tests once for each package that this machine has."""
    asked = packages or _OF_THIS_TIER
    present = [name for name in asked if not missing(*(key for key, value in PACKAGES.items() if value == name))]
    failed = [name for name in present if run(name)]
    print(f"lacking: without {', '.join(present)}, one at a time; failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
