"""Read the files of `multusctl validate`, and print its findings without rich, which takes long to load."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from multus_tools.command_line import explained
from multus_tools.terminal import counting
from multus_tools.validate import Finding, Report
from multus_tools.validate.located import FILE_MAX_BYTES

STDIN: Final = "-"
_SUFFIXES: Final = frozenset({".yaml", ".yml", ".json", ".conf", ".conflist"})
"""Suffixes of the files that are read in a directory."""
_COLOURS: Final = {"error": "31", "warning": "33"}
_LINE_MAX: Final = 160
"""Maximum characters that are shown of a line of a file."""
_PASSED_OVER_MAX: Final = 5
"""Maximum number of skipped files that are named."""


def read(names: Iterable[str]) -> dict[str, bytes]:
    """Return each file, and the files below each directory, with its content. Raises CommandError."""
    files = {}
    for name in dict.fromkeys(names):
        with explained(f"{name} can't be read"):
            if name == STDIN:
                files[name] = sys.stdin.buffer.read(FILE_MAX_BYTES + 1)
            else:
                path = Path(name)
                below = sorted(item for item in path.rglob("*") if item.suffix in _SUFFIXES and item.is_file())
                for item in below if path.is_dir() else [path]:
                    with item.open("rb") as file:
                        files[str(item)] = file.read(FILE_MAX_BYTES + 1)
    return files


def findings(report: Report, files: Mapping[str, bytes]) -> None:
    """Print the findings as compilers do: `file:line:column: severity: …`, the line, the advice; then a summary."""
    write = sys.stdout.write
    for item in report.sorted():
        name = "standard input" if item.file == STDIN else item.file
        severity = f"\x1b[1;{_COLOURS[item.severity]}m{item.severity}\x1b[0m" if sys.stdout.isatty() else item.severity
        subject = f" ({_plain(item.subject)})" if item.subject else ""
        write(f"{_plain(name)}:{item.place.line}:{item.place.column}: ")
        write(f"{severity}: {_plain(item.problem)}{subject} [{item.check}]\n")
        _show_line(files.get(item.file, b""), item)
        if item.advice:
            write(f"  -> {_plain(item.advice)}\n")
    for file, why in report.passed_over[:_PASSED_OVER_MAX]:
        sys.stderr.write(f"multusctl: {_plain(file)}: passed over: {_plain(why)}\n")
    if (more := len(report.passed_over) - _PASSED_OVER_MAX) > 0:
        sys.stderr.write(f"multusctl: passed over: {counting(more, 'more file')}\n")
    errors, warnings = report.count("error"), report.count("warning")
    write(f"{counting(report.objects, 'object')}: {counting(errors, 'error')}, {counting(warnings, 'warning')}\n")


def github(report: Report) -> None:
    """Print workflow commands (GitHub documentation, "Workflow commands for GitHub Actions")."""
    for item in report.sorted():
        where = {"file": item.file, "line": item.place.line, "col": item.place.column, "title": item.check}
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


def _plain(text: str) -> str:
    """Replace control characters, which could control the terminal: the file may be hostile."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _escaped(text: str, *, of_property: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if of_property else text
