"""The build: every architecture from one machine, nothing compiled twice, errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import typing

import pytest

from multus_daemon import deadlines
from multus_shim import build
from tests.fuzz.__main__ import compile_shim

MACHINES = {"x86_64": 62, "aarch64": 183, "armv7": 40, "ppc64le": 21, "s390x": 22, "riscv64": 243}
"""ELF e_machine of each architecture."""

STAND_IN = """
import json, pathlib, sys

here = pathlib.Path(__file__).parent
if sys.argv[1] == "version":
    print((here / "version").read_text())
else:
    given = dict(argument.partition("=")[::2] for argument in sys.argv if "=" in argument)
    with open(here / "calls", "a") as calls:
        calls.write(json.dumps([sys.argv[1:], pathlib.Path(given["-Mbuild_options"]).read_text()]) + "\\n")
    pathlib.Path(given["-femit-bin"]).write_text("compiled")
"""
"""A compiler that only notes how it is called; `python -m ziglang` finds it in the current directory."""


def zig() -> bool:
    return importlib.util.find_spec("ziglang") is not None


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of what the build reads, so that the caches of the real tree are neither used nor touched."""
    root = tmp_path / "tree"
    shutil.copytree(build.ROOT / "multus_shim", root / "multus_shim", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "multus_daemon").mkdir()
    (root / "multus_daemon/__init__.py").write_text('"""x"""\n\n__version__ = "7.8.9rc1"\n')
    shutil.copyfile(build.ROOT / "multus_daemon/deadlines.py", root / "multus_daemon/deadlines.py")
    return root


class Calls:
    """The stand-in's notes."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def __call__(self) -> list[tuple[list[str], str]]:
        """Arguments and build options of each compilation so far."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [typing.cast("tuple[list[str], str]", tuple(json.loads(line))) for line in lines]


