"""Every error that the product raises says whose input it is about."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import multus_daemon.daemon
from multus_daemon.spec.cni.errors import CniError, Origin, explain_command

ROOT = Path(multus_daemon.__file__).parent.parent
PRODUCT = ("multus_daemon", "multus_tools")


def classes() -> dict[str, type[CniError]]:
    found: dict[str, type[CniError]] = {}
    left = [CniError]
    while left:
        kind = left.pop()
        found[kind.__name__] = kind
        left += kind.__subclasses__()
    return found


def raised() -> Iterator[tuple[str, str]]:
    """Place and origin of each error that the product's sources make; the origin is empty if there is none."""
    kinds = classes()
    for path in sorted(file for package in PRODUCT for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name not in kinds and name != "from_code":
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            origin = next((ast.unparse(item.value) for item in node.keywords if item.arg == "origin"), "")
            default = kinds[name].default_origin if name in kinds else None
            yield place, origin or (default.name if default else "")


def test_every_error_names_whose_input_it_is_about() -> None:
    errors = list(raised())
    assert len(errors) > 250
    assert [place for place, origin in errors if not origin] == []


def test_every_origin_says_what_to_do() -> None:
    for origin in Origin:
        error = CniError("cause", origin=origin)
        assert error.advice
        assert "{}" not in error.advice


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
    assert explain_command(environ) == command
