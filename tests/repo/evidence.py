"""Find the tests that are the evidence for a row of `docs/compatibility.md` or `tests/conformance.txt`.

The documents name no tests: a marker above a test names the rows that it shows. Markers are read from the source of the
test modules, which are not imported. A marker counts only as a decorator of a test, or of a class of tests.

    python -m tests.repo.evidence                    the documents with the tests of every row
    python -m tests.repo.evidence npwg 3.2a 7.3      the tests of these rows, one per line, as pytest takes them
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeGuard

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENTS: Final = (ROOT / "docs" / "compatibility.md", ROOT / "tests" / "conformance.txt")

SECTIONS: Final = {
    "The weak spots of upstream": "weak_spot",
    "The multi-network specification": "npwg",
    "The conformance catalogue": "conformance",
}
"""Sections whose tables have evidence, and the marker that names their rows."""

_ITEM: Final = re.compile(r"- ([\w-]+): (.*?)(?:; ((?:better|elsewhere): .*))?$")
_REASON: Final = re.compile(r"(no test|elsewhere|later): \S")


class Row(NamedTuple):
    """A row of a table, or an item of a list (`- row: case; difference`). Its first cell identifies it."""

    marker: str
    cells: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Return the key, which equals the `key` of a `Mark` of this row."""
        return self.marker, self.cells[0]

    @property
    def reason(self) -> str:
        """Why the row has no test; empty for a row that needs one."""
        return self.cells[-1] if _REASON.match(self.cells[-1]) else ""


class Mark(NamedTuple):
    """A test that is evidence for a row."""

    marker: str
    row: str
    test: str
    """The node ID: `tests/unit/test_a.py::TestB::test_c`."""

    @property
    def key(self) -> tuple[str, str]:
        """Return the key, which equals the `key` of the `Row`."""
        return self.marker, self.row


def documents() -> str:
    """Both documents, one after the other."""
    return "\n".join(path.read_text() for path in DOCUMENTS)


def rows(document: str) -> list[Row]:
    """Every table row of the sections that have evidence."""
    return [
        Row(marker, _cells(line))
        for line, marker, position in _lines(document)
        if marker and (position > 1 or _ITEM.match(line))
    ]


def with_tests(document: str, marks: Iterable[Mark]) -> str:
    """The document with a column of tests in the tables that have evidence."""
    tests = defaultdict(list)
    for mark in marks:
        tests[mark.key].append(f"`{mark.test}`")
    written = []
    for line, marker, position in _lines(document):
        if marker and position >= 0:
            added = {0: "shown by", 1: "---"}.get(position) or ", ".join(tests[marker, _cells(line)[0]])
            line = f"{line} {added} |"
        elif marker and _ITEM.match(line):
            line = f"{line} ({', '.join(tests[marker, _cells(line)[0]])})"
        written.append(line)
    return "\n".join(written) + "\n"


@functools.cache
def marks(root: Path) -> list[Mark]:
    """The marks of all test modules below `root`/tests, in the order of the files.

    Raises ValueError for a marker whose rows cannot be read: not a decorator of a test, or its arguments are not
    constants.
    """
    found: list[Mark] = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text()
        if not any(f"mark.{marker}" in text for marker in SECTIONS.values()):
            continue
        module, name = ast.parse(text), str(path.relative_to(root))
        decorators: list[ast.expr] = []
        try:
            found += _marks_in(module, name, [], decorators)
        except ValueError as error:
            raise ValueError(f"{name}:{error}") from None
        read = {id(node) for decorator in decorators for node in ast.walk(decorator)}
        stray = [node.lineno for node in ast.walk(module) if _is_marker(node) and id(node) not in read]
        if stray:
            raise ValueError(f"{name}:{stray[0]}: a marker of evidence belongs above a test or a class of tests")
    return found


def _lines(document: str) -> Iterator[tuple[str, str, int]]:
    """Each line, the marker of its section or "", and its position in its table: 0 is the head, -1 is outside."""
    marker, position = "", -1
    for line in document.splitlines():
        if line.startswith("## "):
            marker = SECTIONS.get(line.removeprefix("## "), "")
        position = position + 1 if line.startswith("|") else -1
        yield line, marker, position


def _cells(line: str) -> tuple[str, ...]:
    if item := _ITEM.match(line):
        return item[1], item[2], item[3] or "same"
    return tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))


def _marks_in(
    body: ast.Module | ast.ClassDef, name: str, outer: list[tuple[str, str]], decorators: list[ast.expr]
) -> Iterator[Mark]:
    """The marks of the tests in `body`; `outer`: marker and row of the classes around. Adds to `decorators`."""
    for node in body.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.name.startswith("Test" if isinstance(node, ast.ClassDef) else "test"):
            continue
        own = [item for item in node.decorator_list if isinstance(item, ast.Call) and _is_marker(item.func)]
        decorators += own
        named = outer + [mark for decorator in own for mark in _named(decorator)]
        if isinstance(node, ast.ClassDef):
            yield from _marks_in(node, f"{name}::{node.name}", named, decorators)
        else:
            yield from (Mark(marker, row, f"{name}::{node.name}") for marker, row in named)


def _is_marker(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in SECTIONS.values()
        and ast.unparse(node.value) in ("pytest.mark", "mark")
    )


def _named(decorator: ast.Call) -> list[tuple[str, str]]:
    assert isinstance(decorator.func, ast.Attribute)
    values = [item.value for item in decorator.args if isinstance(item, ast.Constant)]
    if not values or len(values) != len(decorator.args) or decorator.keywords:
        raise ValueError(f"{decorator.lineno}: {decorator.func.attr} takes one or more rows, written out")
    return [(decorator.func.attr, str(value)) for value in values]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the documents with their tests, or the tests of some rows."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.repo.evidence", description="Tests of the rows of compatibility.md."
    )
    parser.add_argument("marker", nargs="?", choices=list(SECTIONS.values()), help="without it, all documents")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="first cells of rows; without any, all of the marker's")
    wanted = parser.parse_args(arguments)
    document = documents()
    if wanted.marker is None:
        print(with_tests(document, marks(ROOT)), end="")
        return
    known = {row.cells[0]: row for row in rows(document) if row.marker == wanted.marker}
    if unknown := [name for name in wanted.rows if name not in known]:
        parser.error(f"no row {', '.join(unknown)} of {wanted.marker}")
    names = wanted.rows or list(known)
    for name in names:
        if known[name].reason:
            print(f"{name}: {known[name].reason}", file=sys.stderr)
    tests = [mark.test for mark in marks(ROOT) if mark.marker == wanted.marker and mark.row in names]
    for test in dict.fromkeys(tests):
        print(test)


if __name__ == "__main__":
    main()
