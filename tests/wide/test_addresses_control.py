"""The rows of `tests.e2e.addresses.test_rows` can fail: whereabouts' own plugin and reconciler in the same rows.

A row in which they do nothing wrong shows nothing of our built-in, but for what its name says.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.e2e.addresses.checker import Kind
from tests.e2e.addresses.fleet import Fleet, subjects
from tests.e2e.addresses.rows import ROWS, run
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError

RUNS: Final = ("whereabouts",)
_NUMBERS = itertools.count(1)

WRONG: Final[dict[str, tuple[set[Kind], dict[str, Any]]]] = {
    "cut_off": ({Kind.TWICE}, {"twice by name": 1}),
    "deleted_before_its_end": ({Kind.TWICE}, {}),
    # Allowed, as the node was fenced; nobody has probed.
    "fenced_alive": (set(), {"given after fencing": 3}),
    "by_hand": ({Kind.TWICE}, {"back after 1 s": 0}),
    "pool_by_hand": ({Kind.TWICE}, {"back after 1 s": 0}),
    "reconciler": ({Kind.TWICE, Kind.ANOTHERS}, {"held of 3": 0}),
    "api_away": (set(), {"DELs done meanwhile": 0}),
    # Its 64 requests share ten seconds, and it sends five a second.
    "many_ranges": ({Kind.LEAKED}, {"failed ADDs": 2}),
    "restored": ({Kind.UNHELD, Kind.UNREPORTED}, {}),
}
"""What it does wrong, and what it counts."""
HOLDS: Final = {"churn", "node_deleted", "node_tainted", "records_lost", "made_anew", "small"}
"""Rows in which it does nothing wrong."""


@pytest.fixture(scope="module", params=["binary", "mixed"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Three nodes with whereabouts as it is installed, or one with it among two with our built-in."""
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root")
    try:
        made = Fleet(*subjects(request.param))
    except (ToolError, OpensslError) as error:
        pytest.skip(str(error))
    with made:
        yield made


def test_each_row_has_a_verdict() -> None:
    assert WRONG.keys() | HOLDS == ROWS.keys()


@pytest.mark.parametrize("fleet", ["binary"], indirect=True)
@pytest.mark.parametrize("name", ROWS)
def test_what_the_control_does_wrong(fleet: Fleet, name: str) -> None:
    outcome = run(fleet, name, next(_NUMBERS))
    assert "broke off" not in outcome.counted, str(outcome)
    kinds, counted = WRONG.get(name, (set(), {}))
    assert set(outcome.kinds) >= kinds, str(outcome)
    assert {key: outcome.counted.get(key) for key in counted} == counted, str(outcome)
    if name in HOLDS:
        assert outcome.faults == [], str(outcome)


@pytest.mark.parametrize("fleet", ["mixed"], indirect=True)
@pytest.mark.parametrize("name", ROWS)
def test_beside_the_control_what_is_ours_stays_ours(fleet: Fleet, name: str) -> None:
    outcome = run(fleet, name, next(_NUMBERS))
    ours = {machine.name for machine in fleet.machines if machine.subject == "builtin"}
    faults = [str(fault) for fault in outcome.faults if fault.node in ours]
    if name == "cut_off":
        # It takes the reservation of a pod of the same name.
        faults = [text for text in faults if "-web-0 on node2" not in text]
    assert faults == [], str(outcome)
    assert "broke off" not in outcome.counted, str(outcome)
