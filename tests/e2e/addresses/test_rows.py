"""Addresses live as long as what holds them: each row of faults, with our built-in on three nodes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, Final

import pytest

from multus_daemon.plugins.builtin.registry import PLUGINS
from tests.e2e.addresses.fleet import Fleet, subjects
from tests.e2e.addresses.rows import ROWS, run
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError

_NUMBERS = itertools.count(1)

COUNTED: Final[dict[str, dict[str, Any]]] = {
    "churn": {"held when all have ended": 0},
    "cut_off": {"same name, error": "", "twice": 0},
    "deleted_before_its_end": {"twice": 0},
    "node_deleted": {"given after fencing": 3, "twice after fencing": 0},
    "node_tainted": {"given after fencing": 3, "twice after fencing": 0},
    # They still answer: each is probed.
    "fenced_alive": {"given after fencing": 0, "twice after fencing": 0},
    "by_hand": {"back after 1 s": 3, "twice": 0},
    "pool_by_hand": {"back after 1 s": 3, "twice": 0},
    "reconciler": {"held of 3": 3, "twice": 0},
    "api_away": {"DELs done meanwhile": 3},
    "records_lost": {"held of 3": 3, "twice": 0},
    "made_anew": {"ADDs": 7, "failed ADDs": 1, "twice": 0},
    "small": {"attached": 5, "after one ended": True},
    "many_ranges": {"addresses": [16, 16]},
}
"""What a row has to count, besides that the checker finds nothing wrong."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three nodes whose daemons have the built-in."""
    if "whereabouts" not in PLUGINS:
        pytest.skip("whereabouts is not built in yet")
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root")
    try:
        made = Fleet(*subjects("builtin"))
    except (ToolError, OpensslError) as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.mark.parametrize("name", ROWS)
def test_no_address_is_twice_and_none_is_left(fleet: Fleet, name: str) -> None:
    outcome = run(fleet, name, next(_NUMBERS))
    assert outcome.faults == [], str(outcome)
    assert "broke off" not in outcome.counted, str(outcome)
    expected = COUNTED.get(name, {})
    assert {key: outcome.counted.get(key) for key in expected} == expected, str(outcome)
