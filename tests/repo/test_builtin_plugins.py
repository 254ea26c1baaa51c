"""A plugin is a `Builtin` or a `Binary`; every built-in has its functions, and a row in `docs/builtin-plugins.md`."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from multus_daemon.plugins import compare, run
from multus_daemon.plugins.binary import Binary
from multus_daemon.plugins.builtin.contract import Module
from multus_daemon.plugins.builtin.registry import MODELS, PLUGINS, Builtin
from multus_daemon.plugins.plugin import REFERENCE as REFERENCE_TYPES
from multus_daemon.plugins.plugin import Plugin
from tests.e2e import build_tools

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "builtin-plugins.md").read_text()
# The type, and the cell that says with what it is compared.
ROWS = re.findall(r"(?m)^\| `([a-z-]+)` \| (?:plugins|flannel|whereabouts|upstream)[^|]*\| ([^|]+) \|", PAGE)
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
# It does nothing, so there is nothing to compare.
WITHOUT_REFERENCE = {"passthru"}


def test_every_built_in_has_its_row() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(PLUGINS)


def test_every_row_has_the_release_that_the_code_follows() -> None:
    models = dict(re.findall(r"(?m)^\| `([a-z-]+)` \| (?:plugins|whereabouts|flannel's cni-plugin) (v[^ ]+) \|", PAGE))
    assert models == {name: version.partition("-")[0] for name, (_, version) in MODELS.items()}


def test_the_tests_compare_with_that_release() -> None:
    assert build_tools.pinned("github.com/containernetworking/plugins", build_tools.PLUGINS) == MODELS["ptp"][1]


def test_every_row_names_the_test_that_compares() -> None:
    compared = {name for name, cell in ROWS if any(test for _, test in REFERENCE.findall(cell))}
    assert compared == set(PLUGINS) - WITHOUT_REFERENCE


# --- what runs a plugin ---------------------------------------------------------------------------------------------


def test_there_are_two_kinds_of_plugins() -> None:
    own = {kind for kind in Plugin.__subclasses__() if kind.__module__.startswith("multus_daemon.")}
    assert own == {Builtin, Binary}
    assert not Builtin.__subclasses__()


@pytest.mark.parametrize("module", [run, compare])
def test_the_list_runner_knows_no_plugin_by_name(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not texts & (PLUGINS.keys() | REFERENCE_TYPES | {"dhcp", "whereabouts"})


# --- the modules -----------------------------------------------------------------------------------------------------

REQUIRED = dict.fromkeys(("add", "delete"), "call netns")
OPTIONAL = {
    **dict.fromkeys(("unsupported", "read", "status", "called_by", "keeps"), "call"),
    **dict.fromkeys(("check", "differences"), "call netns"),
    "sets": "fields",
}


def test_the_contract_names_every_function() -> None:
    own = {name for name, _ in inspect.getmembers(Module, inspect.isfunction) if not name.startswith("_")}
    assert own == REQUIRED.keys()
    assert all(f"`{name}(" in (Module.__doc__ or "") for name in OPTIONAL)


@pytest.mark.parametrize("plugin_type", sorted(PLUGINS))
def test_every_built_in_is_a_module_as_the_contract_has_it(plugin_type: str) -> None:
    """The daemon imports it by its name, so mypy sees only the modules that tests name."""
    module = importlib.import_module(PLUGINS[plugin_type])
    for name, parameters in (REQUIRED | OPTIONAL).items():
        if name in REQUIRED or hasattr(module, name):
            function = getattr(module, name)
            assert " ".join(inspect.signature(function).parameters) == parameters, name
            assert not inspect.iscoroutinefunction(function)
