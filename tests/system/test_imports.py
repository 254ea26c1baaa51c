"""What a program that is started does not load."""

from __future__ import annotations

import subprocess
import sys


def test_a_daemon_without_vlans_does_not_load_pyroute2() -> None:
    code = "import sys, multus_daemon.daemon; print('pyroute2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
