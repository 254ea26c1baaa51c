"""The workflows of `.github`, read by actionlint: syntax, expressions, inputs of the actions, labels of the runners."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e import build_tools

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def actionlint(*files: Path) -> subprocess.CompletedProcess[str]:
    """Run actionlint without shellcheck and pyflakes, which it would call if they are installed."""
    try:
        program = build_tools.find("actionlint")
    except build_tools.ToolError as error:
        pytest.skip(str(error))
    return subprocess.run(
        [program, "-no-color", "-shellcheck=", "-pyflakes=", *files], capture_output=True, text=True, timeout=50
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actionlint_has_nothing_to_say(path: Path) -> None:
    done = actionlint(path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
