"""Planning is pure: the modules that make a plan know no log, no metric, no clock, no file and no store.

What waits is in `pod/gather.py` and `pod/networks.py`, what announces in `pod/publish.py`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "multus_daemon" / "pod"
PURE = ("changes.py", "plan.py", "schedule.py", "unsupported.py")
FORBIDDEN = {"logging", "time", "os", "socket", "pathlib"}


def imported(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("name", PURE)
def test_a_module_of_the_plan_is_pure(name: str) -> None:
    source = (PACKAGE / name).read_text()
    assert imported(source) & FORBIDDEN == set()
    assert (
        imported(source) & {"multus_daemon.pod.engine", "multus_daemon.pod.publish", "multus_daemon.metrics"} == set()
    )


def test_a_breach_is_seen() -> None:
    assert imported("import logging\nfrom multus_daemon.pod.engine import Engine") == {
        "logging",
        "multus_daemon.pod.engine",
    }
