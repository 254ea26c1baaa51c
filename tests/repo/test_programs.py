"""Tests ask `tests.programs` for each program of the host that they start."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ASKED = TESTS / "programs.py"
ALWAYS = frozenset(
    {"cat", "chmod", "cp", "env", "false", "gzip", "kill", "ln", "mkdir", "mount", "mv", "rm", "sh", "sleep", "tar"}
    | {"true", "umount"}
)
"""Programs that every root file system has."""
_STARTS = re.compile(r"subprocess\.(run|Popen|call|check_call|check_output)|asyncio\.create_subprocess_exec")


def scopes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the outermost functions, and what is outside of them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not isinstance(node, ast.ClassDef):
            yield node
        else:
            yield from scopes(node)


def commands(scope: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of each command that is started by a literal name."""
    literals: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    literals.setdefault(target.id, []).append(node.value)

    def first(value: ast.expr, depth: int = 0) -> Iterator[tuple[int, str]]:
        match value:
            case ast.Constant(value=str() as word):
                yield value.lineno, word
            case (
                ast.List(elts=[head, *_]) | ast.Tuple(elts=[head, *_]) | ast.BinOp(left=head) | ast.Starred(value=head)
            ):
                yield from first(head, depth)
            case ast.IfExp(body=body, orelse=orelse):
                yield from first(body, depth)
                yield from first(orelse, depth)
            case ast.Name(id=name) if depth < 3:
                for found in literals.get(name, []):
                    if not isinstance(found, ast.Constant):
                        yield from first(found, depth + 1)

    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and node.args and _STARTS.fullmatch(ast.unparse(node.func)):
            yield from first(node.args[0])


def faults(source: str) -> list[tuple[int, str]]:
    """Return line and fault of each program that is looked for or started without asking."""
    if not any(word in source for word in ("subprocess", "create_subprocess", "shutil.which")):
        return []
    tree = ast.parse(source)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    looked = [(node.lineno, "shutil.which") for node in attributes if ast.unparse(node) == "shutil.which"]
    started = {
        (line, word)
        for scope in scopes(tree)
        for line, word in commands(scope)
        if "/" not in word and word not in ALWAYS
    }
    return sorted([*looked, *started])


def test_every_program_is_asked_for_in_one_place() -> None:
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: {what}: ask tests.programs for it"
        for path in sorted(TESTS.rglob("*.py"))
        # A program of its own, such as a fake plugin, can't import the tests.
        if path != ASKED and not path.read_text().startswith("#!")
        for line, what in faults(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("subprocess.run(['ip', 'link'])", ["ip"]),
        ("def f():\n inside = ['ip', 'netns']\n subprocess.Popen([*inside, 'sleep', '1'])", ["ip"]),
        ("asyncio.create_subprocess_exec('nft', 'list')", ["nft"]),
        ("if not shutil.which('ip'): skip()", ["shutil.which"]),
        ("subprocess.run([program('ip'), 'link'])", []),
        ("subprocess.run(['sh', '-c', 'true'])", []),
        ("subprocess.run([sys.executable])", []),
    ],
)
def test_the_check_sees(source: str, expected: list[str]) -> None:
    assert [what for _, what in faults(source)] == expected
