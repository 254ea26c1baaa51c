"""Places of the product, and a small mistake for each."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = "multus_daemon"
_OPERATORS: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_EMPTY: Final = {"list": "[]", "tuple": "()", "dict": "{}", "set": "set()", "frozenset": "frozenset()", "str": '""'}


@dataclass(frozen=True)
class Fault:
    """`after` in place of `before`, at an offset of a file."""

    path: str
    line: int
    function: int
    """First line of the function that it is in; 0 where it is in none."""
    start: int
    before: bytes
    after: bytes

    def mutated(self, source: bytes) -> bytes:
        """The file with the fault in it."""
        return source[: self.start] + self.after + source[self.start + len(self.before) :]

    def __str__(self) -> str:
        texts = (" ".join(text.decode().split()).replace("|", "\\|")[:70] for text in (self.before, self.after))
        return f"{self.path}:{self.line} | `{'` → `'.join(texts)}`"


def faults_of(path: str, source: bytes) -> Iterator[Fault]:
    """Every fault that can be put into a file. A few leave one that can't be compiled."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def text(node: ast.expr | ast.stmt) -> str:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return source[starts[node.lineno - 1] + node.col_offset : end].decode()

    def at(node: ast.AST, returns: str, is_conditional: bool) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield node, f"{text(left)} {_OPERATORS[type(operator)]} {text(right)}"
            case ast.BoolOp(values=[first, *others]):
                word = " and " if isinstance(node.op, ast.And) else " or "
                yield node, f"({word.join(map(text, [first, *others[:-1]]))})"
                yield node, f"({word.join(map(text, others))})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, f"({text(operand)})"
            case ast.IfExp(body=body, orelse=other):
                yield node, f"({text(body)})"
                yield node, f"({text(other)})"
            case ast.Constant(value=bool() as flag):
                yield node, str(not flag)
            case ast.Constant(value=int() | float() as number):
                # A constant of a module is a deadline or a limit.
                is_limit = number and node.col_offset and returns == "module"
                yield node, f"({number} * 100)" if is_limit else str(number + 1)
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                yield node, {"min": "max", "max": "min"}[name] + text(node)[3:]
            case ast.Return(value=None) | ast.Continue() | ast.Break() | ast.Raise() if is_conditional:
                yield node, "pass"
            case ast.Return(value=ast.expr() as value) if returns == "bool":
                yield node, f"return not ({text(value)})"
            case ast.Return(value=ast.expr()) if (kind := returns.partition("[")[0]) in _EMPTY:
                yield node, f"return {_EMPTY[kind]}"
            case ast.Return(value=ast.expr()) if returns.endswith("| None"):
                yield node, "return None"
            case ast.ExceptHandler(type=ast.Tuple(elts=[*kinds, _]) as several):
                yield several, f"({', '.join(map(text, kinds))},)"
            case ast.ExceptHandler(type=ast.expr(), body=[first, *_]):
                yield first, "raise"
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield node, "pass"
            case ast.With(items=[ast.withitem(context, None)]) | ast.AsyncWith(items=[ast.withitem(context, None)]):
                yield node, f"if True{text(node).partition(text(context))[2]}"
            case _:
                pass

    def below(node: ast.AST, function: int, returns: str, is_conditional: bool) -> Iterator[Fault]:
        # What a log line says is no behaviour, and types are for mypy.
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and text(node).startswith("log.")):
            return
        for place, after in at(node, returns, is_conditional):
            start = starts[place.lineno - 1] + place.col_offset
            if after != text(place):
                yield Fault(path, place.lineno, function, start, text(place).encode(), after.encode())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = min(item.lineno for item in (node, *node.decorator_list))
            returns = text(node.returns) if node.returns else ""
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from below(child, function, returns, isinstance(node, ast.If) and name != "test")

    yield from below(ast.parse(source), 0, "module", False)


def drawn(count: int, seed: int) -> list[Fault]:
    """Draw one fault for each place, in the order of a hash, so that a change elsewhere moves few of them."""
    ranked: list[tuple[bytes, Fault]] = []
    sources = {path: path.read_bytes() for path in sorted((ROOT / PRODUCT).rglob("*.py"))}
    for path, source in sources.items():
        seen: dict[bytes, int] = {}
        for fault in faults_of(str(path.relative_to(ROOT)), source):
            words = f"{seed}|{fault.path}|".encode() + fault.before + b"|" + fault.after
            seen[words] = seen.get(words, 0) + 1
            ranked.append((hashlib.sha256(words + b"|%d" % seen[words]).digest(), fault))
    places: dict[tuple[str, int], Fault] = {}
    for _, fault in sorted(ranked, key=lambda item: item[0]):
        if len(places) < count:
            places.setdefault((fault.path, fault.start), fault)
    return list(places.values())
