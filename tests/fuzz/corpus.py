"""The inputs that fuzzing has found, a file for each target: `tests/data/corpus/TARGET.txt`.

A line is one input as a literal of Python (`b'...'`), so that a change shows which inputs it adds. The shortest input
comes first, and none is there twice.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "data" / "corpus"


def read(name: str) -> list[bytes]:
    """Return the inputs of a target, none for a target without a file."""
    path = FOLDER / f"{name}.txt"
    return [ast.literal_eval(line) for line in path.read_text("ascii").splitlines()] if path.exists() else []


def add(name: str, inputs: Iterable[bytes]) -> None:
    """Write the inputs into the file of a target, which is made if there is none."""
    ordered = sorted({*read(name), *inputs}, key=lambda data: (len(data), data))
    (FOLDER / f"{name}.txt").write_text("".join(f"{data!r}\n" for data in ordered), "ascii")
