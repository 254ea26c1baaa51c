"""The shells' completion of multusctl, as the shells run it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from multus_daemon.tools import ctl


@pytest.fixture
def script(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    ctl.main(["completion", request.param])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("multusctl stat", {"status"}),
        ("multusctl sandbox u", {"up"}),
        ("multusctl attachments --l", {"--leaks"}),
        ("multusctl attachments default/a --ch", {"--check"}),
        ("multusctl completion ", {"bash", "zsh", "fish", "--help"}),
        ("multusctl nonsense ", set()),
    ],
)
@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash(script: str, words: str, expected: set[str]) -> None:
    typed = words.split(" ")
    array = " ".join(f'"{word}"' for word in typed)
    shell = (
        f'{script}\nCOMP_WORDS=({array}); COMP_CWORD={len(typed) - 1}; _multusctl; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=30, check=True)
    assert set(done.stdout.split()) == expected
    assert done.stderr == ""


@pytest.mark.parametrize("script", ["zsh", "fish"], indirect=True)
def test_the_other_shells_take_it(script: str, request: pytest.FixtureRequest) -> None:
    shell = request.node.callspec.params["script"]
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}; on Debian and Ubuntu: apt-get install {shell}")
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
