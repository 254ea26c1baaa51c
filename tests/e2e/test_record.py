"""`make record` with one of its incidents; `make wide` runs all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import build_tools

ROOT = Path(__file__).parents[2]


def test_an_incident_is_shown_on_both_sides() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root")
    try:
        build_tools.find_all(("etcd", "kube-apiserver", "upstream-multus-daemon", "upstream-multus-shim"))
        build_tools.reference()
    except build_tools.ToolError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "tests.record", "list_without_its_keys"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each DEL is a success; after 3 pods no ADD succeeds" in done.stdout
    assert "5 pods, one after the other, on 3 addresses" in done.stdout
