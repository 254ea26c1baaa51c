"""What a request makes is freed with it, not by a later garbage collection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.netns.conftest import Netns


def test_a_served_request_leaves_nothing_to_the_garbage_collector(netns: Netns, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.netns.garbage", netns.path, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
