"""Figures in the documentation are those that were recorded; what is recorded has a bench and an aim its figure."""

import pytest

from bench import aims, figures, page
from bench.__main__ import RECORDED

FOUND = page.recordings()
HINT = "run `python -m bench.page`"


@pytest.mark.parametrize("name", page.PAGES)
def test_the_tables_are_made_of_the_recorded_figures(name: str) -> None:
    text = (figures.ROOT / name).read_text()
    assert text == page.filled(text, FOUND), HINT


@pytest.mark.parametrize("name", page.TABLES)
def test_a_table_is_whole(name: str) -> None:
    rows = page.TABLES[name](FOUND).splitlines()
    assert {row.count(" | ") for row in rows} == {rows[0].count(" | ")}


def test_every_table_is_on_the_page() -> None:
    text = (figures.ROOT / page.PAGES[0]).read_text()
    assert not [name for name in page.TABLES if f"<!-- figures: {name} -->" not in text and name != "readme"]


def test_every_recording_is_of_a_bench() -> None:
    assert {path.stem for path in figures.FOLDER.glob("*.json")} <= set(RECORDED)


@pytest.mark.parametrize("bench", sorted(FOUND))
def test_a_recording_is_not_of_a_quick_run(bench: str) -> None:
    assert FOUND[bench].options["quick"] is False


@pytest.mark.parametrize("bench", sorted(FOUND))
def test_every_aim_has_its_figure(bench: str) -> None:
    assert not aims.AIMS.get(bench, {}).keys() - FOUND[bench].figures.keys()
