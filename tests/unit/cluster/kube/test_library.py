"""Packages that are executed only when somebody needs what is in them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from multus_daemon.cluster.kube import library

NAME = "large_package"


@pytest.fixture
def deferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that imports its submodules, is deferred, and knows the name `given`."""
    directory = tmp_path / NAME
    directory.mkdir()
    (directory / "__init__.py").write_text(
        f"import {NAME}\nfrom {NAME} import model, given as was_given\nvalue = {NAME}.model.VALUE\n"
    )
    (directory / "model.py").write_text("VALUE = 42\n")
    (directory / "small.py").write_text("SIZE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield library.defer(NAME, {"given": "given"})
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def is_loaded() -> bool:
    return f"{NAME}.model" in sys.modules


def test_a_submodule_is_imported_without_the_package(deferred: ModuleType) -> None:
    assert importlib.import_module(f"{NAME}.small").SIZE == 1
    assert sys.modules[NAME] is deferred
    assert deferred.small.SIZE == 1
    assert deferred.given == "given"
    assert not is_loaded()


def test_another_name_executes_the_package_and_says_so(deferred: ModuleType) -> None:
    with pytest.warns(ImportWarning, match="large_package is loaded whole, for its value") as warned:
        assert deferred.value == 42
    assert warned[0].filename == __file__
    assert is_loaded()
    assert deferred.was_given == "given"
    with pytest.raises(AttributeError):
        _ = deferred.absent


def test_a_name_that_is_nowhere(deferred: ModuleType) -> None:
    with (
        pytest.warns(ImportWarning, match="for its absent"),
        pytest.raises(AttributeError, match=r"^module 'large_package' has no attribute 'absent'$"),
    ):
        _ = deferred.absent


def test_looking_through_all_modules_executes_nothing(deferred: ModuleType) -> None:
    assert not hasattr(deferred, "__wrapped__")
    assert not is_loaded()


def test_a_module_that_is_loaded_stays_as_it_is() -> None:
    assert library.defer("json") is sys.modules["json"]


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere_at_all'"):
        library.defer("nowhere_at_all")
