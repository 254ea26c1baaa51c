"""Every error that the product raises says what to do: in its details, or by `spec.cni.remedies`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import multus_daemon.daemon
from multus_daemon.spec.cni import remedies
from multus_daemon.spec.cni.errors import CniError

PRODUCT = Path(multus_daemon.__file__).parent
FOREIGN = "\N{HORIZONTAL ELLIPSIS}"
"""Stands for what is put into a message while the program runs."""

NONE_KNOWN = {
    "…: … (network … of pod …)": "a fault of the daemon itself",
    "failed to …: ……": "the kernel's words, which the table and `plugins.advice` know",
    'failed to make veth pair "…" - "…": …': "the same",
    "internal error: …; see the daemon's log": "a fault of the daemon itself",
}
"""Messages without a remedy, and why."""


def classes() -> dict[str, type[CniError]]:
    found: dict[str, type[CniError]] = {}
    left = [CniError]
    while left:
        kind = left.pop()
        found[kind.__name__] = kind
        left += kind.__subclasses__()
    return found


def raised() -> Iterator[tuple[str, type[CniError], str, str]]:
    """Place, class, message and details of each error that the product's sources make."""
    kinds = classes()
    for path in sorted(PRODUCT.rglob("*.py")):
        if "validate" in path.parts:
            # Errors that stand for a plugin that is not asked; nothing of them is shown.
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            # A message that comes from elsewhere as a whole is judged there.
            if name in kinds and text(node.args[0]).strip(FOREIGN + "; "):
                details = node.args[1] if len(node.args) > 1 else None
                details = next((item.value for item in node.keywords if item.arg == "details"), details)
                place = f"{path.relative_to(PRODUCT)}:{node.lineno}"
                yield place, kinds[name], text(node.args[0]), text(details) if details is not None else ""


def text(node: ast.expr) -> str:
    """The text of an expression, with FOREIGN for what is not known before the program runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text, node.values))
    return FOREIGN


ERRORS = list(raised())


@pytest.mark.parametrize(("place", "kind", "message", "details"), ERRORS, ids=[place for place, *_ in ERRORS])
def test_an_error_says_what_to_do(place: str, kind: type[CniError], message: str, details: str) -> None:
    told = details or remedies.remedy(kind(message))
    if message in NONE_KNOWN:
        assert not told, f"{place}: it has a remedy: take it off the list"
    else:
        assert told, f"{place}: {message}"


def test_they_are_all_seen() -> None:
    assert len(ERRORS) > 300


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({}, "multusctl explain"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "kubectl multus why"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "MULTUS_POD_NAMESPACE": "net", "MULTUS_POD_NAME": "multus-x"},
            "kubectl -n net exec multus-x -- multusctl explain",
        ),
    ],
)
def test_the_command_at_the_end_works_for_its_reader(environ: dict[str, str], command: str) -> None:
    assert remedies.explain_command(environ) == command
