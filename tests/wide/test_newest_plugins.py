"""A release of the plugins that is newer than the one that the built-ins follow: their binaries would run instead."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from multus_daemon.plugins.builtin.registry import MODELS
from tests.programs import needed


@pytest.mark.parametrize(("module", "version"), sorted(set(MODELS.values())))
def test_the_built_ins_follow_the_newest_release(module: str, version: str, tmp_path: Path) -> None:
    command = [needed("go"), "list", "-m", "-versions", module]
    env = os.environ | {"GOWORK": "off", "GOFLAGS": "-mod=mod"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"needs the Go module proxy: {done.stderr.strip()[:200]}")
    # Sorted, without those before a release; a suffix such as that of flannel's counts as one.
    assert done.stdout.split()[-1] == version, f"{module} has a newer release: follow it, and change MODELS"
