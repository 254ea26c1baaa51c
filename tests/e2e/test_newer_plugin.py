"""A built-in steps aside for a binary of a newer release, which is installed and removed while the daemon runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from multus_daemon.plugins.builtin.registry import MODELS
from multus_daemon.plugins.select import LOOK_SECONDS
from multus_daemon.spec.attachment import BUILT_IN
from tests.e2e import build_tools
from tests.e2e.build_tools import ToolError
from tests.e2e.node import Node


def newer(name: str, target: Path) -> Path:
    """Install the reference plugin with another release in its build information."""
    try:
        program = build_tools.find(f"plugin-{name}").read_bytes()
    except ToolError as error:
        pytest.skip(str(error))
    module, version = MODELS[name]
    before = f"\nmod\t{module}\t{version}\t".encode()
    assert before in program
    # Beside and renamed, as a package manager does.
    target.with_suffix(".new").write_bytes(program.replace(before, before.replace(b"\tv1.", b"\tv9.")))
    target.with_suffix(".new").chmod(0o755)
    target.with_suffix(".new").rename(target)
    return target


def servers(node: Node, container: str) -> dict[str, str]:
    command = [
        sys.executable,
        "-m",
        "multus_tools.ctl",
        "attachments",
        "--json",
        "--socket-dir",
        str(node.root / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (found,) = [item for item in json.loads(done.stdout)["containers"] if item["container"] == container]
    return {plugin["type"]: plugin["servedBy"] for item in found["attachments"] for plugin in item["plugins"]}


def test_a_newer_binary_comes_and_goes(make_node: Callable[..., Node]) -> None:
    node = make_node()
    node.ptp("cluster", "10.81.0.0/24")
    for name in "abc":
        node.pod(name)
    node.start()
    pods = {name: node.add_netns() for name in "abc"}
    assert node.cni("ADD", "ca", pods["a"], "a").code == 0
    binary = newer("ptp", node.bin_dir / "ptp")
    # It calls its IPAM plugin itself.
    shutil.copy(build_tools.find("plugin-host-local"), node.bin_dir / "host-local")
    time.sleep(LOOK_SECONDS)
    assert node.cni("ADD", "cb", pods["b"], "b").code == 0
    node.wait_for_log("v9.10.0 is newer than v1.10.0, which the built-in follows")
    assert servers(node, "ca")["ptp"] == BUILT_IN
    assert servers(node, "cb") == {"ptp": str(binary)}
    listed = [sys.executable, "-m", "multus_tools.ctl", "plugins", "--config", str(node.config)]
    shown = subprocess.run(node.contained(*listed), capture_output=True, text=True, timeout=60, check=True).stdout
    assert "v9.10.0 is newer" in shown
    for name in "ab":
        assert node.cni("CHECK", f"c{name}", pods[name], name).code == 0
    binary.unlink()
    time.sleep(LOOK_SECONDS)
    assert node.cni("ADD", "cc", pods["c"], "c").code == 0
    assert servers(node, "cc")["ptp"] == BUILT_IN
    for name in "abc":
        assert node.cni("DEL", f"c{name}", pods[name], name).code == 0
        assert node.links(pods[name]) == ["lo"]
    assert node.leftovers() == []
