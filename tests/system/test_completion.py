"""The shells' completion of multusctl and `kubectl multus`, as the shells and kubectl run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multus_tools import ctl
from tests.programs import needed

PROGRAMS = Path(sys.executable).parent


@pytest.fixture
def script(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    ctl.main(["completion", request.param])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("multusctl stat", {"status"}),
        ("multusctl sandbox u", {"up"}),
        ("multusctl attachments for", {"forget"}),
        ("multusctl attachments --l", {"--leaks"}),
        ("multusctl attachments -o ", {"json", "yaml", "wide", "name"}),
        ("multusctl explain -o ", {"json", "yaml"}),
        ("multusctl attachments --no", {"--no-headers"}),
        ("multusctl plugins --w", {"--watch"}),
        ("multusctl trace --all", {"--all-namespaces"}),
        ("multusctl trace --na", {"--namespace"}),
        ("multusctl --v", {"--version"}),
        ("multusctl attachments default/a --ch", {"--check"}),
        ("multusctl completion ", {"bash", "zsh", "fish", "-h", "--help"}),
    ],
)
@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash(script: str, line: str, expected: set[str]) -> None:
    shell = f"{script}\nCOMP_LINE='{line}' COMP_POINT={len(line)} COMP_TYPE=9 _python_argcomplete multusctl\n"
    shell += 'printf "%s\\n" "${COMPREPLY[@]}"'
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    done = subprocess.run(
        [needed("bash"), "-c", shell], env={"PATH": path}, capture_output=True, text=True, timeout=60, check=True
    )
    assert set(done.stdout.split()) == expected
    assert done.stderr == ""


@pytest.mark.parametrize("script", ["zsh", "fish"], indirect=True)
def test_the_other_shells_take_it(script: str, request: pytest.FixtureRequest) -> None:
    shell = request.node.callspec.params["script"]
    done = subprocess.run([needed(shell), "-n"], input=script, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["stat"], {"status"}),
        (["wh"], {"why"}),
        (["pods", "--name"], {"--namespace"}),
        (["pods", "--all"], {"--all-namespaces"}),
        (["leaks", "--wa"], {"--watch"}),
        (["status", "--no"], {"--no-headers"}),
        (["networks", "-o", ""], {"json", "yaml", "wide", "name"}),
        (["why", "-o", ""], {"json", "yaml"}),
        (["--ver"], {"--version"}),
    ],
)
def test_kubectl(words: list[str], expected: set[str]) -> None:
    """kubectl completes a plugin by the program `kubectl_complete-NAME`, with the words typed so far."""
    program = PROGRAMS / "kubectl_complete-multus"
    assert program.exists(), "installed beside kubectl-multus"
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=True)
    *offered, directive = done.stdout.split()

    assert ({word.strip() for word in offered}, directive) == (expected, ":4")
    assert done.stderr == ""
