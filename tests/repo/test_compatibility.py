"""Every row of the compatibility and conformance tables has a test with its marker, or a reason why not."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.repo import evidence
from tests.repo.evidence import Mark

WEAK_SPOTS = range(1, 65)
COLUMNS = {"weak_spot": 3, "npwg": 3, "conformance": 3}

TEXT = evidence.documents()
ROWS = evidence.rows(TEXT)

A_DOCUMENT = """\
# Title

## The weak spots of upstream

| no | upstream | here |
| --- | --- | --- |
| 1 | bad | good |
| 2 | bad | elsewhere: not ours |

## Something else

| 1 | 2 |
| --- | --- |
| 3 | 4 |
"""


@pytest.fixture(scope="module")
def marks() -> list[Mark]:
    return evidence.marks(evidence.ROOT)


def write(root: Path, text: str) -> Path:
    path = root / "tests" / "unit" / "test_it.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"import pytest\n\n{text}\n")
    return root


def test_every_row_is_whole_and_there_once() -> None:
    assert {row.marker for row in ROWS} == set(COLUMNS)
    ragged = [row.key for row in ROWS if len(row.cells) != COLUMNS[row.marker] or not all(row.cells)]
    assert not ragged, "cells are divided by ' | ', which no text may have"
    assert not [key for key, times in Counter(row.key for row in ROWS).items() if times > 1]
    assert [row.cells[0] for row in ROWS if row.marker == "weak_spot"] == [str(number) for number in WEAK_SPOTS]


def test_the_readme_counts_the_rows() -> None:
    counted = re.findall(r"All (\d+) differences", (evidence.ROOT / "README.md").read_text())
    assert counted == [str(len(WEAK_SPOTS))]


def test_every_row_has_a_test_or_the_reason_why_not(marks: list[Mark]) -> None:
    shown = {mark.key for mark in marks}
    assert not [row.key for row in ROWS if row.key not in shown and not row.reason], "neither a test nor a reason"
    assert not [row.key for row in ROWS if row.key in shown and row.reason], "a reason, though there is a test"


def test_every_marker_names_a_row(marks: list[Mark]) -> None:
    known = {row.key for row in ROWS}
    assert not [mark for mark in marks if mark.key not in known]


def test_the_document_names_no_test() -> None:
    """A test that is renamed or moved must not change a document."""
    assert not re.findall(r"\S*\btest_\w+\S*|tests/\S+\.(?:py|zig)\S*", TEXT)


def test_the_column_of_tests() -> None:
    marks = [Mark("weak_spot", "1", "tests/test_a.py::test_b"), Mark("weak_spot", "1", "tests/test_a.py::test_c")]
    changed = {
        "| no | upstream | here |": "| no | upstream | here | shown by |",
        "| --- | --- | --- |": "| --- | --- | --- | --- |",
        "| 1 | bad | good |": "| 1 | bad | good | `tests/test_a.py::test_b`, `tests/test_a.py::test_c` |",
        "| 2 | bad | elsewhere: not ours |": "| 2 | bad | elsewhere: not ours |  |",
    }
    expected = [changed.get(line, line) for line in A_DOCUMENT.splitlines()]
    assert evidence.with_tests(A_DOCUMENT, marks).splitlines() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pytestmark = pytest.mark.weak_spot(1)", "3: a marker of evidence belongs above a test"),
        ("@pytest.mark.weak_spot(1)\ndef helper(): ...", "3: a marker of evidence belongs above a test"),
        (
            "@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.npwg('5'))])\ndef test_a(a): ...",
            "3: a marker of evidence belongs above a test",
        ),
        ("@pytest.mark.weak_spot\ndef test_a(): ...", "3: a marker of evidence belongs above a test"),
        ("@pytest.mark.weak_spot()\ndef test_a(): ...", "3: weak_spot takes one or more rows"),
        ("@pytest.mark.npwg(ROW)\ndef test_a(): ...", "3: npwg takes one or more rows"),
        ("@pytest.mark.npwg('5', row='6')\ndef test_a(): ...", "3: npwg takes one or more rows"),
    ],
)
def test_a_marker_that_cannot_be_read_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"tests/unit/test_it.py:{message}")):
        evidence.marks(write(tmp_path, text))


def test_the_command(capsys: pytest.CaptureFixture[str], marks: list[Mark]) -> None:
    evidence.main(["npwg", "3.2a", "3.2d"])
    written = capsys.readouterr()
    assert written.out.splitlines() == [mark.test for mark in marks if mark.key == ("npwg", "3.2a")] != []
    assert written.err.startswith("3.2d: elsewhere: ")
    evidence.main([])
    assert capsys.readouterr().out == evidence.with_tests(TEXT, marks)
    with pytest.raises(SystemExit):
        evidence.main(["weak_spot", "1", "99"])
    assert "no row 99 of weak_spot" in capsys.readouterr().err
