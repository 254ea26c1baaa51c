"""The krew manifest of `kubectl multus` has the right fields, and names the archive by its digest."""

from __future__ import annotations

import hashlib
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from krew import package
from multus_daemon import __version__

ROOT = Path(__file__).resolve().parents[2]
WHEEL = f"multus_daemon-{__version__}-py3-none-any.whl"


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A folder with what a release has for krew, of a wheel without content."""
    (tmp_path / WHEEL).write_bytes(b"wheel")
    folder = tmp_path / "release"
    folder.mkdir()
    package.package(tmp_path / WHEEL, folder)
    return folder


def manifest(folder: Path) -> dict[str, Any]:
    found = yaml.safe_load((folder / "multus.yaml").read_text())
    assert isinstance(found, dict)
    return found


def test_the_manifest_has_the_fields_that_krew_asks_for(released: Path) -> None:
    # https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest
    found = manifest(released)
    assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
    assert (found["apiVersion"], found["kind"]) == ("krew.googlecontainertools.github.com/v1alpha2", "Plugin")
    # The file's name, and the word after `kubectl`.
    assert found["metadata"] == {"name": "multus"}
    spec = found["spec"]
    assert set(spec) == {"version", "homepage", "shortDescription", "description", "caveats", "platforms"}
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert spec["version"] == f"v{__version__}"
    assert spec["homepage"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    assert 0 < len(spec["shortDescription"]) <= 50
    assert not spec["shortDescription"].endswith(".")
    assert all(len(line) <= 80 for key in ("description", "caveats") for line in spec[key].splitlines())
    (platform,) = spec["platforms"]
    assert set(platform) == {"selector", "uri", "sha256", "bin"}
    chosen = {item["key"]: (item["operator"], item["values"]) for item in platform["selector"]["matchExpressions"]}
    assert chosen == {"os": ("In", ["linux", "darwin"]), "arch": ("In", ["amd64", "arm64"])}


def test_the_archive_is_the_one_of_the_manifest(released: Path) -> None:
    spec = manifest(released)["spec"]
    (platform,) = spec["platforms"]
    archive = released / Path(platform["uri"]).name
    assert platform["uri"] == f"{spec['homepage']}/releases/download/v{__version__}/{archive.name}"
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    with tarfile.open(archive) as tar:
        modes = {item.name: item.mode for item in tar}
    assert set(modes) == {platform["bin"], "LICENSE", "constraints.txt", WHEEL}
    assert {name for name, mode in modes.items() if mode & 0o111} == {platform["bin"]}


def test_the_same_wheel_gives_the_same_archive(tmp_path: Path, released: Path) -> None:
    before = (released / "multus.yaml").read_text()
    package.package(tmp_path / WHEEL, released)
    assert (released / "multus.yaml").read_text() == before
