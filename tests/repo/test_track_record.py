"""docs/track-record.md and the incidents of tests/record say the same, without running one."""

from __future__ import annotations

import dataclasses

import pytest

from tests.e2e.upstream import NEW, OLD
from tests.record.incident import Seen
from tests.record.page import HEADER, INTRODUCTION, PAGE, SKIPPED, claimed, written
from tests.record.rows import ROWS
from tests.record.run import Result


def test_the_page_has_every_incident_with_its_verdict() -> None:
    text = PAGE.read_text()
    assert text.startswith(f"{INTRODUCTION}\n{HEADER}\n"), "python -m tests.record --page"
    assert [cells[:3] for cells in written(text)] == [claimed(row) for row in ROWS.values()]


def test_every_incident_of_the_page_was_seen() -> None:
    assert [cells[0] for cells in written(PAGE.read_text()) if SKIPPED in cells[3:]] == []


def test_reports_are_public_threads() -> None:
    for row in ROWS.values():
        assert row.report.startswith("https://github.com/"), row.name
        assert {"issues", "pull"} & {*row.report.split("/")}, row.name


@pytest.mark.parametrize(
    ("release", "upstream", "here", "says"),
    [
        (OLD, True, False, []),
        (OLD, False, False, ["upstream no longer fails"]),
        (OLD, True, True, ["ours fails"]),
        (NEW, False, False, []),
        (NEW, True, False, ["the page says that it does not"]),
    ],
)
def test_what_is_not_as_the_page_says_is_red(release: str, upstream: bool, here: bool, says: list[str]) -> None:
    row = dataclasses.replace(next(iter(ROWS.values())), upstream_is_right=False, mended_in=NEW)
    result = Result(row, release, {"upstream": Seen(upstream, ""), "here": Seen(here, "")})
    assert len(result.faults) == len(says)
    assert all(text in result.verdict for text in says)
    assert result.verdict.startswith("NOT AS") is bool(says)


def test_what_could_not_be_judged_is_red_and_what_is_missing_is_not() -> None:
    row = next(iter(ROWS.values()))
    assert Result(row, OLD, broken="it took too long").faults
    assert not Result(row, OLD, skipped="needs openssl").faults
