"""The core is blocking code: what runs in the thread of a request knows no event loop (`docs/architecture.md`).

An `await` there would need a loop in that thread, and a primitive of asyncio in a thread without one fails, or waits
for ever, in the first case that no test has. Who needs the loop goes through a `Portal`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = Path(__file__).resolve().parents[2] / "multus_daemon"
PACKAGES: Final = ("pod", "plugins/builtin", "kernel")
# The other modules of these packages start processes, or run for as long as the daemon does, which is the loop's work.
MODULES: Final = (
    *(f"plugins/{name}.py" for name in ("plugin", "binary", "select", "run", "compare", "cache", "find")),
    *(f"cluster/{name}.py" for name in ("conf_files", "devices")),
    *(f"node/{name}.py" for name in ("gc", "orphans", "status")),
)
# Modules that only code of the event loop uses.
OF_THE_LOOP: Final = ("asyncio", "multus_daemon.runtime.aio")


def core() -> list[Path]:
    found = [path for package in PACKAGES for path in (PACKAGE / package).rglob("*.py")]
    return sorted([*found, *(PACKAGE / module for module in MODULES)])


def is_of_the_loop(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in OF_THE_LOOP)


def breaches(source: str) -> Iterator[str]:
    """Yield the event-loop constructs of a module, with their lines; strings and comments do not count."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.AsyncFunctionDef():
                yield f"{node.lineno}: async def {node.name}"
            case ast.AsyncFor() | ast.AsyncWith() | ast.Await():
                yield f"{node.lineno}: {type(node).__name__}"
            case ast.comprehension(is_async=1):
                yield f"{node.target.lineno}: async comprehension"
            case ast.Import():
                yield from (f"{node.lineno}: import {name.name}" for name in node.names if is_of_the_loop(name.name))
            case ast.ImportFrom(module=str(module)):
                # `from multus_daemon.runtime import aio` imports a module, too.
                imported = (module, *(f"{module}.{name.name}" for name in node.names))
                if any(is_of_the_loop(name) for name in imported):
                    yield f"{node.lineno}: from {module} import {', '.join(name.name for name in node.names)}"
            case _:
                pass


@pytest.mark.parametrize("path", core(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_core_knows_no_event_loop(path: Path) -> None:
    assert list(breaches(path.read_text())) == []


def test_every_package_has_modules() -> None:
    for package in PACKAGES:
        assert len(list((PACKAGE / package).glob("*.py"))) > 3


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("async def f(): pass", ["1: async def f"]),
        ("class A:\n    async def f(self): pass", ["2: async def f"]),
        ("def f():\n    async def g(): pass\n    return g", ["2: async def g"]),
        ("async def f(): await g()", ["1: async def f", "1: Await"]),
        ("async def f():\n    async with g(): pass", ["1: async def f", "2: AsyncWith"]),
        ("async def f():\n    async for _ in g(): pass", ["1: async def f", "2: AsyncFor"]),
        ("async def f():\n    return [x async for x in g()]", ["1: async def f", "2: async comprehension"]),
        ("import os, asyncio", ["1: import asyncio"]),
        ("import asyncio.subprocess as s", ["1: import asyncio.subprocess"]),
        ("def f():\n    import asyncio", ["2: import asyncio"]),
        ("from asyncio import Lock, Event", ["1: from asyncio import Lock, Event"]),
        ("from asyncio.locks import Lock", ["1: from asyncio.locks import Lock"]),
        ("from multus_daemon.runtime import aio", ["1: from multus_daemon.runtime import aio"]),
        ("from multus_daemon.runtime.aio import ended", ["1: from multus_daemon.runtime.aio import ended"]),
        ("import asyncio_like\nfrom multus_daemon.runtime import threads\nfrom . import x", []),
        ('"""async def f: await g, import asyncio"""  # import asyncio', []),
        ("def f(): return [x for x in g()]", []),
    ],
)
def test_what_is_found(source: str, expected: list[str]) -> None:
    assert sorted(breaches(source)) == sorted(expected)
