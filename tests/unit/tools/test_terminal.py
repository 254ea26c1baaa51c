"""Text that others have written is printed unchanged."""

from __future__ import annotations

import pytest
from rich.table import Table

from multus_tools.tables import Rows, console
from multus_tools.terminal import literal


@pytest.mark.parametrize("text", ["9e:cd:b6:ab:48:cf", "[bold]x[/]", "fe80::ab:1", "[/red]"])
def test_a_text_is_shown_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("text")
    table.add_row(literal(text))
    console().print(table)
    console().print(f"[bold]{literal(text)}[/]")
    shown = capsys.readouterr().out.splitlines()
    assert [shown[-3].strip("│ "), shown[-1]] == [text, text]


def test_a_text_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(literal("a\x1b]0;title\x07b\r\nc\u202ed"))
    assert capsys.readouterr().out == "a ]0;title b  c d\n"


def test_a_table_cuts_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    name = "a-namespace-with-a-long-name/" + "x" * 60
    narrow = Rows("pod", "cause")
    narrow.add_row(name, "y" * 60)
    console(width=60).print(narrow)
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")][1:]
    columns = zip(*(row[1:3] for row in rows), strict=True)
    assert ["".join(cells).replace(" ", "") for cells in columns] == [name, "y" * 60]
