"""`docs/compatibility.md` names tests as its evidence: they exist, they are marked, and no weak spot is left out."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "compatibility.md"
WEAK_SPOTS = range(1, 61)

REFERENCE = re.compile(r"`(tests/[\w/.-]+\.(?:py|zig))(?:::([\w:]+))?`")
# What stands in the last column where no test can.
REASON = re.compile(r"^(no test|elsewhere|later): \S+")


def section(title: str) -> str:
    text = DOCUMENT.read_text()
    match = re.search(rf"(?ms)^## {re.escape(title)}$(.*?)(?=^## |\Z)", text)
    assert match, f"{DOCUMENT.name} has no section {title!r}"
    return match.group(1)


def rows(title: str) -> list[list[str]]:
    """The cells of each table row of a section, without the heads."""
    lines = section(title).splitlines()
    ruled = [re.match(r"^\|[ :|-]+$", line) is not None for line in lines]
    heads = {index for number, rule in enumerate(ruled) if rule for index in (number - 1, number)}
    return [
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for index, line in enumerate(lines)
        if line.startswith("|") and index not in heads
    ]


@cache
def functions(path: Path) -> dict[str, str]:
    """The source of each function of a test module, decorators included, by its name."""
    text = path.read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            found[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
    return found


def references(text: str) -> list[tuple[Path, str]]:
    return [(ROOT / path, name.rpartition("::")[2]) for path, name in REFERENCE.findall(text)]


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for path, name in references(DOCUMENT.read_text()):
        exists = path.is_file() and (not name or path.suffix != ".py" or name in functions(path))
        if not exists:
            missing.append(f"{path.relative_to(ROOT)}::{name}")
    assert not missing


@pytest.mark.parametrize(
    ("title", "columns"),
    [("The weak spots of upstream", 4), ("The multi-network specification", 4), ("The conformance catalogue", 3)],
)
def test_every_row_has_its_evidence(title: str, columns: int) -> None:
    found = rows(title)
    assert found
    ragged = [row[0] for row in found if len(row) != columns]
    assert not ragged, "cells are divided by ' | ', which no text may have"
    assert not [row[0] for row in found if not (references(row[-1]) or REASON.match(row[-1]))]


def test_every_weak_spot_is_listed_once() -> None:
    assert [int(row[0]) for row in rows("The weak spots of upstream")] == list(WEAK_SPOTS)


def test_a_test_of_a_weak_spot_carries_its_marker() -> None:
    unmarked = []
    for row in rows("The weak spots of upstream"):
        named = [(path, name) for path, name in references(row[-1]) if name]
        if named and not any(f"weak_spot({row[0]})" in functions(path)[name] for path, name in named):
            unmarked.append(row[0])
    assert not unmarked


def test_every_marker_is_in_the_list() -> None:
    listed = {row[0]: row[-1] for row in rows("The weak spots of upstream")}
    unlisted = [
        f"{number}: {path.relative_to(ROOT)}::{name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path != Path(__file__)
        for name, source in functions(path).items()
        for number in re.findall(r"weak_spot\((\d+)\)", source)
        if not any(found.name == path.name for found, _ in references(listed[number]))
    ]
    assert not unlisted
