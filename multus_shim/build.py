"""Compile the shim: a static binary for this machine, or for any architecture a node may have.

    python -m multus_shim.build                     # this machine's, into the environment's bin folder
    python -m multus_shim.build --arch all --out D  # D/multus-shim-x86_64, D/multus-shim-aarch64, ...

The compiler and all targets come with the `ziglang` wheel. NB: the wheel's build hook (`hatch_build.py`) loads this
module by its path, so it imports the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import typing

ROOT = pathlib.Path(__file__).resolve().parent.parent
"""The source tree with `multus_shim/` and `multus_daemon/`."""
NAME = "multus-shim"
"""File name of the binary, and the CNI plugin type in the generated configuration."""
ZIG = "0.17.0"
"""Version of the compiler. Zig's standard library changes with every release."""
TARGETS: typing.Final[dict[str, tuple[str, ...]]] = {
    "x86_64": ("-target", "x86_64-linux-none", "-mcpu=baseline"),
    "aarch64": ("-target", "aarch64-linux-none", "-mcpu=baseline"),
    "armv7": ("-target", "arm-linux-musleabihf", "-mcpu=baseline+v7a+vfp3d16"),
    "ppc64le": ("-target", "powerpc64le-linux-musl", "-mcpu=baseline"),
    "s390x": ("-target", "s390x-linux-none", "-mcpu=baseline"),
    "riscv64": ("-target", "riscv64-linux-none", "-mcpu=baseline"),
}
"""Compiler arguments for each architecture of Kubernetes nodes."""

# With safety checks, so that a bug becomes a CNI error; one thread and no symbols keep the binary small.
FLAGS: typing.Final = ("-O", "safe", "-fstrip", "-fsingle-threaded")


class BuildError(Exception):
    """The shim could not be compiled; the message has reason and remedy."""


