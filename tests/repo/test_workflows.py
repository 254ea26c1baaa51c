"""Check `.github`: the workflow runs only public commands, and the forms ask for what finding a fault needs."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
PYTHON = "Programming Language :: Python :: "


def document(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


# tests/e2e/test_workflows.py has actionlint read it.
CI = document(ROOT / ".github" / "workflows" / "ci.yml")
STEPS = [step for job in CI["jobs"].values() for step in job["steps"]]


def test_ci_runs_what_lands_a_change() -> None:
    commands = [step["run"].split() for step in CI["jobs"]["everything"]["steps"] if "run" in step]
    assert [command[-1] for command in commands] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_it_runs_with_every_python_that_is_named() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [name.removeprefix(PYTHON) for name in classifiers if name.startswith(PYTHON + "3.")]
    assert CI["jobs"]["quick"]["strategy"]["matrix"]["python"] == named


def test_it_may_read_and_nothing_else() -> None:
    assert CI["permissions"] == {"contents": "read"}
    assert not [name for name, job in CI["jobs"].items() if "permissions" in job]
    checkouts = [step for step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) == len(CI["jobs"])
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_every_job_ends() -> None:
    assert all(0 < job["timeout-minutes"] <= 180 for job in CI["jobs"].values())


# --- the wide tier ---------------------------------------------------------------------------------------------------

WIDE = document(ROOT / ".github" / "workflows" / "wide.yml")


def test_the_wide_tier_is_scheduled_and_has_every_program_that_it_asks_for() -> None:
    (trigger,) = [value for key, value in WIDE.items() if key in ("on", True)]
    assert trigger["schedule"]
    assert WIDE["permissions"] == {"contents": "read"}
    (job,) = WIDE["jobs"].values()
    built, run = [step["run"] for step in job["steps"] if "run" in step]
    assert run.split()[-2:] == [".ci/run", "wide"]
    asked = set(re.findall(r"WIDE_[A-Z_]+", (ROOT / "tests" / "programs.py").read_text()))
    assert set(re.findall(r"build (WIDE_\w+)", built)) == set(re.findall(r"WIDE_[A-Z_]+", run)) == asked
    (checkout,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout["with"]["persist-credentials"] is False


# --- the release -----------------------------------------------------------------------------------------------------

RELEASE = document(ROOT / ".github" / "workflows" / "release.yml")
JOBS = RELEASE["jobs"]


def commands(job: str) -> str:
    return "\n".join(step["run"] for step in JOBS[job]["steps"] if "run" in step)


def needed(job: str) -> set[str]:
    """Every job that has to end well before this one begins."""
    direct = JOBS[job].get("needs", [])
    names = {direct} if isinstance(direct, str) else set(direct)
    return names.union(*(needed(name) for name in names))


def test_only_a_tag_releases() -> None:
    # YAML 1.1 reads the key `on` as true.
    (trigger,) = [value for key, value in RELEASE.items() if key in ("on", True)]
    assert trigger == {"push": {"tags": ["v*"]}}
    assert 'test "$GITHUB_REF_NAME" = "v$(python3 -c' in commands("tests")
    assert ".ci/run" in commands("tests")


def test_nothing_is_published_before_the_tests_have_passed() -> None:
    for job in JOBS:
        if job != "tests":
            assert "tests" in needed(job), job
    assert needed("publish") == {"tests", "image", "wheels"}


def test_a_job_of_the_release_may_write_what_it_publishes_and_nothing_else() -> None:
    assert RELEASE["permissions"] == {"contents": "read"}
    assert {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job} == {
        "image": {"contents": "read", "packages": "write", "id-token": "write", "attestations": "write"},
        "publish": {"contents": "write", "packages": "write", "id-token": "write", "attestations": "write"},
    }
    steps = [step for job in JOBS.values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) == len(JOBS)
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    assert all(0 < job["timeout-minutes"] <= 180 for job in JOBS.values())


def test_image_chart_wheels_and_manifests_are_published_by_the_digest() -> None:
    assert "make image PUSH=1" in commands("image")
    assert set(JOBS["image"]["outputs"]) == {"name", "digest"}
    publish = commands("publish")
    for command in ('make manifests IMAGE="$IMAGE"', "helm package", "helm push", "gh release create"):
        assert command in publish
    assert publish.index("make manifests") < publish.index("helm package")
    (step,) = [step for step in JOBS["publish"]["steps"] if "make manifests" in step.get("run", "")]
    assert step["env"]["IMAGE"] == "${{ needs.image.outputs.name }}@${{ needs.image.outputs.digest }}"
    assert "pip wheel" in commands("wheels")


def steps_with(job: str, text: str) -> list[int]:
    """Return the places of the steps of `job` whose command or action has `text`."""
    return [place for place, step in enumerate(JOBS[job]["steps"]) if text in step.get("run", step.get("uses", ""))]


def test_what_is_published_is_signed_without_a_key() -> None:
    # The image by its digest, after the push.
    (push,), (sign,) = steps_with("image", "make image PUSH=1"), steps_with("image", 'cosign sign --yes --recursive "$')
    assert push < sign
    image = "${{ steps.push.outputs.name }}@${{ steps.push.outputs.digest }}"
    assert JOBS["image"]["steps"][sign]["env"]["IMAGE"] == image
    # The chart by the digest that the push names, and every file of the release by its checksum.
    (chart,) = steps_with("publish", "helm push")
    assert "cosign sign --yes" in JOBS["publish"]["steps"][chart]["run"]
    (files,), (release,) = steps_with("publish", "cosign sign-blob"), steps_with("publish", "gh release create")
    (download,), (krew,) = steps_with("publish", "download-artifact@"), steps_with("publish", "krew/package.py")
    assert chart < download < krew < files < release
    for job, first in (("image", sign), ("publish", chart)):
        assert steps_with(job, "sigstore/cosign-installer@")[0] < first
    assert "--key" not in "".join(commands(job) for job in JOBS)


def test_what_is_published_has_its_provenance() -> None:
    (place,) = steps_with("image", "actions/attest-build-provenance@")
    given = JOBS["image"]["steps"][place]["with"]
    assert given["subject-digest"] == "${{ steps.push.outputs.digest }}"
    assert given["push-to-registry"] is True
    (place,) = steps_with("publish", "actions/attest-build-provenance@")
    assert JOBS["publish"]["steps"][place]["with"] == {"subject-checksums": "release/SHA256SUMS"}


def test_wheels_are_built_with_the_hashes_of_the_image() -> None:
    text = commands("wheels")
    assert "--require-hashes --only-binary=:all: --requirement image/build-requirements.txt" in text
    assert "pip wheel --no-build-isolation --no-index --no-deps" in text
    assert "for architecture in x86_64 aarch64 none;" in text


def test_what_the_workflows_make_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = re.findall(r"make ((?:[a-z]+ ?)+)", "\n".join(commands(job) for job in JOBS))
    assert called
    assert {word for words in called for word in words.split()} <= targets


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FORMS.glob("*.yml")), ids=lambda path: path.name)
def test_a_form_is_one_that_the_forge_shows(path: Path) -> None:
    # https://docs.github.com/en/communities/using-templates-to-encourage-useful-issues-and-pull-requests/syntax-for-issue-forms
    found = document(path)
    if path.name == "config.yml":
        assert set(found) == {"blank_issues_enabled"}
        return
    assert {"name", "description", "body"} <= set(found) <= {"name", "description", "title", "labels", "body"}
    inputs = [item for item in found["body"] if item["type"] != "markdown"]
    assert inputs
    assert {item["type"] for item in inputs} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert all(item["attributes"]["label"] for item in inputs)
    for key in ("id", "label"):
        named = [item["attributes"]["label"] if key == "label" else item["id"] for item in inputs]
        assert len(named) == len(set(named))
    assert all(re.fullmatch(r"[a-z][a-z-]*", item["id"]) for item in inputs)


def test_the_bug_form_asks_for_what_a_fault_is_found_with() -> None:
    asked = {item["id"] for item in document(FORMS / "bug.yml")["body"] if "id" in item}
    assert {"versions", "annotation", "definition", "daemon-log", "multusctl"} <= asked
