"""`docs/builtin-plugins.md` has a row for every built-in, and the tests that it names exist."""

import ast
import re
from pathlib import Path

from multus_daemon.builtin.runner import PLUGINS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "builtin-plugins.md").read_text()
# The type, and the cell that says with what it is compared.
ROWS = re.findall(r"(?m)^\| `([a-z-]+)` \| (?:plugins|flannel|upstream)[^|]*\| ([^|]+) \|", PAGE)
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
# It does nothing, so there is nothing to compare.
WITHOUT_REFERENCE = {"passthru"}


def functions(path: str) -> set[str]:
    found = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_built_in_has_its_row() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(PLUGINS)


def test_every_row_names_the_test_that_compares() -> None:
    compared = {name for name, cell in ROWS if any(test for _, test in REFERENCE.findall(cell))}
    assert compared == set(PLUGINS) - WITHOUT_REFERENCE


def test_every_test_that_is_named_exists() -> None:
    named = REFERENCE.findall(PAGE)
    assert named
    assert not [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).is_file() or (test and test not in functions(path))
    ]