def machine() -> str:
    """Return the name of this machine in `TARGETS`. Raises BuildError for other machines."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the shim runs on Linux only, and this is {sys.platform}; build with --arch on any machine")
    name = platform.machine()
    if name == "aarch64" and sys.maxsize < 2**32:
        name = "armv7"  # a 32-bit interpreter on a 64-bit kernel
    arch = {"arm64": "aarch64", "armv7l": "armv7", "armv8l": "armv7", "amd64": "x86_64"}.get(name, name)
    if arch not in TARGETS:
        raise BuildError(f"no shim target for the machine {name!r}; known: {', '.join(TARGETS)}")
    return arch


def version(root: pathlib.Path = ROOT) -> str:
    """Return `__version__` of `multus_daemon/__init__.py` without importing it. Raises BuildError."""
    path = root / "multus_daemon" / "__init__.py"
    try:
        line = re.search(r'^__version__\s*(?::\s*\S+\s*)?=\s*"([^"\\]+)"', path.read_text("utf-8"), re.MULTILINE)
    except OSError as e:
        raise BuildError(f"cannot read the version from {path}: {e.strerror}") from e
    if not line:
        raise BuildError(f'no line `__version__ = "..."` in {path}')
    return line[1]


def deadlines(root: pathlib.Path = ROOT) -> dict[str, int]:
    """Return the shim's deadlines in `multus_daemon/deadlines.py`: SHIM_REPLY_SECONDS is `reply_ms`.

    Raises BuildError if the file can't be loaded, or if a deadline is not a whole number of milliseconds.
    """
    path = root / "multus_daemon" / "deadlines.py"
    try:
        table = runpy.run_path(str(path))
    except Exception as e:
        raise BuildError(f"cannot read the deadlines from {path}: {e}") from e
    milliseconds: dict[str, int] = {}
    for name, seconds in table.items():
        if matched := re.fullmatch(r"SHIM_(\w+)_SECONDS", name):
            ms = seconds * 1000
            if ms != int(ms):
                raise BuildError(f"{name} in {path} is no whole number of milliseconds: {seconds}")
            milliseconds[f"{matched[1].lower()}_ms"] = int(ms)
    return milliseconds


def options(root: pathlib.Path = ROOT) -> str:
    """Return the module `build_options` of the Zig sources: version and deadlines. Raises BuildError."""
    # A version has no escapes, so its JSON string is a Zig string.
    lines = [f"pub const version = {json.dumps(version(root))};", "pub const deadlines = struct {"]
    lines += [f"    pub const {name} = {ms};" for name, ms in deadlines(root).items()]
    return "\n".join([*lines, "};", ""])


def compiler_version() -> str:
    """Return the version of this interpreter's Zig compiler. Raises BuildError if there is none."""
    command = [sys.executable, "-m", "ziglang", "version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"no Zig compiler for {sys.executable}: pip install ziglang=={ZIG}")
    return done.stdout.strip()


def build(arch: str, out: pathlib.Path, root: pathlib.Path = ROOT) -> pathlib.Path:
    """Build the shim for `arch` at the path `out` and return it. Raises BuildError.

    Binaries are cached in `build/multus-shim/` under a hash of their inputs, or in a temporary folder for a read-only
    tree.
    """
    if arch not in TARGETS:
        raise BuildError(f"unknown architecture {arch!r}; known: {', '.join(TARGETS)}")
    sources = sorted((root / "multus_shim").glob("*.zig"))
    if not sources:
        raise BuildError(f"no Zig sources in {root / 'multus_shim'}; the shim is built from a source tree only")
    given = options(root)
    with tempfile.TemporaryDirectory(prefix="multus-shim-") as scratch:
        store = _store(root, pathlib.Path(scratch))
        kept = store / f"{NAME}-{arch}-{_key(arch, given, compiler_version(), sources)}"
        if not kept.is_file():
            _compile(arch, given, root, store, kept)
        out.parent.mkdir(parents=True, exist_ok=True)
        # Replaced atomically: the old shim may be running.
        beside = out.with_name(f".{out.name}.{os.getpid()}")
        shutil.copyfile(kept, beside)
        beside.chmod(0o755)
        beside.replace(out)
    return out


def _store(root: pathlib.Path, scratch: pathlib.Path) -> pathlib.Path:
    store = root / "build" / NAME
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError:
        return scratch
    return store if os.access(store, os.W_OK) else scratch


def _key(arch: str, given: str, compiler: str, sources: list[pathlib.Path]) -> str:
    texts = {path.name: path.read_text("utf-8") for path in sources}
    everything = json.dumps([TARGETS[arch], FLAGS, given, compiler, texts])
    return hashlib.sha256(everything.encode()).hexdigest()[:20]


def _compile(arch: str, given: str, root: pathlib.Path, store: pathlib.Path, result: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=store) as scratch:
        generated = pathlib.Path(scratch) / "build_options.zig"
        generated.write_text(given, "utf-8")
        binary = pathlib.Path(scratch) / NAME
        # Not shared, as several builds may run at once; it would save two seconds at most.
        cache = pathlib.Path(scratch) / "zig-cache"
        command = [
            *(sys.executable, "-m", "ziglang", "build-exe"),
            *TARGETS[arch],
            *FLAGS,
            *("--cache-dir", str(cache), "--global-cache-dir", str(cache)),
            *(f"-femit-bin={binary}", "--dep", "build_options"),
            *(f"-Mroot={root / 'multus_shim' / 'shim.zig'}", f"-Mbuild_options={generated}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not binary.is_file():
            hint = "" if compiler_version() == ZIG else f"\nThe sources are written for ziglang=={ZIG}."
            raise BuildError(f"zig {compiler_version()} failed for {arch}:\n{done.stderr.strip()}{hint}")
        binary.replace(result)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m multus_shim.build", description="Compile the CNI shim.")
    parser.add_argument("--arch", choices=[*TARGETS, "all"], help="whose binary to build (default: this machine's)")
    parser.add_argument(
        "--out", type=pathlib.Path, help="folder for the result (default: the bin folder of this environment)"
    )
    given = parser.parse_args(arguments)
    folder: pathlib.Path = given.out or pathlib.Path(sysconfig.get_path("scripts"))
    try:
        if given.arch == "all":
            jobs = [(arch, folder / f"{NAME}-{arch}") for arch in TARGETS]
        else:
            jobs = [(given.arch or machine(), folder / NAME)]
        for arch, path in jobs:
            build(arch, path)
            print(f"{path}  {arch}  {path.stat().st_size} bytes")
    except BuildError as e:
        print(f"multus_shim.build: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
