"""Tables are made from recordings; what is outside the marks is left alone."""

import re
from pathlib import Path

import pytest

from bench import aims, figures, page
from bench.figures import Recording
from bench.stats import Figure


def recording(bench: str, found: dict[str, Figure]) -> Recording:
    return Recording(bench, "abc1234", "2026-01-02", "a machine", {}, (0.5, 1.0), {}, found)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = recording("verbs", {"ADD 0 ours": Figure(12.5, "ms", 11.0, 14.0, 30)})
    made.save(tmp_path)
    assert figures.load("verbs", tmp_path) == made


def test_four_digits_are_kept(tmp_path: Path) -> None:
    recording("verbs", {"key": Figure(1.234567, "ms", 123456.7, 0.000123456, 30)}).save(tmp_path)
    loaded = figures.load("verbs", tmp_path)
    assert loaded is not None
    assert loaded.figures["key"] == Figure(1.235, "ms", 123500.0, 0.0001235, 30)


def test_nothing_recorded(tmp_path: Path) -> None:
    assert figures.load("verbs", tmp_path) is None


def test_a_table_takes_the_place_of_what_was_between_the_marks() -> None:
    text = "before\n<!-- figures: shim -->\nold\n<!-- end of figures -->\nafter\n"
    found = {"shim": recording("shim", {"ours time": Figure.exact(0.5, "ms")})}
    made = page.filled(text, found)
    assert re.fullmatch(r"before\n<!-- figures: shim -->\n\| .*\n<!-- end of figures -->\nafter\n", made, re.DOTALL)
    assert "0.50 ms" in made
    assert "old" not in made
    assert page.filled(made, found) == made


def test_a_table_that_does_not_exist() -> None:
    with pytest.raises(KeyError, match="none"):
        page.filled("<!-- figures: none -->\n<!-- end of figures -->", {})


@pytest.mark.parametrize("name", page.TABLES)
def test_every_table_can_be_made_of_nothing(name: str) -> None:
    rows = page.TABLES[name]({}).splitlines()
    assert len({row.count(" | ") for row in rows}) == 1


@pytest.mark.parametrize(
    ("value", "state"), [(0.99, ""), (1.0, ""), (1.01, ", **over**")], ids=["below", "equal", "above"]
)
def test_what_is_over_its_aim_is_told(value: float, state: str) -> None:
    (key, aim), *_ = aims.AIMS["peer"].items()
    table = page.aims_table({"peer": recording("peer", {key: Figure.exact(value * aim.limit, "x")})})
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {aim.text} |")]
    assert row.endswith(f" x{state} |")


def test_an_aim_without_a_figure_is_told() -> None:
    assert page.aims_table({}).count(page.NONE) == sum(map(len, aims.AIMS.values()))
