"""The probe as the program that the kubelet runs."""

from __future__ import annotations

import subprocess
import sys


def test_it_imports_nothing_of_the_daemon() -> None:
    """It is started every few seconds on every node."""
    script = "import sys, multus_daemon.probe; print([name for name in sys.modules if name.startswith('multus_')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    # The table of deadlines imports nothing (tests/system/test_imports.py).
    assert done.stdout == "['multus_daemon', 'multus_daemon.deadlines', 'multus_daemon.probe']\n"
