"""CHECK and DEL are done by the one that did the ADD, built-in or binary, whatever is set or installed meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.node import Node

Make = Callable[..., Node]

EXCEPT = "prefer but for two"
SETTINGS: dict[str, dict[str, Any]] = {
    EXCEPT: {"builtinPlugins": "prefer", "builtinPluginsExcept": ["ptp", "host-local"]}
}


def make(make_node: Make, reference: Path, setting: str) -> Node:
    """A node with a ptp network, whose ptp and host-local are there as binaries too; they note what they did."""
    # A comparison by the daemon itself runs CHECK, too, and that of the runtime only if it is strict.
    own = {"keep": "off", "strictCheck": True}
    node = make_node(settings={**own, **SETTINGS.get(setting, {"builtinPlugins": setting})})
    for name in ("ptp", "host-local"):
        path = node.bin_dir / name
        path.write_text(f'#!/bin/sh\necho "{name} $CNI_COMMAND" >>{node.root}/calls\nexec {reference}/{name}\n')
        path.chmod(0o755)
    node.ptp("cluster", "10.87.0.0/24")
    node.pod("hello")
    return node


def by_binaries(node: Node, plugin: str = "ptp") -> list[str]:
    """The verbs that the binary did, in order."""
    path = node.root / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{plugin} ")]


def served_by(node: Node) -> dict[str, Any]:
    (path,) = (node.cni_dir / "attachments").iterdir()
    found: dict[str, Any] = json.loads(path.read_bytes().splitlines()[-1])["record"]["attachments"][0]["servedBy"]
    return found


@pytest.mark.parametrize(
    ("first", "then", "removed", "recorded", "verbs", "replaced"),
    [
        ("prefer", "prefer", False, "built-in", [], False),
        ("prefer", "fallback", False, "built-in", [], False),
        ("fallback", "prefer", False, "ptp", ["ADD", "CHECK", "DEL"], False),
        ("off", "prefer", False, "ptp", ["ADD", "CHECK", "DEL"], False),
        # `off` is never; what a built-in made can be removed by the binary.
        ("prefer", "off", False, "built-in", ["CHECK", "DEL"], True),
        ("off", "prefer", True, "ptp", ["ADD"], True),
        # A type that is excepted: as `off` for what is new, and what a built-in made stays its own.
        ("prefer", EXCEPT, False, "built-in", [], False),
        (EXCEPT, "prefer", False, "ptp", ["ADD", "CHECK", "DEL"], False),
    ],
)
def test_after_a_restart(
    make_node: Make,
    reference: Path,
    first: str,
    then: str,
    removed: bool,
    recorded: str,
    verbs: list[str],
    replaced: bool,
) -> None:
    node = make(make_node, reference, first)
    node.start()
    before = node.links()
    netns = node.add_netns()
    added = node.cni("ADD", "c1", netns, "hello")
    assert added.code == 0, added.stdout
    if recorded == "built-in":
        assert served_by(node) == {"ptp": "built-in", "host-local": "built-in"}
    else:
        # Its IPAM plugin a binary starts itself.
        assert served_by(node) == {"ptp": str(node.bin_dir / recorded)}
    assert node.stop() == 0

    node.settings |= {"builtinPluginsExcept": []} | SETTINGS.get(then, {"builtinPlugins": then})
    if removed:
        (node.bin_dir / "ptp").unlink()
    node.start()
    for verb in ("CHECK", "DEL"):
        answer = node.cni(verb, "c1", netns, "hello")
        assert answer.code == 0, answer.stdout
    assert by_binaries(node) == verbs
    if not removed:
        assert by_binaries(node, "host-local") == verbs
    node.wait_for_log("CNI DEL finished")
    assert ("is missing" in node.log.read_text()) == replaced
    assert (node.leftovers(), node.links(netns), node.links()) == ([], ["lo"], before)


def test_a_failed_add_is_undone_by_the_one_that_failed(make_node: Make, reference: Path) -> None:
    """A key that the built-in does not know: the binary has it, its DEL too."""
    node = make(make_node, reference, "prefer")
    node.ptp("cluster", "10.87.0.0/24", vendorKey=5)
    node.plugin("ptp", f"""echo "ptp $CNI_COMMAND" >>{node.root}/calls; test "$CNI_COMMAND" = DEL""")
    node.start()
    assert node.cni("ADD", "c1", node.add_netns(), "hello").code == 1
    assert by_binaries(node) == ["ADD", "DEL"]
    assert node.leftovers() == []
