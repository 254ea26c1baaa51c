"""Test how `make e2e` calls the image builder. The tools are shell scripts; no image is built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAILS = "#!/bin/sh\necho no space left on device >&2\nexit 125\n"


def build(tmp_path: Path, tools: dict[str, str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run the builder where only these tools are there, and nothing has been built."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in tools.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return subprocess.run(
        [sys.executable, "-m", "tests.e2e.cluster.daemon_image"],
        env={"PATH": str(programs), "XDG_CACHE_HOME": str(tmp_path / "cache"), **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_tool_the_tests_are_skipped_and_that_is_said(tmp_path: Path) -> None:
    done = build(tmp_path, {"debootstrap": FAILS})
    assert done.returncode == 0, done.stderr
    assert "apt-get install buildah" in done.stdout
    assert "skipped" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="the image is built as root only: run as root")
def test_a_build_that_fails_fails(tmp_path: Path) -> None:
    done = build(tmp_path, {"buildah": FAILS, "debootstrap": FAILS})
    assert done.returncode == 1
    assert "no space left on device" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.tar"))


def test_another_image_can_be_named(tmp_path: Path) -> None:
    image = tmp_path / "image.tar"
    image.touch()
    done = build(tmp_path, {}, MULTUS_IMAGE_TAR=str(image))
    assert (done.returncode, done.stdout) == (0, f"daemon_image: it is {image}\n")


def test_a_named_image_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = build(tmp_path, {}, MULTUS_IMAGE_TAR="/nowhere.tar")
    assert done.returncode == 1
    assert "MULTUS_IMAGE_TAR is '/nowhere.tar', where no file is" in done.stderr
