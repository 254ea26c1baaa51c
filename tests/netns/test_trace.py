"""How much code a reader has to know: the files and functions that one ADD and one DEL enter."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.netns.conftest import Netns


@dataclass(frozen=True)
class Bounds:
    """The most that a verb may enter."""

    files: int
    functions: int
    depth: int


ADD = Bounds(files=53, functions=380, depth=18)
DEL = Bounds(files=46, functions=380, depth=20)


@pytest.fixture
def traces(netns: Netns, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Trace the first ADD of ptp with host-local in a new process, and its DEL; return the traces by verb."""
    command = [sys.executable, "-m", "tests.netns.trace", netns.path, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {found["verb"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_a_cold_add_and_its_del_enter_few_files_and_functions(traces: dict[str, dict[str, Any]]) -> None:
    for verb, bounds in (("ADD", ADD), ("DEL", DEL)):
        functions, deepest = traces[verb]["functions"], traces[verb]["deepest"]
        files = sorted({name.partition(":")[0] for name in functions})
        # The trace itself works: both verbs go down to the kernel and to the leases.
        assert {"kernel/pod_netns.py", "pod/schedule.py"} < set(files)
        assert len(files) <= bounds.files, f"{verb}: {len(files)} files\n" + "\n".join(files)
        assert len(functions) <= bounds.functions, f"{verb}: {len(functions)} functions\n" + "\n".join(functions)
        assert len(deepest) <= bounds.depth, f"{verb}: depth {len(deepest)}\n" + "\n".join(deepest)
