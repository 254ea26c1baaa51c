"""The build: every architecture from one machine, nothing compiled twice, errors that say what to do."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import struct
import subprocess
import sys
import time

import pytest

from multus_shim import build
from tests.fuzz.__main__ import compile_shim

MACHINES = {"x86_64": 62, "aarch64": 183, "armv7": 40, "ppc64le": 21, "s390x": 22, "riscv64": 243}
"""ELF e_machine of each architecture."""


def zig() -> bool:
    return importlib.util.find_spec("ziglang") is not None


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of what the build reads, so that the caches of the real tree are neither used nor touched."""
    root = tmp_path / "tree"
    shutil.copytree(build.ROOT / "multus_shim", root / "multus_shim", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "multus_daemon").mkdir()
    (root / "multus_daemon/__init__.py").write_text('"""x"""\n\n__version__ = "7.8.9rc1"\n')
    return root


# About half a minute on two cores, more when they are busy: every architecture is compiled for the first time.
@pytest.mark.timeout(600)
def test_all_architectures(tree: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if not zig():
        pytest.skip(f"no Zig compiler: pip install ziglang=={build.ZIG}")
    if not (build.ROOT / "multus_daemon/__init__.py").is_file():
        pytest.skip("not a source tree: run the tests from one")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "multus_shim.build", "--arch", "all", "--out", str(out)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in out.iterdir()} == {f"multus-shim-{arch}" for arch in MACHINES}
    for arch, number in MACHINES.items():
        image = (out / f"multus-shim-{arch}").read_bytes()
        assert image[:4] == b"\x7fELF"
        assert struct.unpack(">H" if image[5] == 2 else "<H", image[18:20])[0] == number
        assert len(image) <= 200 * 1024, arch
        assert b"/ld-" not in image  # the name of a dynamic loader
        assert b"7.8.9rc1" in image
    began = time.monotonic()
    subprocess.run(command, cwd=tree, capture_output=True, check=True)
    assert time.monotonic() - began < 10  # nothing is compiled again


@pytest.mark.timeout(300)
def test_what_is_fuzzed_is_the_present_shim(tmp_path: pathlib.Path) -> None:
    if not zig():
        pytest.skip(f"no Zig compiler: pip install ziglang=={build.ZIG}")
    compile_shim(tmp_path, check_only=True)


def test_names_and_machines_agree() -> None:
    assert set(build.TARGETS) == set(MACHINES)
    assert build.machine() in build.TARGETS


@pytest.mark.parametrize(
    ("machine", "arch"),
    [("x86_64", "x86_64"), ("aarch64", "aarch64"), ("armv7l", "armv7"), ("armv8l", "armv7"), ("s390x", "s390x")],
)
def test_machine(monkeypatch: pytest.MonkeyPatch, machine: str, arch: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert build.machine() == arch


def test_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(build.BuildError, match=r"'vax'; known: x86_64, "):
        build.machine()


@pytest.mark.parametrize("line", ['__version__ = "1.2.3"', '__version__: str = "1.2.3"', '__version__="1.2.3"  # x'])
def test_version_is_read_without_import(tmp_path: pathlib.Path, line: str) -> None:
    (tmp_path / "multus_daemon").mkdir()
    (tmp_path / "multus_daemon/__init__.py").write_text(f"import does_not_exist\n{line}\n")
    assert build.version(tmp_path) == "1.2.3"


def test_version_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(build.BuildError, match="No such file"):
        build.version(tmp_path)
    (tmp_path / "multus_daemon").mkdir()
    (tmp_path / "multus_daemon/__init__.py").write_text("version = '1'\n")
    with pytest.raises(build.BuildError, match="__version__"):
        build.version(tmp_path)


def test_no_compiler(tmp_path: pathlib.Path, tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(build.BuildError, match=f"pip install ziglang=={build.ZIG}"):
        build.build(build.machine(), tmp_path / "x", tree)


def test_compiler_errors_are_shown(tree: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if not zig():
        pytest.skip(f"no Zig compiler: pip install ziglang=={build.ZIG}")
    (tree / "multus_shim/shim.zig").write_text("pub fn main() void { nonsense(); }\n")
    with pytest.raises(build.BuildError, match="nonsense"):
        build.build(build.machine(), tmp_path / "x", tree)
    assert not (tmp_path / "x").exists()


def test_no_sources(tmp_path: pathlib.Path) -> None:
    with pytest.raises(build.BuildError, match="source tree"):
        build.build("x86_64", tmp_path / "x", tmp_path)
    with pytest.raises(build.BuildError, match="unknown architecture"):
        build.build("vax", tmp_path / "x", tmp_path)
