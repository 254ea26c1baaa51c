"""Types are laid out for decoding while their module is imported, by one thread.

msgspec does it at the first decoding of a type, and shows the half of it to every other thread (0.22): requests that a
daemon gets in its first moments crashed it. So a type is given to `msgspec.json.Decoder` on the level of its module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("multus_daemon", "multus_tools")
# Programs, or the part of one, with a single thread.
ONE_THREAD: Final = ("multus_tools/kubectl/", "multus_tools/approver.py", "multus_daemon/settings/__init__.py")


def modules() -> list[Path]:
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    found = {str(path.relative_to(ROOT)): path for path in paths}
    return [path for name, path in found.items() if not name.startswith(ONE_THREAD)]


def late(source: str) -> Iterator[str]:
    """Calls in a function that make msgspec lay out a type there, with their lines."""
    if not any(word in source for word in ("convert", "Decoder", "type=")):
        return
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Attribute(attr="convert" | "Decoder")):
                        yield f"{node.lineno}: {ast.unparse(node.func)}"
                    case ast.Call(func=ast.Attribute(attr="decode"), keywords=more) if "type" in [k.arg for k in more]:
                        yield f"{node.lineno}: {ast.unparse(node.func)} with a type"
                    case _:
                        pass


def test_types_are_laid_out_at_import() -> None:
    assert [f"{path}:{call}" for path in modules() for call in late(path.read_text())] == []


def test_what_is_found() -> None:
    source = "def f(data):\n    return json.decode(data, type=T, strict=False)\nX = lambda d: msgspec.convert(d, T)\n"
    assert list(late(source)) == ["2: json.decode with a type", "3: msgspec.convert"]
    assert list(late("decode = msgspec.json.Decoder(T).decode\ndef f(data):\n    return decode(data)\n")) == []
