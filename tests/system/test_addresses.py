"""No tracked file says where packages come from."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.programs import needed

ROOT = Path(__file__).resolve().parents[2]

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
        names = subprocess.run(
            [needed("git"), "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs a git work tree, to know which files are the project's: {error}")
    return [path for name in names.split("\0") if name and (path := ROOT / name).is_file()]


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
        ("a host of a package registry", "files.{}.org/packages".format("pythonhosted")),
        ("a host of a package registry", "{}.org/simple".format("pypi")),
    ],
)
def test_the_patterns_find_what_they_are_for(what: str, text: str) -> None:
    assert re.search(ADDRESSES[what], text)
