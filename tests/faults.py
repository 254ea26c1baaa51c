"""Put one fault at a time into a copy of the product, and see which test notices it.

    python -m tests.faults                              100 places drawn by a fixed seed, with the unit tier
    python -m tests.faults --tiers integration e2e --only 3 17
    python -m tests.faults --list                       print the places and run nothing

A fault is a small mistake: a comparison that is off by one, a forgotten condition, call, lock or raise, a deadline of a
hundred times the length. Each is put into a clone of HEAD. Of the unit tier only the test files run that call the
function with the fault; a run without a fault, with this module as a plugin of pytest, finds them. A fault is noticed
where a test fails, and fails again. Places keep their order when other code changes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import pytest

from tests.conftest import TIERS

ROOT: Final = Path(__file__).parent.parent
PRODUCT: Final = "multus_daemon"
RUN_SECONDS: Final = 3600
_OPERATORS: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_EMPTY: Final = {"list": "[]", "tuple": "()", "dict": "{}", "set": "set()", "frozenset": "frozenset()", "str": '""'}
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


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
                yield node, f"({number} * 100)" if node.col_offset and returns == "module" else str(number + 1)
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


CALLS_FILE: Final = "MULTUS_TEST_CALLS"
"""Environment variable of the run without a fault: where the file goes that names the callers of each function."""
_callers: dict[str, dict[str, None]] = {}
_called: set[CodeType] = set()


def _note_call(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _called.add(frame.f_code)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """As a plugin of pytest: note the functions that a test calls, in its own process."""
    if CALLS_FILE in os.environ:
        _called.clear()
        threading.setprofile(_note_call)
        sys.setprofile(_note_call)
    yield
    sys.setprofile(None)
    for code in _called:
        if code.co_filename.startswith(f"{ROOT}/{PRODUCT}/"):
            function = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno}"
            _callers.setdefault(function, {})[str(item.path.relative_to(ROOT))] = None


def pytest_sessionfinish() -> None:
    """Write what was noted."""
    if CALLS_FILE in os.environ:
        Path(os.environ[CALLS_FILE]).write_text(json.dumps({name: list(files) for name, files in _callers.items()}))


class Copy:
    """A clone of HEAD, in which the tests run."""

    def __init__(
        self, folder: Path, failing: Sequence[str] = (), callers: Mapping[str, list[str]] | None = None
    ) -> None:
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, folder], check=True)
        self._folder, self._callers = folder, callers or {}
        self._failing = list(failing)

    def look(self, tiers: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
        """Run everything without a fault: the tests that fail anyway, and the test files by function that they call."""
        calls = self._folder / "calls.json"
        failing = []
        for tier in tiers:
            environ = {CALLS_FILE: str(calls)} if tier == "unit" else {}
            failing += _FAILED.findall(self._pytest(tier, ["-p", "tests.faults", *self._whole(tier)], environ)[1])
        return failing, json.loads(calls.read_text()) if calls.exists() else {}

    def noticed(self, fault: Fault, tiers: Sequence[str]) -> str:
        """Return the test that fails with the fault, and fails again; empty where none does."""
        path = self._folder / fault.path
        source = path.read_bytes()
        path.write_bytes(fault.mutated(source))
        try:
            return next(filter(None, (self._by(tier, self._tests(tier, fault)) for tier in tiers)), "")
        finally:
            path.write_bytes(source)

    def _tests(self, tier: str, fault: Fault) -> list[str]:
        """Those that can matter: of the unit tier, the files that call the function."""
        if tier != "unit" or not fault.function:
            return self._whole(tier)
        return self._callers.get(f"{fault.path}:{fault.function}", [])

    def _by(self, tier: str, tests: list[str]) -> str:
        left_out = list(self._failing)
        while tests:
            status, output = self._pytest(tier, [*tests, "-x", *(f"--deselect={test}" for test in left_out)])
            failed = _FAILED.findall(output)
            if status in (0, 5):
                break
            if not failed or self._pytest(tier, failed[:1])[0]:
                return failed[0] if failed else output.strip().rpartition("\n")[2][:100]
            # It failed by chance.
            left_out.append(failed[0])
        return ""

    def _whole(self, tier: str) -> list[str]:
        return [f"tests/{folder}" for folder in TIERS[tier]]

    def _pytest(self, tier: str, arguments: Sequence[str], more: Mapping[str, str] | None = None) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-m", tier, *arguments]
        environ = {**os.environ, "PYTHONPATH": str(self._folder), "HYPOTHESIS_PROFILE": "quick", **(more or {})}
        try:
            done = subprocess.run(
                command, cwd=self._folder, env=environ, capture_output=True, text=True, timeout=RUN_SECONDS
            )
        except subprocess.TimeoutExpired:
            return 1, f"no end within {RUN_SECONDS} s"
        return done.returncode, done.stdout


def main() -> int:
    """Return 0 where at most 5 of 100 are not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=["unit"])
    parser.add_argument("--only", nargs="+", type=int, metavar="NUMBER")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    numbered = enumerate(drawn(100, options.seed), 1)
    chosen = {number: fault for number, fault in numbered if not options.only or number in options.only}
    if options.list:
        print(*(f"| {number} | {fault} |" for number, fault in chosen.items()), sep="\n")
        return 0
    missed = 0
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def work(fault: Fault) -> str:
        copy = copies.get()
        try:
            return copy.noticed(fault, options.tiers)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, futures.ThreadPoolExecutor(options.jobs) as pool:
        failing, callers = Copy(Path(folder, "first")).look(options.tiers)
        print("fails without a fault:", *failing)
        for job in range(options.jobs):
            copies.put(Copy(Path(folder, str(job)), failing, callers))
        running = {pool.submit(work, fault): number for number, fault in chosen.items()}
        print("| | place | fault | noticed by |\n| --- | --- | --- | --- |", flush=True)
        for done in futures.as_completed(running):
            test = done.result()
            missed += not test
            print(f"| {running[done]} | {chosen[running[done]]} | {test or '**nothing**'} |", flush=True)
    print(f"{missed} of {len(chosen)} are not noticed")
    return int(missed * 20 > len(chosen))


if __name__ == "__main__":
    sys.exit(main())
