"""The guards of `tests/conftest.py` do fail tests: each is run over one that must not pass."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LEAK = """
import asyncio
async def test_it():
    global task
    task = asyncio.create_task(asyncio.sleep(3600), name="forgotten")
"""
ENDING = """
import asyncio
async def test_it():
    global task
    task = asyncio.create_task(asyncio.sleep(0.02))
"""
BLOCKING = """
from multus_daemon.metrics import Metrics
async def test_it():
    Metrics().render()
"""
NOT_OURS = """
async def test_it(tmp_path):
    (tmp_path / "a").write_text("x")
    assert (tmp_path / "a").read_text() == "x"
"""
ALLOWED = """
from multus_daemon.runtime import fs
async def test_it(tmp_path):
    fs.write_atomic(tmp_path / "a", b"x")
    assert fs.read_limited(tmp_path / "a") == b"x"
    fs.remove(tmp_path / "a")
"""


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (LEAK, "tasks left behind: forgotten"),
        (ENDING, ""),
        (BLOCKING, "Blocking call to"),
        (NOT_OURS, ""),
        (ALLOWED, ""),
    ],
    ids=["leak", "ending", "blocking", "not-ours", "allowed"],
)
def test_guard(tmp_path, source, complaint):
    (tmp_path / "test_sample.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == (1 if complaint else 0), ran.stdout + ran.stderr
    if complaint:
        assert re.search(complaint, ran.stdout)
