"""Every built-in is a module as `contract.Module` has it, and has a row in `docs/builtin-plugins.md`."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from multus_daemon.kernel.pod_netns import PodNetns
from multus_daemon.plugins.builtin.contract import Call, Module
from multus_daemon.plugins.builtin.registry import PLUGINS
from multus_daemon.spec.cni.result import Result

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "builtin-plugins.md").read_text()
# The type, and the cell that says with what it is compared.
ROWS = re.findall(r"(?m)^\| `([a-z-]+)` \| (?:plugins|flannel|upstream)[^|]*\| ([^|]+) \|", PAGE)
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
# It does nothing, so there is nothing to compare.
WITHOUT_REFERENCE = {"passthru"}


def test_every_built_in_has_its_row() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(PLUGINS)


def test_every_row_names_the_test_that_compares() -> None:
    compared = {name for name, cell in ROWS if any(test for _, test in REFERENCE.findall(cell))}
    assert compared == set(PLUGINS) - WITHOUT_REFERENCE


# --- the modules -----------------------------------------------------------------------------------------------------

PROMISED = {
    name: inspect.signature(function, eval_str=True)
    for name, function in inspect.getmembers(Module, inspect.isfunction)
    if not name.startswith("_")
}


def promised(name: str) -> inspect.Signature:
    """A function of the contract as a module has it."""
    parameters = list(PROMISED[name].parameters.values())
    return PROMISED[name].replace(parameters=parameters[1:])


def problems(module: object) -> Iterator[str]:
    """Yield why a module is not a `contract.Module`: mypy can't see it, as the runner imports modules by name."""
    for name in PROMISED:
        function = getattr(module, name, None)
        if not inspect.isfunction(function):
            yield f"{name} is no function"
        elif inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            yield f"{name} does not run when it is called"
        elif inspect.signature(function, eval_str=True) != promised(name):
            yield f"{name}{inspect.signature(function)}"


def test_the_contract_is_what_the_runner_calls() -> None:
    assert set(PROMISED) == {"unsupported", "validate", "add", "delete", "check", "status"}
    assert str(promised("unsupported")).startswith("(call: ")
    assert list(promised("add").parameters) == ["call", "netns"]


@pytest.mark.parametrize("plugin_type", sorted(PLUGINS))
def test_every_built_in_is_a_module_as_the_contract_has_it(plugin_type: str) -> None:
    assert list(problems(importlib.import_module(PLUGINS[plugin_type]))) == []


def plugin(**changes: object) -> object:
    def unsupported(call: Call) -> str:
        return ""

    def add(call: Call, netns: PodNetns) -> Result:
        return Result()

    def delete(call: Call, netns: PodNetns) -> None: ...

    def status(call: Call) -> None: ...

    functions = {
        "unsupported": unsupported,
        "validate": status,
        "add": add,
        "delete": delete,
        "check": delete,
        "status": status,
    }
    return SimpleNamespace(**(functions | changes))


def without_a_namespace(call: Call) -> None: ...


def in_another_order(netns: PodNetns, call: Call) -> None: ...


def with_one_more(call: Call, netns: PodNetns, verb: str) -> None: ...


def of_bytes(call: Call, netns: PodNetns) -> bytes:
    return b""


async def for_a_loop(call: Call, netns: PodNetns) -> None: ...


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"add": None}, ["add"]),
        ({"delete": without_a_namespace}, ["delete"]),
        ({"check": in_another_order}, ["check"]),
        ({"delete": with_one_more, "check": for_a_loop}, ["check", "delete"]),
        ({"add": of_bytes}, ["add"]),
        ({"status": plugin}, ["status"]),
    ],
)
def test_what_is_not_as_the_contract_has_it_is_found(changes: dict[str, object], found: list[str]) -> None:
    assert [re.split(r"\W", problem)[0] for problem in problems(plugin(**changes))] == found
