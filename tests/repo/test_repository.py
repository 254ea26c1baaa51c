"""Check what a release needs: version, changelog, metadata, entry points, docstrings, documentation of settings."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

import multus_daemon
import multus_shim
import multus_tools
from multus_daemon import settings
from multus_daemon.settings import keys
from multus_shim import build

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHANGELOG = ROOT / "CHANGELOG.md"
PYTHON = "Programming Language :: Python :: "
FOLDERS = (
    ".ci",
    ".github",
    "bench",
    "docs",
    "examples",
    "manifests",
    "multus_daemon",
    "multus_shim",
    "multus_tools",
    "tests",
)


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of each file that people write. By name and not by git, which is a process."""
    for top in [path for path in ROOT.iterdir() if path.is_file()] + [ROOT / folder for folder in FOLDERS]:
        for path in [top] if top.is_file() else top.rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and path.suffix != ".pyc" and not name.startswith("tests/data/"):
                yield name, path.read_text(errors="replace")


# --- the version -----------------------------------------------------------------------------------------------------


def test_the_version_is_written_once() -> None:
    # hatchling and the shim's build read the line of multus_daemon/__init__.py, each with a pattern of its own.
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"] == Path(multus_daemon.__path__[0]) / "__init__.py"
    assert build.version(ROOT) == multus_daemon.__version__
    # docs/releasing.md: what a tag, an image and a wheel can all be called.
    assert re.fullmatch(r"\d+\.\d+\.\d+", multus_daemon.__version__)


def test_every_image_that_is_named_has_the_version() -> None:
    # Files that can't read the version have a copy, which docs/releasing.md changes. The history keeps old versions.
    named = {
        (name, version)
        for name, text in texts()
        if name != CHANGELOG.name
        for version in re.findall(r"multus-daemon:v?(\d[\w.]*\d)", text)
    }
    assert {name.partition("/")[0] for name, _ in named} == {"docs", "manifests"}
    assert {version for _, version in named} == {multus_daemon.__version__}


def test_the_changelog_begins_with_what_is_unreleased_and_then_has_this_version() -> None:
    headings = re.findall(r"(?m)^## (.+)$", CHANGELOG.read_text())
    assert headings[:2] == ["Unreleased", multus_daemon.__version__]
    assert len(headings) == len(set(headings))


# --- the metadata ----------------------------------------------------------------------------------------------------

CLASSIFIERS = PYPROJECT["project"]["classifiers"]


def test_the_versions_of_python_agree() -> None:
    named = [name.removeprefix(PYTHON) for name in CLASSIFIERS if name.startswith(PYTHON + "3.")]
    assert named == [f"3.{minor}" for minor in range(11, 11 + len(named))]
    oldest = named[0]
    assert PYPROJECT["project"]["requires-python"] == f">={oldest}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")


def test_what_is_called_typed_has_its_marker() -> None:
    assert "Typing :: Typed" in CLASSIFIERS
    assert not [str(package) for package in PACKAGES if not (package / "py.typed").is_file()]


def test_the_address_of_the_repository_is_in_one_place() -> None:
    urls = PYPROJECT["project"]["urls"]
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}
    source = urls["Source"]
    assert all(url.startswith(source) for url in urls.values())
    # In another file a move would be forgotten; `make manifests` writes it into the links of the alerts.
    expected = ["manifests/monitoring/prometheusrule.yaml", "pyproject.toml"]
    assert sorted(name for name, text in texts() if source.partition("://")[2] in text) == expected


def test_what_an_address_leads_to_is_there() -> None:
    for name in ("Documentation", "Changelog"):
        url, source = PYPROJECT["project"]["urls"][name], PYPROJECT["project"]["urls"]["Source"]
        place, branch, path = url.removeprefix(source + "/").split("/", 2)
        assert (place, branch) in {("tree", "main"), ("blob", "main")}
        assert (ROOT / path).exists()


# --- commands and modules --------------------------------------------------------------------------------------------


def test_every_command_has_its_function() -> None:
    for command, target in PYPROJECT["project"]["scripts"].items():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), command


PACKAGES = [Path(package.__path__[0]) for package in (multus_daemon, multus_shim, multus_tools)]


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


def documented() -> set[str]:
    """The keys in back-quotes with which rows of tables begin; `test_settings_page` has the rest of the rows."""
    return set(re.findall(r"(?m)^\| `([^`]+)` \|", DOCUMENT.read_text()))


def test_every_setting_is_documented() -> None:
    assert settings.known_keys() | settings.WITHOUT_EFFECT.keys() <= documented()


def test_no_setting_is_documented_that_does_not_exist() -> None:
    inner = {f"logOptions.{item.encode_name}" for item in msgspec.structs.fields(keys.LogOptions)}
    inner |= {f"perNodeCertificate.{item.encode_name}" for item in msgspec.structs.fields(keys.PerNodeCertificate)}
    inner |= {f"metricsTLS.{item.encode_name}" for item in msgspec.structs.fields(keys.MetricsTls)}
    values = {f"{key}: {value}" for key, value in settings.REMOVED_VALUES}
    known = settings.known_keys() | settings.WITHOUT_EFFECT.keys() | inner | values
    assert documented() <= known
