"""Tables as kubectl prints them: wide, without headers, and row by row while they change."""

from __future__ import annotations

from typing import Any

import pytest

from multus_tools import tables
from multus_tools.tables import Listing

HEADERS = ("pod", "state")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def leak(**fields: Any) -> dict[str, Any]:
    attachment = {"network": "default/blue", "addresses": ["10.1.0.2/24"]}
    return {
        "node": "node-a",
        "pod": "default/web",
        "container": "0123456789abcdef",
        "since": 5.0,
        "problem": "its DEL failed 3 times and is tried again: no such device",
        "advice": "remove the cause",
        "attachments": [attachment],
        **fields,
    }


def test_a_watch_shows_what_is_new_changed_or_gone(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Listing(watch=True)
    shown = []
    for found in (
        [("a", "ready"), ("b", "[bold]ready[/]")],
        [("a", "ready"), ("b", "[bold]ready[/]")],
        [("a", "not ready"), ("b", "[bold]ready[/]")],
        [("b", "[bold]ready[/]"), ("a-longer-name", "ready")],
        [],
        [("a", "ready")],
    ):
        rows.rows(HEADERS, found)
        shown.append([line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()])
    assert [[[cell.strip() for cell in line] for line in lines] for lines in shown] == [
        [["pod", "state"], ["a", "ready"], ["b", "ready"]],
        [],
        [["a", "not ready"]],
        [["a-longer-name", "ready"], ["a", "gone"]],
        [["b", "gone"], ["a-longer-name", "gone"]],
        [["a", "ready"]],
    ]


def test_the_key_of_a_row_may_have_several_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Listing(watch=True, headers=False)
    rows.rows(("pod", "interface", "network"), [("a", "eth0", "x"), ("a", "net1", "y")], key=2)
    capsys.readouterr()
    rows.rows(("pod", "interface", "network"), [("a", "eth0", "x")], key=2)
    assert capsys.readouterr().out.split() == ["a", "net1", "gone"]


def test_remarks_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Listing(watch=True)
    for lines in (["x"], ["x"], ["x", "y"], [], ["x"]):
        rows.note(*lines)
    assert capsys.readouterr() == ("", "x\ny\nx\n")


def test_wide_has_more_columns_and_folds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = "word " * 40
    Listing(wide=True).rows(HEADERS, [("a", "ready", text)], wide=("cause",))
    head, row = capsys.readouterr().out.splitlines()
    assert (head.split(), row) == (["pod", "state", "cause"], f"a     ready   {text}".ljust(len(row)))
    Listing().rows(HEADERS, [("a", "ready", text)], wide=("cause",))
    assert "word" not in capsys.readouterr().out


@pytest.mark.parametrize("setting", [{"node": "node-a"}, {"setAside": 86400.0}])
def test_a_leftover_is_one_line(setting: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = leak(**setting)
    tables.leaks(Listing(), [found])
    lines = capsys.readouterr().out.splitlines()
    # Three lines of the header, the end of the frame, and what has no room.
    assert len(lines) == 6
    assert lines[5].strip() == "the terminal is too narrow for since, container"
    assert all(word in lines[3] for word in ("node-a", "default/web", "its DEL failed 3 times and is tried again "))
    tables.leaks(Listing(wide=True, headers=False), [found])
    (line,) = capsys.readouterr().out.splitlines()
    assert all(
        word in line for word in ("0123456789abcdef ", "default/blue 10.1.0.2/24", "no such device", "remove the")
    )
    assert ("since 1970-01-0" in line) is ("setAside" in found)
