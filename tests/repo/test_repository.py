"""What a release must not forget: version and changelog, entry points, docstrings, documentation of the settings."""

import ast
import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

import multus_daemon
import multus_shim
from multus_daemon import settings

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Where packages come from is the affair of whoever installs: an address in the repository would overrule it, or tell of
# a place that nobody else can reach. Each pattern is written so that it does not match its own line.
ADDRESSES = {
    "a package index on a command line or in a requirements file": r"-{2}(extra-)?index[-]url\b|-{2}trusted[-]host\b",
    "a package index in a pip or uv configuration": (
        r"(?m)^\s*(extra[-_])?index[-_]url\s*=|(PIP|UV)(_EXTRA)?(_DEFAULT)?_INDEX(_URL)?\s*="
    ),
    "a download address in a lock file": (
        r"\bresolv(?:ed)[\"']?\s*[:=]?\s*[\"']https?:/|\{\s*ur(?:l)\s*=\s*[\"']https?:/"
    ),
    "a proxy for Go modules": r"\bGO(?:PROXY|SUMDB)\s*[:=]",
    "a host of a package registry": (
        r"\b(?:pypi[.]org|files[.]pythonhosted[.]org|registry[.]npmjs[.]org|registry[.]yarnpkg[.]com"
        r"|index[.]crates[.]io|static[.]crates[.]io|proxy[.]golang[.]org|sum[.]golang[.]org|rubygems[.]org)"
    ),
}


def tracked_files() -> list[Path]:
    try:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a git work tree, to know which files are the project's: {error}")
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_version_has_a_heading_in_the_changelog() -> None:
    headings = re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert multus_daemon.__version__ in headings
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize(("what", "pattern"), ADDRESSES.items())
def test_no_file_says_where_packages_come_from(what: str, pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for path in tracked_files()
        for text in [path.read_text(errors="replace")]
        for match in re.finditer(pattern, text)
    ]
    assert not found, what


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "a package index on a command line or in a requirements file",
            "pip install -{}index-url http://x".format("-"),
        ),
        ("a package index on a command line or in a requirements file", "-{}extra-index-url=http://x".format("-")),
        ("a package index in a pip or uv configuration", "index-url {} http://x".format("=")),
        ("a package index in a pip or uv configuration", "PIP_INDEX_URL{}http://x".format("=")),
        ("a package index in a pip or uv configuration", "UV_DEFAULT_INDEX{}http://x".format("=")),
        ("a download address in a lock file", '"resol{}": "https://x/y.tgz"'.format("ved")),
        ("a download address in a lock file", 'resol{} "https://x/y.tgz"'.format("ved")),
        ("a download address in a lock file", '{{ {} = "https://x/y.whl" }}'.format("url")),
        ("a proxy for Go modules", "export GO{}=http://x".format("PROXY")),
        ("a host of a package registry", "https://files.{}.org/packages".format("pythonhosted")),
        ("a host of a package registry", "https://{}.org/simple".format("pypi")),
    ],
)
def test_the_patterns_find_what_they_are_for(what: str, text: str) -> None:
    assert re.search(ADDRESSES[what], text)


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
