"""What a program that is started does not load."""

from __future__ import annotations

import subprocess
import sys

from multus_daemon import deadlines


def test_a_daemon_without_vlans_does_not_load_pyroute2() -> None:
    code = "import sys, multus_daemon.daemon; print('pyroute2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_deadlines_load_by_their_path_with_nothing_installed() -> None:
    """As the shim's build does; and they cost `multus-probe` no module that takes long."""
    code = (
        "import sys; before = set(sys.modules); exec(open(sys.argv[1]).read());"
        "print(sorted({'multus_daemon', 'typing', 'dataclasses'} & (set(sys.modules) - before)))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, deadlines.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
