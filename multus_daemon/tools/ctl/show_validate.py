"""`multusctl validate` for people, and for GitHub: without rich, which takes as long to load as all the rest."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from multus_daemon.diagnosis.validate import Finding, Report

_COLOURS: Final = {"error": "31", "warning": "33"}
_LINE_MAX: Final = 160
"""Characters of a line of the file that are shown."""

_PASSED_OVER_MAX: Final = 5
"""Files that are named."""


def findings(report: Report, files: Mapping[str, bytes]) -> None:
    """As compilers do: `file:line:column: severity: …`, the line, what is meant. What was passed over last."""
    write = sys.stdout.write
    for item in report.sorted():
        name = "standard input" if item.file == "-" else item.file
        head = f"{_plain(name)}:{item.place.line}:{item.place.column}: "
        subject = f" ({_plain(item.subject)})" if item.subject else ""
        write(f"{head}{_coloured(item)}: {_plain(item.problem)}{subject} [{item.check}]\n")
        _show_line(files.get(item.file, b""), item)
        if item.advice:
            write(f"  -> {_plain(item.advice)}\n")
    for file, why in report.passed_over[:_PASSED_OVER_MAX]:
        sys.stderr.write(f"multusctl: {_plain(file)}: passed over: {_plain(why)}\n")
    if (more := len(report.passed_over) - _PASSED_OVER_MAX) > 0:
        sys.stderr.write(f"multusctl: passed over: {_many(more, 'more file')}\n")
    errors, warnings = report.count("error"), report.count("warning")
    write(f"{_many(report.objects, 'object')}: {_many(errors, 'error')}, {_many(warnings, 'warning')}\n")


def github(report: Report) -> None:
    """Workflow commands (GitHub documentation, "Workflow commands for GitHub Actions")."""
    for item in report.sorted():
        where = {"file": item.file, "line": item.place.line, "col": item.place.column, "title": f"{item.check}"}
        properties = ",".join(f"{key}={_escaped(str(value), of_property=True)}" for key, value in where.items())
        subject = f" ({item.subject})" if item.subject else ""
        advice = f"\n{item.advice}" if item.advice else ""
        sys.stdout.write(f"::{item.severity} {properties}::{_escaped(f'{item.problem}{subject}{advice}')}\n")


def _show_line(data: bytes, item: Finding) -> None:
    lines = data.decode("utf-8-sig", "replace").split("\n")
    if not 0 < item.place.line <= len(lines):
        return
    line = lines[item.place.line - 1].rstrip("\r")
    start = max(item.place.column - 1 - _LINE_MAX // 2, 0)
    shown = _plain(line[start : start + _LINE_MAX].replace("\t", " "))
    if shown.strip():
        sys.stdout.write(f"  | {shown}\n  | {' ' * (item.place.column - 1 - start)}^\n")


def _coloured(item: Finding) -> str:
    return f"\x1b[1;{_COLOURS[item.severity]}m{item.severity}\x1b[0m" if sys.stdout.isatty() else item.severity


def _plain(text: str) -> str:
    """One line, without what would steer the terminal: a file's author may have written it."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _escaped(text: str, *, of_property: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if of_property else text


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
