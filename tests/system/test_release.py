"""The commands of docs/releasing.md set the version everywhere: afterwards the checks of a release pass in a copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import multus_daemon
from tests.programs import needed

ROOT: Final = Path(__file__).resolve().parents[2]
NEW: Final = "98.7.6"
CHECKS: Final = ("tests/repo/test_repository.py", "tests/repo/test_manifests.py", "-k", "image or version or chart")


def test_the_commands_of_the_page_set_the_version(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns(".git", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "data")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=lambda folder, found: ignored(folder, found) | ({".venv"} & set(found)))
    commands = (ROOT / "docs" / "releasing.md").read_text().partition("2. Set the version:")[2]
    script = commands.split("```")[1].replace("new=0.2.0", f"new={NEW}")
    assert NEW in script
    assert "make manifests IMAGE=" in script
    script = script.replace("make manifests IMAGE=", f"{sys.executable} -m tests.repo.manifests --image ")
    prepare = f"{needed('git')} init --quiet && git add ."
    # The page's `python3` is this one.
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", f"{prepare}\n{script}"], cwd=copy, check=True, timeout=60, env=env)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *CHECKS]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    old = re.escape(multus_daemon.__version__)
    found = subprocess.run(
        [needed("git"), "grep", "-nE", f"multus-daemon[:-]v?{old}"],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""
