"""Addresses under everything at once, by three seeds; `make soak` has 24 longer ones."""

from __future__ import annotations

import os

import pytest

from multus_daemon.plugins.builtin.registry import PLUGINS
from tests.e2e.addresses import schedule
from tests.e2e.addresses.fleet import Fleet, subjects
from tests.e2e.build_tools import ToolError
from tests.e2e.certificates import OpensslError


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_address_is_twice_and_none_is_left(seed: int) -> None:
    if "whereabouts" not in PLUGINS:
        pytest.skip("whereabouts is not built in yet")
    if os.geteuid() != 0:
        pytest.skip("needs root: run as root")
    try:
        fleet = Fleet(*subjects("builtin"), clocks=schedule.clocks_of(seed))
    except (ToolError, OpensslError) as error:
        pytest.skip(str(error))
    with fleet:
        outcome = schedule.run(fleet, seed, 1, 30)
    assert outcome.faults == [], str(outcome)
    assert outcome.counted["ADDs"] > 15, str(outcome)
