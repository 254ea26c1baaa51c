"""`python -m tests.repo.daemons`: find end-to-end tests that start a program of Multus without the manifest's rights.

`tests/e2e/rights.py` starts them all (`Container`), with what the shipped manifests grant. Anything else that names the
program is a fault, and status 1. `make check` runs this.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("e2e", "soak", "wide")
PROGRAM: Final = "multus_daemon.cli"

MAY: Final = {
    "e2e/rights.py": "starts it",
    "e2e/test_chart.py": "reads the arguments in the chart with the program's parser",
    "e2e/dying_daemon.py": "is started in a container, and becomes the daemon in a fork",
}
"""Files that may name the program, below `tests/`, and why."""


def faults(source: str) -> Iterator[int]:
    """Lines of a module that name the program, or start it by `RealDaemon`, which needs no root."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if PROGRAM in text:
                yield node.lineno
            case ast.ImportFrom(module=module, names=names):
                imported = {f"{module}.{item.name}" for item in names} | {str(module)}
                if imported & {PROGRAM, "tests.real_daemon.RealDaemon"}:
                    yield node.lineno
            case ast.Import(names=names) if any(item.name == PROGRAM for item in names):
                yield node.lineno
            case ast.Attribute(attr="RealDaemon"):
                yield node.lineno
            case _:
                pass


def main() -> int:
    """Print the faults."""
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: starts Multus without the manifest's rights; use Node or Container "
        "of tests/e2e/rights.py"
        for folder in FOLDERS
        for path in sorted((TESTS / folder).rglob("*.py"))
        if path.relative_to(TESTS).as_posix() not in MAY
        for line in faults(path.read_text())
    ]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
