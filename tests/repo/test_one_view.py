"""The records of the node are listed by `pod/records.py` for its view; work that is tried again waits in one queue.

A second list of the records would have an order and a second load of its own, and a second queue its own back-off.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.repo.test_one_transaction import PACKAGE, calls

# The end of what is called, and the modules that may call it.
PLACES: Final = {
    # `multusctl attachments` also without a daemon, and the check of an installation.
    "store.containers": {"pod/records.py", "answers/attachments.py", "node/install.py"},
    "store.leftovers": {"node/orphans.py"},
    "view.enter": {"pod/records.py"},
    "view.leave": {"pod/records.py"},
}
QUEUES: Final = {
    "cluster/kube/events.py", "cluster/kube/latest.py", "node/at_start.py", "node/keep.py", "node/orphans.py",
    "node/spool.py",
}  # fmt: skip


@pytest.mark.parametrize("call", PLACES)
def test_only_these_modules_make_this_call(call: str) -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if call in calls(path.read_text())}
    assert found == PLACES[call]


def test_what_is_due_later_waits_in_a_queue() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "WorkQueue[" in path.read_text()}
    assert found - {"runtime/workqueue.py"} == QUEUES
