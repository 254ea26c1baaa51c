"""Run tests as root in Debian's kernels 6.1 and 6.12, which have the devices and modules of a node.

    python -m tests.kernels [--kernel 6.12] [--short] [PYTEST ...]
    python -m tests.kernels --kernel 6.1 tests/netns/test_bridge.py -k vlan

PYTEST is any argument of pytest; without, the tests of `selection`. `--short`: one kernel and few tests. Exit status: 1
if a test fails in a kernel. Where QEMU or a kernel is missing, it says so and is successful.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.e2e import build_tools
from tests.kernels import machine, selection
from tests.kernels.debian_kernels import SERIES, KernelError, kernel

_NEWEST: Final = SERIES[-1]
_SECONDS: Final = {True: 900.0, False: 5400.0}
"""Until a machine is ended, of the short form and of others."""
_PYTEST: Final = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.cases", "-p", "no:cacheprovider", "--color=no"),
    *("-o", "timeout=900"),
)
_ROOT: Final = Path(__file__).resolve().parents[2]
_PASSED_ON: Final = re.compile("CI|CNI_REFERENCE_DIR|HYPOTHESIS_PROFILE|WIDE_.*|XDG_CACHE_HOME")
"""Variables that the tests know."""
_PATIENCE: Final = {"TEST_PATIENCE": "240"}
"""Seconds for a program: portmap runs dozens, each ten times slower here, on a machine that may do much else."""


def _reference() -> dict[str, str]:
    """Return where the reference plugins are: as the environment says, else built once."""
    if "CNI_REFERENCE_DIR" in os.environ:
        return {}
    try:
        build_tools.ensure([f"plugin-{name}" for name in build_tools.REFERENCE_PLUGINS])
        return {"CNI_REFERENCE_DIR": str(build_tools.reference())}
    except build_tools.ToolError as error:
        print(f"kernels: the reference plugins are those of the distribution: {error}", flush=True)
        return {}


def _compile(words: Sequence[str]) -> None:
    """Compile what the tests import: there, that takes minutes, and a contained daemon can't keep it."""
    compileall.compile_dir(_ROOT / "multus_daemon", quiet=1)
    keeping = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Its exit status is that of a collection; the tests in the kernel tell what is wrong.
    subprocess.run([*_PYTEST, "--collect-only", *words], env=keeping, stdout=subprocess.DEVNULL, check=False)


def run(series: str, words: Sequence[str], environment: dict[str, str], seconds: float) -> int:
    """Run the tests in a kernel; the exit status of pytest, 0 without the kernel. Raises MachineError."""
    try:
        image = kernel(series)
    except KernelError as error:
        print(f"kernels: {series} skipped: {error}", flush=True)
        return 0
    print(f"kernels: {image.name}", flush=True)
    begun = time.monotonic()
    status = machine.run(image, [*_PYTEST, *words], environment, seconds)
    print(f"kernels: {image.name}: {time.monotonic() - begun:.0f} s, exit status {status}", flush=True)
    return status


def main(arguments: Sequence[str]) -> int:
    """Run the tests; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", allow_abbrev=False, description=__doc__)
    parser.add_argument("--kernel", action="append", choices=SERIES, help="only this one")
    parser.add_argument("--short", action="store_true", help="one kernel and few tests")
    options, words = parser.parse_known_args(arguments)
    if os.geteuid() != 0:
        print("kernels: skipped: needs root, which the tests are in the guest, too")
        return 0
    if reason := machine.lacks():
        print(f"kernels: skipped: {reason}")
        return 0
    environment = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    environment |= _PATIENCE | _reference()
    words = words or [*(selection.SHORT if options.short else selection.WHOLE)]
    _compile(words)
    failed = False
    for series in options.kernel or ([_NEWEST] if options.short else SERIES):
        try:
            failed |= run(series, words, environment, _SECONDS[options.short]) != 0
        except machine.MachineError as error:
            print(f"kernels: {series}: {error}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
