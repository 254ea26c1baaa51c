"""The numbers in `docs/builtin-plugins.md` are those of the tests."""

import re
from collections.abc import Sized
from pathlib import Path
from typing import Any

import pytest

from multus_daemon.builtin.runner import PLUGINS
from tests.contract import test_host_local_reference as host_local
from tests.netns import (
    test_bad_input,
    test_differential,
    test_flannel,
    test_interchange,
    test_macvlan,
    test_static,
    test_tuning,
)

PAGE = (Path(__file__).parents[2] / "docs" / "builtin-plugins.md").read_text()
ROWS = re.findall(r"(?m)^\| `([a-z-]+)` \| (?:plugins|flannel|upstream).*?\| (\d*) ?\| ?(\d*) ?\|$", PAGE)


def parameters(test: Any) -> int:
    """With how many sets of parameters a test runs."""
    number = 1
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            values: Sized = mark.args[1]
            number *= len(values)
    return number


SAME = {
    "ptp": len(test_interchange.PTP),
    "bridge": parameters(test_differential.test_bridge_leaves_the_same_state_and_result),
    "macvlan": parameters(test_macvlan.test_both_leave_the_same),
    "loopback": parameters(test_interchange.test_loopback) // 2,
    "tuning": parameters(test_tuning.test_both_leave_the_same),
    "flannel": parameters(test_flannel.test_both_leave_the_same),
    "host-local": parameters(host_local.test_same_answers_and_files)
    # Two configurations in each version, and the one with a resolv.conf.
    + 2 * parameters(host_local.test_same_answers_in_every_version)
    + parameters(host_local.test_same_answers_to_runtime_requests)
    + parameters(host_local.test_same_dns),
    "static": parameters(test_static.test_add_and_del),
}
REFUSED = {
    "bridge": parameters(test_differential.test_both_refuse_for_the_same_reason),
    "macvlan": parameters(test_macvlan.test_both_refuse_for_the_same_reason),
    "tuning": parameters(test_tuning.test_both_refuse_for_the_same_reason),
    "flannel": parameters(test_flannel.test_both_refuse_for_the_same_reason),
}


def test_every_built_in_has_its_row() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(PLUGINS)


@pytest.mark.parametrize(("name", "same", "refused"), ROWS)
def test_the_numbers_of_a_row(name: str, same: str, refused: str) -> None:
    assert (int(same or 0), int(refused or 0)) == (SAME.get(name, 0), REFUSED.get(name, 0))


def test_the_sums() -> None:
    assert f"{sum(SAME.values())} configurations whose outcome is the same" in PAGE
    assert f"{sum(REFUSED.values())} that both refuse" in PAGE
    assert f"{len(test_bad_input.CASES)} cases of bad input" in PAGE
