"""docs/tested-with.md is as the tests say."""

from tests.repo import others
from tests.repo.others import CHANGE, HAND, KERNELS, PROGRAMS, WEEK, Program


def test_the_page_is_fresh() -> None:
    assert others.PAGE.read_text() == others.page(), "run `python -m tests.repo.others`"


def test_each_program_is_named_by_a_module_and_each_name_is_known() -> None:
    assert {name for names in others.named("RUNS").values() for name in names} == set(PROGRAMS)


def test_only_modules_with_tests_name_what_they_run() -> None:
    files = [*others.named("RUNS"), *others.named("PLAYS")]
    assert [name for name in files if "/test_" not in name and not name.startswith("tests/kernels/")] == []


def test_where_a_program_runs() -> None:
    ours, built, given = Program("v1"), Program("v1", variable="WIDE_OVS_CNI"), Program("v1", variable="WIDE_NOTHING")
    assert others.where(ours, "tests/e2e/test_thin.py") == CHANGE
    assert others.where(ours, "tests/wide/test_ovs.py") == WEEK
    assert others.where(ours, "tests/kernels/debian_kernels.py") == KERNELS
    assert others.where(built, "tests/wide/test_ovs.py") == WEEK
    assert others.where(built, "tests/e2e/test_bond.py") == KERNELS
    assert others.where(given, "tests/e2e/test_sriov.py") == HAND