@pytest.fixture
def calls(tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The stand-in takes the compiler's place in `tree`, which becomes the current directory."""
    folder = tree / "ziglang"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(STAND_IN)
    (folder / "version").write_text(build.ZIG)
    monkeypatch.chdir(tree)
    return Calls(folder)


# Six seconds of processor time for each, the first time. The compiled ones are kept in the tree's `build/` under a hash
# of all that goes into them (`test_what_goes_into_a_binary_decides_whether_it_is_compiled_again`).
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", MACHINES)
def test_architecture(tmp_path: pathlib.Path, arch: str) -> None:
    if not zig():
        pytest.skip(f"no Zig compiler: pip install ziglang=={build.ZIG}")
    if not (build.ROOT / "multus_daemon/__init__.py").is_file():
        pytest.skip("not a source tree: run the tests from one")
    image = build.build(arch, tmp_path / "shim").read_bytes()
    assert image[:4] == b"\x7fELF"
    assert struct.unpack(">H" if image[5] == 2 else "<H", image[18:20])[0] == MACHINES[arch]
    assert len(image) <= 200 * 1024
    assert b"/ld-" not in image  # the name of a dynamic loader
    assert f"multus-shim/{build.version()}".encode() in image


def test_there_is_no_stack_protector_without_a_c_library(tmp_path: pathlib.Path) -> None:
    """If there is one now, build with it, and change SECURITY.md, which says why the shim has none."""
    if not zig():
        pytest.skip(f"no Zig compiler: pip install ziglang=={build.ZIG}")
    (tmp_path / "empty.zig").write_text("pub fn main() void {}\n")
    command = [
        *(sys.executable, "-m", "ziglang", "build-exe", *build.TARGETS["x86_64"], *build.FLAGS, "-fstack-protector"),
        *("--cache-dir", "cache", "--global-cache-dir", "cache", "empty.zig"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "enabling stack protection requires libc" in done.stderr


def test_all_architectures_in_one_call(tree: pathlib.Path, tmp_path: pathlib.Path, calls: Calls) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "multus_shim.build", "--arch", "all", "--out", str(out)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in out.iterdir()} == {f"multus-shim-{arch}" for arch in MACHINES}
    assert all(p.read_text() == "compiled" and p.stat().st_mode & 0o777 == 0o755 for p in out.iterdir())
    assert len(calls()) == len(MACHINES)
    for (arguments, options), target in zip(calls(), build.TARGETS.values(), strict=True):
        assert arguments[0] == "build-exe"
        assert tuple(arguments[1 : 1 + len(target)]) == target
        assert set(build.FLAGS) <= set(arguments)
        assert f"-Mroot={tree}/multus_shim/shim.zig" in arguments
        assert options.startswith('pub const version = "7.8.9rc1";\n')
        assert f"    pub const reply_ms = {deadlines.SHIM_REPLY_SECONDS * 1000:.0f};\n" in options
    shutil.rmtree(out)
    subprocess.run(command, cwd=tree, capture_output=True, check=True)
    assert len(list(out.iterdir())) == len(MACHINES)
    assert len(calls()) == len(MACHINES)  # nothing is compiled again


def replace(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


CHANGES: dict[str, typing.Callable[[pathlib.Path, pytest.MonkeyPatch], object]] = {
    "source": lambda tree, _: (tree / "multus_shim/text.zig").write_text("// another\n"),
    "new source": lambda tree, _: (tree / "multus_shim/zzz.zig").touch(),
    "version": lambda tree, _: (tree / "multus_daemon/__init__.py").write_text('__version__ = "7.8.9"\n'),
    "deadline": lambda tree, _: replace(
        tree / "multus_daemon/deadlines.py", "REPLY_SECONDS = 180.0", "REPLY_SECONDS = 181.0"
    ),
    "compiler": lambda tree, _: (tree / "ziglang/version").write_text("99.0.0"),
    "flags": lambda _, patch: patch.setattr(build, "FLAGS", (*build.FLAGS, "-x")),
    "target": lambda _, patch: patch.setitem(build.TARGETS, "x86_64", ("-target", "another")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_goes_into_a_binary_decides_whether_it_is_compiled_again(
    tree: pathlib.Path, tmp_path: pathlib.Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        build.build("x86_64", out, tree)
    assert len(calls()) == 1
    CHANGES[change](tree, monkeypatch)
    build.build("x86_64", out, tree)
    assert len(calls()) == 2


def test_what_else_the_table_says_compiles_nothing(tree: pathlib.Path, tmp_path: pathlib.Path, calls: Calls) -> None:
    build.build("x86_64", tmp_path / "out", tree)
    replace(tree / "multus_daemon/deadlines.py", "\nDRAIN_SECONDS = 20.0", "\nDRAIN_SECONDS = 21.0")
    build.build("x86_64", tmp_path / "out", tree)
    assert len(calls()) == 1


def test_the_sources_use_every_deadline_and_no_other() -> None:
    """Zig looks only at what is used, so that it tells of a missing one, but not of one too many."""
    text = "".join(path.read_text() for path in (build.ROOT / "multus_shim").glob("*.zig"))
    assert set(re.findall(r"\bdeadlines\.(\w+_ms)\b", text)) == set(build.deadlines())


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ("SHIM_REPLY_SECONDS = 0.0015\n", r"SHIM_REPLY_SECONDS in .* is no whole number of milliseconds: 0\.0015"),
        ("import does_not_exist\n", "cannot read the deadlines from .*does_not_exist"),
        (None, "cannot read the deadlines from .*No such file"),
    ],
)
def test_deadlines_that_are_of_no_use(tmp_path: pathlib.Path, table: str | None, complaint: str) -> None:
    (tmp_path / "multus_daemon").mkdir()
    if table is not None:
        (tmp_path / "multus_daemon/deadlines.py").write_text(table)
    with pytest.raises(build.BuildError, match=complaint):
        build.deadlines(tmp_path)


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


def test_compiler_errors_are_shown(tree: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not zig():
        pytest.skip(f"no Zig compiler: pip install ziglang=={build.ZIG}")
    # One that the real compiler finds before it compiles anything.
    monkeypatch.setitem(build.TARGETS, "vax", ("-target", "vax-linux-none"))
    with pytest.raises(build.BuildError, match=r"(?s)failed for vax:.*'vax'"):
        build.build("vax", tmp_path / "x", tree)
    assert not (tmp_path / "x").exists()
    assert list((tree / "build/multus-shim").iterdir()) == []


def test_no_sources(tmp_path: pathlib.Path) -> None:
    with pytest.raises(build.BuildError, match="source tree"):
        build.build("x86_64", tmp_path / "x", tmp_path)
    with pytest.raises(build.BuildError, match="unknown architecture"):
        build.build("vax", tmp_path / "x", tmp_path)
