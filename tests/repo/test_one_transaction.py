"""Networks are attached in `pod/attach.py` and detached in `pod/detach.py`, and nowhere else (`docs/architecture.md`).

A second place that runs the plugins of a pod would have an undo of its own, and could forget the mark on record that
comes before the first DEL.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = Path(__file__).resolve().parents[2] / "multus_daemon"
# The end of what is called, and the modules that may call it.
PLACES: Final = {
    "runner.add": {"pod/attach.py"},
    "runner.remember": {"pod/attach.py"},
    "runner.delete": {"pod/detach.py"},
    "runner.forget": {"pod/detach.py"},
    "records.save": {"pod/attach.py"},
    "records.begin_delete": {"pod/detach.py"},
    # A DEL that is answered as done notes that.
    "records.save_without": {"pod/detach.py", "pod/delete.py"},
    "gateway.move": {"pod/attach.py"},
    "gateway.restore": {"pod/attach.py"},
}


def calls(source: str) -> Iterator[str]:
    """Yield the last two names of each call: `runner.add` of `engine.runner.add(...)`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            match node.func.value:
                case ast.Attribute(attr=name) | ast.Name(id=name):
                    yield f"{name}.{node.func.attr}"
                case _:
                    pass


@pytest.fixture(scope="module")
def places() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for call in calls(path.read_text()):
            found.setdefault(call, set()).add(str(path.relative_to(PACKAGE)))
    return found


@pytest.mark.parametrize("call", PLACES)
def test_only_the_transaction_makes_this_call(places: dict[str, set[str]], call: str) -> None:
    assert places[call] == PLACES[call]


def test_a_breach_is_seen() -> None:
    assert list(calls("self.engine.runner.add(1)\nrunner.delete(2)\nadd(3)")) == ["runner.add", "runner.delete"]
