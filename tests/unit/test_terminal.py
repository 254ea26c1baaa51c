"""What others have written is printed as it stands."""

from __future__ import annotations

import pytest
from rich.table import Table

from multus_daemon.terminal import console, literal


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
