"""README's commands run as they are printed, in their order, from the top of a clone.

A clone is stood in for by a directory with the files that the commands name and the programs where `make demo` leaves
them. What needs a cluster or a builder of images is looked at, not run: tests/e2e/cluster/test_quickstart.py runs it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from multus_daemon import settings
from tests.programs import needed, require

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = (ROOT / "README.md").read_text()
EXAMPLE: Final = ROOT / "examples" / "daemon-config.json"
FENCED: Final = re.findall(r"(?m)^```(\w*)\n((?:.*\n)*?)```$", README)
"""Language and text of each block; commands have no language."""
BLOCKS: Final = [text.splitlines() for language, text in FENCED if not language]
OF_A_CLUSTER: Final = ("IMAGE=", "docker", "kubectl", "sed")
MODULES: Final = {
    "multus-daemon": "multus_daemon.cli",
    "multusctl": "multus_tools.ctl",
    "multus-builtin": "multus_tools.builtin",
}
SERVES: Final = "multus-daemon run"


def lines(*words: str) -> list[str]:
    """The commands that begin with one of the words, without their comments."""
    return [line.split("  #")[0].strip() for block in BLOCKS for line in block if line.startswith(words)]


LOCAL: Final = lines(".venv/bin/")


def test_every_command_is_one_that_a_test_knows() -> None:
    commands = [line.split("  #")[0].strip() for block in BLOCKS for line in block]
    known = [*lines("make "), *LOCAL, *lines(*OF_A_CLUSTER)]
    assert sorted(commands) == sorted(known)
    assert len(BLOCKS) == 5


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_every_target_of_make_can_be_made() -> None:
    for command in lines("make "):
        done = subprocess.run(
            [*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr


def test_the_example_on_the_page_is_the_file_that_is_applied() -> None:
    (shown,) = [text for language, text in FENCED if language == "yaml"]
    file = (ROOT / "examples" / "second-network.yaml").read_text()
    assert list(yaml.safe_load_all(shown)) == list(yaml.safe_load_all(file))


def test_the_example_configuration_is_one() -> None:
    found = settings.load(EXAMPLE)
    assert found.given == json.loads(EXAMPLE.read_text())
    assert found.warnings == ()
    # The manifests of the demo declare it.
    networks = list(yaml.safe_load_all((ROOT / "examples" / "quickstart" / "cluster" / "networks.yaml").read_text()))
    names = [(item["metadata"]["namespace"], item["metadata"]["name"]) for item in networks]
    assert (found.networks.multus_namespace, found.networks.cluster_network) in names


# --- the commands, run -----------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory as it is after `make demo`."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, module in MODULES.items():
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        program.chmod(0o755)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


class Shell:
    """Runs commands in a clone, on a node of their own: its network, /run and /var/lib/cni are nobody else's."""

    def __init__(self, clone: Path) -> None:
        self.clone = clone
        mounts = "mkdir -p /var/lib/cni && mount -t tmpfs tmpfs /var/lib/cni && mount -t tmpfs tmpfs /run"
        # It says when it is done, and lives until its standard input is closed.
        self._node = subprocess.Popen(
            [needed("unshare"), "--net", "--mount", "sh", "-c", f"{mounts} && echo && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._node.stdout is not None
        assert self._node.stdout.readline() == b"\n"

    def command(self, text: str) -> list[str]:
        inside = ["nsenter", f"--target={self._node.pid}", "--net", "--mount", f"--wd={self.clone}"]
        return [*inside, "sh", "-c", f"exec {text}"]

    def run(self, text: str) -> str:
        done = subprocess.run(self.command(text), env=self.env, capture_output=True, text=True, timeout=50, check=False)
        assert done.returncode == 0, f"{text}: {done.stderr}"
        return done.stdout

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(self.clone)}

    def end(self) -> None:
        assert self._node.stdin is not None
        assert self._node.stdout is not None
        self._node.stdin.close()
        self._node.wait(timeout=10)
        self._node.stdout.close()


@pytest.fixture
def shell(clone: Path) -> Iterator[Shell]:
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root, or under `unshare -Urnm`")
    require("nsenter", "unshare")
    shell = Shell(clone)
    yield shell
    shell.end()


def test_the_commands_of_the_page_work_in_their_order(shell: Shell) -> None:
    (serve,) = [command for command in LOCAL if SERVES in command]
    before, after = LOCAL[: LOCAL.index(serve)], LOCAL[LOCAL.index(serve) + 1 :]
    for command in before:
        assert json.loads(shell.run(command))["clusterNetwork"] == "cluster"
    daemon = subprocess.Popen(
        shell.command(serve), env=shell.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert daemon.stdout is not None
    # Where it is never ready, it ends, and there is no line.
    watch = threading.Timer(30, daemon.kill)
    watch.start()
    try:
        assert daemon.stdout.readline() == b"multus-daemon: ready, /run/multus/multus.sock\n"
        up, explain, down = after
        shown = shell.run(up)
        assert [word for word in ("eth0", "net1", "probe0", "10.77.0.2") if word not in shown] == []
        assert "demo/storage" in shell.run(explain)
        shell.run(down)
        assert list(shell.clone.glob("examples/quickstart/cluster/status/**/*.yaml")) == []
    finally:
        watch.cancel()
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(timeout=40)
        daemon.stdout.close()
    assert daemon.returncode == 0
