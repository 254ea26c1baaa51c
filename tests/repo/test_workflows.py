"""Check `.github`: the workflows run public commands with only the rights that they need; forms have the fields."""

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
