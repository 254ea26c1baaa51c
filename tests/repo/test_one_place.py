"""What is done in one place only (`docs/architecture.md`): the transaction, the view of the records, the queue.

A second place that runs the plugins of a pod would have an undo of its own, and could forget the mark on record that
comes before the first DEL. A second list of the records would have an order and a second load of its own, and a second
queue its own back-off.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
    # `multusctl attachments` also without a daemon, and the check of an installation.
    "store.containers": {"pod/records.py", "answers/attachments.py", "node/install.py"},
    "store.leftovers": {"node/orphans.py"},
    "view.enter": {"pod/records.py"},
    "view.leave": {"pod/records.py"},
}
QUEUES: Final = {
    "cluster/kube/claims.py", "cluster/kube/events.py", "cluster/kube/latest.py", "node/addresses.py",
    "node/at_start.py", "node/keep.py", "node/orphans.py", "node/spool.py",
}  # fmt: skip


def calls(source: str) -> Iterator[str]:
    """Yield the last two names of each call: `runner.add` of `engine.runner.add(...)`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            match node.func.value:
                case ast.Attribute(attr=name) | ast.Name(id=name):
                    yield f"{name}.{node.func.attr}"
                case _:
                    pass


def test_only_these_modules_make_these_calls() -> None:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for call in calls(path.read_text()):
            found.setdefault(call, set()).add(str(path.relative_to(PACKAGE)))
    assert {call: found[call] for call in PLACES} == PLACES


def test_what_is_due_later_waits_in_a_queue() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "WorkQueue[" in path.read_text()}
    assert found - {"runtime/workqueue.py"} == QUEUES


def test_a_breach_is_seen() -> None:
    assert list(calls("self.engine.runner.add(1)\nrunner.delete(2)\nadd(3)")) == ["runner.add", "runner.delete"]
