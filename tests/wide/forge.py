"""Runs a workflow of `.github` on this machine, step by step, with stand-ins for what only the forge has."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from tests.programs import needed

ROOT: Final = Path(__file__).resolve().parents[2]
Action = Callable[[Path, Mapping[str, str]], None]
"""Gets the job's directory and the step's inputs."""


def sources(target: Path) -> None:
    """Copy what git knows of the source tree, as it is now: what actions/checkout gives a job."""
    listed = subprocess.run(
        [needed("git"), "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@dataclass
class Forge:
    """One run of a workflow. `actions` are what steps with `uses:` do, by the action's name."""

    directory: Path
    workflow: dict[str, Any]
    environment: dict[str, str]
    """For every step. The workflow's own variables come after it, `given` comes last."""
    given: dict[str, str]
    values: dict[str, str]
    """Of expressions, by their names, such as `github.actor`."""
    actions: dict[str, Action]
    log: list[str] = field(default_factory=list)
    """Names of the steps that were run."""

    def run(self, job: str) -> Path:
        """Run a job, and return its directory. Raises AssertionError if a step fails."""
        described = self.workflow["jobs"][job]
        place = self.directory / job
        place.mkdir()
        outputs = self.directory / f"{job}.outputs"
        for step in described["steps"]:
            name = step.get("name") or step.get("uses") or step["run"]
            if "uses" in step:
                inputs = {key: self._evaluated(str(value)) for key, value in step.get("with", {}).items()}
                self.actions[step["uses"].partition("@")[0]](place, inputs)
            else:
                outputs.write_text("")
                self._execute(place, name, step, outputs)
                for key, _, value in (line.partition("=") for line in outputs.read_text().splitlines()):
                    self.values[f"steps.{step['id']}.outputs.{key}"] = value
            self.log.append(name)
        for key, text in described.get("outputs", {}).items():
            self.values[f"needs.{job}.outputs.{key}"] = self._evaluated(text)
        return place

    def _execute(self, place: Path, name: str, step: Mapping[str, Any], outputs: Path) -> None:
        own = {
            key: self._evaluated(str(value))
            for key, value in (self.workflow.get("env", {}) | step.get("env", {})).items()
        }
        log = self.directory / f"{place.name}.log"
        with log.open("ab") as output:
            child = subprocess.Popen(
                [needed("bash"), "-e", "-c", step["run"]],
                cwd=place,
                env=self.environment | own | self.given | {"GITHUB_OUTPUT": str(outputs)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = child.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        assert status == 0, f"{name}:\n{log.read_text(errors='replace')[-6000:]}"

    def _evaluated(self, text: str) -> str:
        """Replace the expressions; one that has no value here is a KeyError."""
        return re.sub(r"\$\{\{ *(\S+) *\}\}", lambda found: self.values[found[1]], text)


def workflow(name: str) -> dict[str, Any]:
    """Return a workflow of the source tree."""
    read = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    assert isinstance(read, dict)
    return read
