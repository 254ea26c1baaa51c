"""Wheels, base images and actions are pinned by a hash of their content."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from image import lock

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LOCKED = sorted(lock.files(), key=str)


# --- actions ---------------------------------------------------------------------------------------------------------


def by_name(uses: str) -> bool:
    """Report whether a `uses:` of a workflow names a commit, with the version in a comment."""
    return re.fullmatch(r"(actions|sigstore)/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", uses) is not None


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_their_commit(path: Path) -> None:
    used = re.findall(r"^\s*(?:- )?uses: *(.*)$", path.read_text(), re.MULTILINE)
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    assert len(used) == len([step for step in steps if "uses" in step])
    assert [uses for uses in used if not by_name(uses)] == []


def test_one_version_of_an_action_is_one_commit() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    pairs = set(re.findall(r"uses: (\S+)@([0-9a-f]{40} # v\S+)", text))
    assert len(pairs) == len({name for name, _ in pairs})


# --- base images -----------------------------------------------------------------------------------------------------


def unnamed_bases(dockerfile: str) -> list[str]:
    """Return the images of FROM lines that have no digest and are not earlier stages."""
    defaults = dict(re.findall(r"^ARG (\w+)=(\S*)$", dockerfile, re.MULTILINE))
    stages: set[str] = {"scratch"}
    found = []
    for image, stage in re.findall(r"^FROM(?: --\S+)* (\S+)(?: AS (\S+))?$", dockerfile, re.MULTILINE):
        name = image
        while variable := re.fullmatch(r"\$\{(\w+)\}", name):
            name = defaults[variable[1]]
        if name not in stages and not re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", name):
            found.append(name)
        stages.add(stage)
    return found


def test_base_images_are_named_by_their_digest() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) > 1
    assert unnamed_bases(text) == []


# --- wheels ----------------------------------------------------------------------------------------------------------


def entries(text: str) -> dict[str, str]:
    """Return the pinned versions of a file with hashes. Raises AssertionError for anything else in it."""
    versions = {}
    for line in text.replace("\\\n", "").splitlines():
        if line and not line.startswith("#"):
            pinned = re.fullmatch(r"([a-z0-9-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)", line)
            assert pinned, f"{line[:60]}: no version, or no hash: `make lock`"
            versions[pinned[1]] = pinned[2]
    return versions


def pinned_versions() -> dict[str, str]:
    lines = [line for line in lock.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.name)
def test_every_dependency_has_a_hash_and_the_version_of_the_constraints(path: Path) -> None:
    found = entries(path.read_text())
    assert found.items() <= pinned_versions().items(), "make lock"
    assert "://" not in path.read_text()


def needed(wanted: list[str]) -> set[str]:
    """The names of what `wanted` needs on this Python, by the metadata of what is installed."""
    names: set[str] = set()
    waiting = [Requirement(item) for item in wanted]
    while waiting:
        requirement = waiting.pop()
        if (requirement.marker and not requirement.marker.evaluate({"extra": ""})) or requirement.name in names:
            continue
        names.add(requirement.name)
        waiting += [Requirement(item) for item in importlib.metadata.requires(requirement.name) or ()]
    return {canonicalize_name(name) for name in names}


def test_nothing_that_the_image_needs_is_forgotten() -> None:
    path = ROOT / "image" / "requirements.txt"
    found, there = needed(lock.files()[path]), set(entries(path.read_text()))
    assert found <= there, "make lock"
    if sys.version_info < (3, 12):
        # A later Python needs less.
        assert found == there, "make lock"


def test_the_build_requirements_have_hashes() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    there = entries((ROOT / "image" / "build-requirements.txt").read_text())
    assert {f"{name}=={there[name]}" for name in ("hatchling", "ziglang")} == set(build)
