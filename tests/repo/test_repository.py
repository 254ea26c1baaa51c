"""What a release must not forget: version and changelog, entry points, docstrings, documentation of the settings."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

import multus_daemon
import multus_shim
from multus_daemon import settings

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_a_heading_in_the_changelog() -> None:
    headings = re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert multus_daemon.__version__ in headings
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize(("command", "target"), PYPROJECT["project"]["scripts"].items())
def test_every_command_has_its_function(command: str, target: str) -> None:
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name)), command


PACKAGES = [Path(package.__path__[0]) for package in (multus_daemon, multus_shim)]


def test_every_module_says_what_it_is_for() -> None:
    # Read, not imported: that some module can't be imported is for its own tests to find.
    silent = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        if not (ast.get_docstring(ast.parse(path.read_text())) or "").strip()
    ]
    assert not silent


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for package in PACKAGES for path in package.rglob("*.py")}
    assert not [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]


# --- documentation of the settings -----------------------------------------------------------------------------------

DOCUMENT = ROOT / "docs" / "configuration.md"


def rows() -> dict[str, list[str]]:
    """The cells of each table row that begins with a key in back-quotes."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize("key", sorted(settings.known_keys() | settings.WITHOUT_EFFECT.keys()))
def test_every_setting_is_documented(key: str) -> None:
    assert key in rows()


def test_no_setting_is_documented_that_does_not_exist() -> None:
    inner = {f"logOptions.{key}" for key in settings.LOG_OPTIONS}
    inner |= {f"perNodeCertificate.{item.encode_name}" for item in msgspec.structs.fields(settings.PerNodeCertificate)}
    known = settings.known_keys() | settings.WITHOUT_EFFECT.keys() | inner
    assert not rows().keys() - known


@pytest.mark.parametrize(("key", "value"), settings.Settings().effective().items())
def test_the_documented_default_is_the_one_in_force(key: str, value: object) -> None:
    default = rows()[key][1].strip("`")
    if value is None or value in ("", (), {}):
        assert default in ("none", "empty")
    elif isinstance(value, bool):
        assert default == str(value).lower()
    elif isinstance(value, tuple):
        assert default == "[" + ", ".join(f'"{item}"' for item in value) + "]"
    elif isinstance(value, float):
        assert float(default) == value
    else:
        assert default == str(value)


@pytest.mark.parametrize(("key", "reason"), settings.WITHOUT_EFFECT.items())
def test_a_key_without_effect_is_documented_with_its_reason(key: str, reason: str) -> None:
    assert rows()[key][-1] == reason
